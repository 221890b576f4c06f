"""FLOP/s and bytes/s that a device can reach; MFU is the share of the FLOP/s that a run uses."""
import functools
import re
import time
from typing import NamedTuple

import torch

from nanochat.runtime.devices import synchronize
from nanochat.runtime.errors import UserError

# Dense bf16 peaks of the datasheets, in FLOP/s, by a part of the name that torch reports; the first match wins.
PEAK_BF16 = {
    "GB200": 2.5e15, "B200": 2.25e15, "H200": 989e12, "GH200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12,
    "H100": 989e12, "A100": 312e12, "A40": 149.7e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12,
    "MI300X": 1307e12, "RTX 5090": 209.5e12, "RTX 4090": 165.2e12, "RTX 3090": 71e12,
}
# Bytes/s of their memories, from the same datasheets; the A100 is the smaller one, with 40 GB.
BANDWIDTH = {
    "GB200": 8e12, "B200": 8e12, "H200": 4.8e12, "GH200": 4e12, "H100 NVL": 3.9e12, "H100 PCIe": 2e12,
    "H100": 3.35e12, "A100": 1.555e12, "A40": 0.696e12, "A10G": 0.6e12, "A10": 0.6e12, "L40S": 0.864e12,
    "L4": 0.3e12, "MI300X": 5.3e12, "RTX 5090": 1.792e12, "RTX 4090": 1.008e12, "RTX 3090": 0.936e12,
}


class Gpu(NamedTuple):
    name: str
    peak: float         # FLOP/s in bfloat16
    bandwidth: float    # bytes/s of its memory


def datasheet_gpu(name: str) -> Gpu:
    """A GPU by its name in the table, in any case. UserError for any other name."""
    for known in PEAK_BF16:
        if known.lower() == name.lower():
            return Gpu(known, PEAK_BF16[known], BANDWIDTH[known])
    raise UserError(f"gpu={name} is not in the table; expected one of {', '.join(PEAK_BF16)}")


def gpu_here(device: torch.device) -> Gpu:
    """The device's datasheet rates; a device that is not in the table gets an H100's ratio of bytes to FLOPs."""
    peak = peak_flops(device, torch.bfloat16)
    name = gpu_name(device) if device.type == "cuda" else ""
    return Gpu(name or device.type.upper(), peak, BANDWIDTH.get(name, peak * BANDWIDTH["H100"] / PEAK_BF16["H100"]))


def gpu_name(device: torch.device) -> str:
    """The table's name for this GPU; "" if it has none."""
    name = torch.cuda.get_device_name(device)
    # Whole words, because an RTX A4000 is no A40.
    return next((part for part in PEAK_BF16 if re.search(rf"\b{part}\b", name)), "")


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """
    Peak FLOP/s of one device: for a GPU in the table, its datasheet's bf16 peak; for everything else, the best of two
    2048³ matrix products in `dtype`, measured at the first call. Then MFU is the share of that rate.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        if name := gpu_name(device):
            return PEAK_BF16[name]
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
