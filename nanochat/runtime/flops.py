"""FLOP/s and bytes/s that a device can reach; MFU is the share of the FLOP/s that a run uses."""
import functools
import re
import timeit
from typing import NamedTuple

import torch

from nanochat.runtime.devices import compute_dtype, synchronize
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import read_toml


class Gpu(NamedTuple):
    name: str
    peak: float         # dense FLOP/s in `dtype`
    bandwidth: float    # bytes/s of its memory
    memory: float       # GB
    bfloat16: bool = True  # whether that is the dtype in which it trains (`compute_dtype`), or float32
    price: float = 0    # dollars per hour, guessed; 0: unknown

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bfloat16 else torch.float32


TABLE = read_toml("runtime/gpus.toml")
GPUS = [Gpu(**row) for row in TABLE["gpus"]]
FLOPS_PER_BYTE = 989e12 / 3.35e12  # of an H100


def find_gpu(text: str, memory: float = 0) -> Gpu | None:
    """
    The first GPU of the table whose name is in a text, in any case, with or without blanks, hyphens and RTX, and that
    has at most this memory, or little more: torch reports less than the datasheet. 0: any.
    """
    for gpu in GPUS:
        name = gpu.name.replace("RTX ", "(RTX )?").replace(" ", "[ -]?")
        is_named = re.search(rf"\b{name}\b", text, re.IGNORECASE)  # whole words, because an RTX A4000 is no A40
        if is_named and (not memory or memory > 0.85 * gpu.memory):
            return gpu._replace(memory=memory or gpu.memory)
    return None


def datasheet_gpu(text: str) -> Gpu:
    """A GPU of the table by its name, perhaps with its GB: "A100,40". UserError for any other name."""
    words = re.fullmatch(r"([^,]+)(?:,([1-9]\d*))?", text)
    gpu = find_gpu(words[1], float(words[2] or 0)) if words else None
    if gpu is None:
        names = "; ".join(f"{gpu.name.replace(' ', '')},{gpu.memory:g}" for gpu in GPUS)
        raise UserError(f"gpu={text}: expected a name, perhaps with its GB: {names}")
    return gpu


def gpu_here(device: torch.device) -> Gpu:
    """
    The device's datasheet rates, and its memory in GiB. A device that is not in the table gets a measured peak, and an
    H100's ratio of FLOPs to bytes.
    """
    memory = 0.0
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory / 2**30
        gpu = find_gpu(properties.name, memory)
        if gpu:
            return gpu
    dtype = compute_dtype("auto", device)
    peak = measured_matmul_flops(device, dtype)
    return Gpu(device.type.upper(), peak, peak / FLOPS_PER_BYTE, memory, dtype == torch.bfloat16)


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """
    Peak FLOP/s of one device: its datasheet's, if that is for `dtype`; for everything else, the best of two 2048³
    matrix products in `dtype`, measured at the first call. Then MFU is the share of that rate.
    """
    gpu = gpu_here(device)
    if gpu.dtype == dtype:
        return gpu.peak
    return measured_matmul_flops(device, dtype)


def measured_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """
    FLOP/s of A @ B, both 2048 x 2048: the best of two after a warm-up. A slow processor takes half a second for each,
    and a run waits for them.
    """
    a, b = torch.randn(2, 2048, 2048, device=device).to(dtype)

    def multiply() -> None:
        a @ b
        synchronize(device)

    seconds = timeit.repeat(multiply, number=1, repeat=3)
    return 2 * 2048**3 / min(seconds[1:])
