"""FLOP/s that a device can reach, for the share of them that a run makes use of (MFU)."""
import functools
import re
import time

import torch

from nanochat.runtime.devices import synchronize
from nanochat.runtime.errors import UserError

# Dense bf16 peaks of the datasheets, in FLOP/s, by a part of the name that torch reports; the first match wins.
PEAK_BF16 = {
    "GB200": 2.5e15, "B200": 2.25e15, "H200": 989e12, "GH200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12,
    "H100": 989e12, "A100": 312e12, "A40": 149.7e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12,
    "MI300X": 1307e12, "RTX 5090": 209.5e12, "RTX 4090": 165.2e12, "RTX 3090": 71e12,
}


def datasheet_peak(gpu: str) -> float:
    """Dense bf16 FLOP/s of a GPU by its name in the table, in any case. UserError for any other name."""
    for name, peak in PEAK_BF16.items():
        if name.lower() == gpu.lower():
            return peak
    raise UserError(f"gpu={gpu} is not in the table; expected one of {', '.join(PEAK_BF16)}")


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """
    FLOP/s of one device at best. A GPU in the table counts as its datasheet's bf16 peak; everything else as the best of
    two 2048³ matrix products in `dtype`, measured at the first call: then MFU reads as the share of that rate.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, peak in PEAK_BF16.items():
            # Whole words, because an RTX A4000 is no A40.
            if re.search(rf"\b{part}\b", name):
                return peak
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
