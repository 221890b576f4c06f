"""FLOP/s and bytes/s that a device can reach; MFU is the share of the FLOP/s that a run uses."""
import functools
import re
import time
from typing import NamedTuple

import torch

from nanochat.runtime.devices import synchronize
from nanochat.runtime.errors import UserError


class Gpu(NamedTuple):
    name: str
    peak: float         # dense FLOP/s in bfloat16
    bandwidth: float    # bytes/s of its memory
    memory: float = 0   # GB; 0: sold with several sizes, or unknown


# From the datasheets, by a part of the name that torch reports; the first match wins. The A100 is the one with 40 GB.
GPUS = [
    Gpu("GB200", 2.5e15, 8e12), Gpu("B200", 2.25e15, 8e12, 180), Gpu("H200", 989e12, 4.8e12, 141),
    Gpu("GH200", 989e12, 4e12, 96), Gpu("H100 NVL", 835e12, 3.9e12), Gpu("H100 PCIe", 756e12, 2e12),
    Gpu("H100", 989e12, 3.35e12, 80), Gpu("A100", 312e12, 1.555e12), Gpu("A40", 149.7e12, 0.696e12, 48),
    Gpu("A10G", 70e12, 0.6e12, 24), Gpu("A10", 125e12, 0.6e12, 24), Gpu("L40S", 362e12, 0.864e12, 48),
    Gpu("L4", 121e12, 0.3e12, 24), Gpu("MI300X", 1307e12, 5.3e12, 192), Gpu("RTX 5090", 209.5e12, 1.792e12, 32),
    Gpu("RTX 4090", 165.2e12, 1.008e12, 24), Gpu("RTX 3090", 71e12, 0.936e12, 24),
]
FLOPS_PER_BYTE = 989e12 / 3.35e12  # of an H100


def datasheet_gpu(text: str) -> Gpu:
    """A GPU by its name in the table, in any case, perhaps with its GB: "A100,40". UserError for any other name."""
    name, comma, memory = text.partition(",")
    for gpu in GPUS:
        if gpu.name.lower() == name.lower() and not comma:
            return gpu
        if gpu.name.lower() == name.lower() and memory.isdecimal():
            return gpu._replace(memory=float(memory))
    raise UserError(f"gpu={text}: expected one of {', '.join(gpu.name for gpu in GPUS)}, or with its GB: A100,40")


def gpu_here(device: torch.device) -> Gpu:
    """
    The device's datasheet rates. A device that is not in the table gets a measured peak, and an H100's ratio of FLOPs
    to bytes.
    """
    if device.type == "cuda":
        reported = torch.cuda.get_device_name(device)
        for gpu in GPUS:
            if re.search(rf"\b{gpu.name}\b", reported):  # whole words, because an RTX A4000 is no A40
                return gpu
    peak = measured_matmul_flops(device, torch.bfloat16)
    return Gpu(device.type.upper(), peak, peak / FLOPS_PER_BYTE)


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """
    Peak FLOP/s of one device: for a GPU in the table, its datasheet's bf16 peak; for everything else, the best of two
    2048³ matrix products in `dtype`, measured at the first call. Then MFU is the share of that rate.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        return gpu_here(device).peak
    return measured_matmul_flops(device, dtype)


def measured_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """
    FLOP/s of A @ B, both 2048 x 2048: the best of two after a warm-up. A slow processor takes half a second for each,
    and a run waits for them.
    """
    a, b = torch.randn(2, 2048, 2048, device=device).to(dtype)
    seconds = []
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        a @ b
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(seconds[1:])
