"""Devices: what a process computes on, in which dtype, and how memory is kept there."""
import ctypes
import os

import torch

from nanochat.runtime.errors import UserError, first_line


def choose_device_type(device_type: str) -> str:
    """
    The device type that was asked for; for "" cuda, or cpu without it (mps, Apple's GPUs, is untried: ask for it).
    UserError when it is not available, and when this node has GPUs that torch cannot use (most often because the driver
    is old): falling back to the CPU would hide that.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    count = torch.cuda.device_count()
    if device_type in ("", "cuda") and count and not available["cuda"]:
        why = "it does not say why"
        try:
            torch.cuda.init()
        except Exception as error:
            why = first_line(error)
        raise UserError(f"this node has {count} GPU(s), which torch {torch.__version__} cannot use: {why}\n"
                        "    `. ./setup.sh` says what suits the driver; --device_type=cpu computes on the CPU")
    if device_type == "":
        device_type = "cuda" if available["cuda"] else "cpu"
    if not available[device_type]:
        raise UserError(f"device_type={device_type}, but torch finds none here; leave it out for the best there is")
    return device_type


def prepare_device(device_type: str, local_rank: int) -> torch.device:
    """The device of this process, ready to use. UserError for more ranks on a node than it has GPUs."""
    if device_type == "cpu":
        keep_freed_memory()
    if device_type != "cuda":
        return torch.device(device_type)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(f"local rank {local_rank} has no GPU: this node has {count}; lower --nproc_per_node")
    # Read at the first allocation. A user's PYTORCH_CUDA_ALLOC_CONF takes precedence.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch.cuda.set_device(local_rank)
    # Products of float32 must not be rounded to TF32.
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    return torch.device("cuda", local_rank)


def keep_freed_memory() -> None:
    """
    Reuse the memory of freed tensors. Otherwise glibc gives large blocks back to the system, which clears every page
    again for the next tensor: a tenth of a step.
    """
    # Only glibc has mallopt.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-3, 2**31 - 1)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """
    The dtype of parameters and activations: `auto` is bfloat16 where the hardware multiplies it faster than
    float32 (GPUs from Ampere on, CPUs with AVX512-BF16 or AMX), else float32.
    """
    if dtype != "auto":
        return getattr(torch, dtype)
    # On Apple GPUs bfloat16 has half the bytes and the same rate.
    fast = True
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    elif device.type == "cpu":
        has = torch.cpu.get_capabilities()
        # ATEN_CPU_CAPABILITY=avx2 limits torch's kernels on any CPU.
        limited = not torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        fast = (has.get("avx512_bf16") or has.get("amx_bf16")) and not limited
    return torch.bfloat16 if fast else torch.float32


def sum_dtype(device: torch.device) -> torch.dtype:
    """float64 for long sums, except on Apple GPUs, which lack it."""
    return torch.float32 if device.type == "mps" else torch.float64


def synchronize(device: torch.device) -> None:
    """Wait for the device to finish its queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
