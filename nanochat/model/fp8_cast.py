"""
A matrix in 8 bits by rows and by columns, read once. An H100 multiplies 8-bit operands only along contiguous numbers,
so a training step needs both, and in the code that torch generates the transposed one takes three times as long.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

# Rows and columns of what one program of the kernel casts: 2.8 of an H100's 3.35 TB/s.
BLOCK = 128


@torch.library.custom_op("nanochat::cast_both", mutates_args=())
def cast_both(x: Tensor | None, hidden: Tensor | None, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """
    value / scale as `dtype`: (N, K), and transposed (K, N). scale: float32, one number. value: x (N, K); without x
    relu(hidden)²; with both the gradient of hidden, x being that of relu(hidden)².
    """
    if hidden is None:
        value = x.float()
    else:
        value = F.relu(hidden).float()
        value = value.square() if x is None else 2 * value * x
    x8 = (value / scale).to(dtype)
    return x8, x8.T.clone(memory_format=torch.contiguous_format)


@cast_both.register_fake
def _(x: Tensor | None, hidden: Tensor | None, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (hidden if x is None else x).shape
    return scale.new_empty(shape, dtype=dtype), scale.new_empty(shape[::-1], dtype=dtype)


@cast_both.register_kernel("cuda")
def _(x: Tensor | None, hidden: Tensor | None, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from nanochat.model.fp8_kernel import cast_kernel  # Triton comes with torch for CUDA only

    rows, columns = (hidden if x is None else x).shape
    by_rows = scale.new_empty(rows, columns, dtype=dtype)
    by_columns = scale.new_empty(columns, rows, dtype=dtype)
    x, hidden = (tensor if tensor is None else tensor.contiguous() for tensor in (x, hidden))
    cast_kernel[-(-columns // BLOCK), -(-rows // BLOCK)](
        x, hidden, scale, by_rows, by_columns, rows, columns, x is not None, hidden is not None, BLOCK, num_warps=8)
    return by_rows, by_columns
