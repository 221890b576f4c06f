"""Products with constant weights, as decoding needs them: few rows of x, so that reading the weight takes the time."""
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(weight: Tensor, pack: bool = True) -> Callable[[Tensor], Tensor]:
    """
    The function x → x weightᵀ of x (N, C), in x's dtype, for a weight (O, C) that stays as it is. On a CPU the weight
    is laid out here, once: float32 as (C, O), along which a product of few rows reads memory at its rate; bfloat16 in
    the blocks that oneDNN reads, which F.linear makes in every call, unless pack is False: torch.compile cannot read
    them.
    """
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

