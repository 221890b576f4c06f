"""
Casts a matrix to 8 bits by rows and by columns in one read. An H100 multiplies 8-bit operands only along contiguous
numbers, so a training step needs both; torch's generated code writes the transposed copy slowly (docs/LOG.md).
"""
import torch
import torch.nn.functional as F
from torch import Tensor

# Rows and columns that one program of the kernel casts: 2.8 of an H100's 3.35 TB/s.
BLOCK = 128


@torch.library.custom_op("nanochat::cast", mutates_args=())
def cast(
    x: Tensor | None, hidden: Tensor | None, scale: Tensor, dtype: torch.dtype, by_rows: bool = True,
    by_columns: bool = True, factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """
    value / scale as `dtype`: (N, K), and transposed (K, N); an unwanted copy is empty. scale: float32, one number.
    value: x (N, K); without x, relu(hidden)²; with both, the gradient of hidden, x being that of relu(hidden)². factor:
    (N,) float32, multiplies each row.
    """
    if hidden is None:
        value = x.float()
    else:
        value = F.relu(hidden).float()
        value = value.square() if x is None else 2 * value * x
    if factor is not None:
        value = value * factor[:, None]
    rows, columns = empty(value, dtype, by_rows, by_columns)
    value = (value / scale).to(dtype)
    if by_rows:
        rows.copy_(value)
    if by_columns:
        columns.copy_(value.T)
    return rows, columns


def empty(like: Tensor, dtype: torch.dtype, by_rows: bool, by_columns: bool) -> tuple[Tensor, Tensor]:
    return (like.new_empty(like.shape if by_rows else 0, dtype=dtype),
            like.new_empty(like.shape[::-1] if by_columns else 0, dtype=dtype))


@cast.register_fake
def _(x, hidden, scale, dtype, by_rows=True, by_columns=True, factor=None):
    return empty(hidden if x is None else x, dtype, by_rows, by_columns)


@cast.register_kernel("cuda")
def _(x, hidden, scale, dtype, by_rows=True, by_columns=True, factor=None):
    from nanochat.model.fp8_kernel import cast_kernel  # Triton comes with torch for CUDA only

    x, hidden = (tensor if tensor is None else tensor.contiguous() for tensor in (x, hidden))
    value = hidden if x is None else x
    rows, columns = value.shape
    results = empty(value, dtype, by_rows, by_columns)
    cast_kernel[-(-columns // BLOCK), -(-rows // BLOCK)](
        x, hidden, factor, scale, *results, rows, columns, x is not None, hidden is not None, factor is not None,
        by_rows, by_columns, BLOCK, num_warps=8)
    return results
