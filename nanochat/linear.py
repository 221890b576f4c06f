"""Products with constant weights, as decoding needs them: few rows of x, so that reading the weight takes the time."""
from collections.abc import Callable
from functools import cache, partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.errors import UserError

INT8_ROWS = 32  # the kernel of int8 is for few rows; for more, a prompt's, the weight is made once what it was


def linear(weight: Tensor, quantize: Literal["", "int8"] = "", pack: bool = True) -> Callable[[Tensor], Tensor]:
    """
    The function x → x weightᵀ of x (N, C), in x's dtype, for a weight (O, C) that stays as it is. On a CPU the weight
    is laid out here, once: float32 as (C, O), along which a product of few rows reads memory at its rate; bfloat16 in
    the blocks that oneDNN reads, which F.linear makes in every call, unless pack is False: torch.compile cannot read
    them. quantize: keep it as `quantized` makes it. UserError for that on another device.
    """
    if quantize:
        if weight.device.type != "cpu":
            raise UserError(f"quantize={quantize} is for a CPU, not for {weight.device.type}; leave it out")
        return partial(quantized_product, *quantized(weight))
    if weight.device.type != "cpu":
        return partial(F.linear, weight=weight)
    if weight.dtype == torch.float32 or not pack or not can_pack(weight.dtype):
        return partial(torch.mm, mat2=weight.T.contiguous())
    return partial(packed_product, torch.ops.mkldnn._reorder_linear_weight(weight))


def packed_product(packed: Tensor, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether torch has these kernels for this CPU. They are not its public interface, so they are tried."""
    x, weight = torch.ones(4, 32, dtype=dtype), torch.ones(64, 32, dtype=dtype)
    try:
        return torch.equal(packed_product(torch.ops.mkldnn._reorder_linear_weight(weight), x), x @ weight.T)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """
    A weight (O, C) as values (O, C), int8, times scales (O,), bfloat16, one for each output: symmetric, rounded to the
    nearest. An element is off by at most half of its scale, and a scale is at most 1/126 of the row's largest element.
    """
    scales = (weight.float().abs().amax(1).clamp_(min=1e-30) / 126.5).bfloat16()  # its rounding stays within 127
    return (weight.float() / scales.float()[:, None]).round_().to(torch.int8), scales


def quantized_product(values: Tensor, scales: Tensor, x: Tensor) -> Tensor:
    if len(x) > INT8_ROWS:
        return F.linear(x, values.to(x.dtype) * scales.to(x.dtype)[:, None])
    # With float32 activations it takes ten times as long.
    return torch._weight_int8pack_mm(x.bfloat16(), values, scales).to(x.dtype)
