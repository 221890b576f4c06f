"""
Casts a matrix to 8 bits by rows and by columns in one read. An H100 multiplies 8-bit operands only along contiguous
numbers, so a training step needs both; torch's generated code writes the transposed copy slowly (docs/tried.md).
"""
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows and columns that one program of the kernel casts, and its warps: on an H100 the fastest of eight (docs/tried.md).
ROWS, COLUMNS, WARPS = 32, 128, 4


@torch.library.custom_op("nanochat::cast", mutates_args=())
def cast(
    parts: Sequence[Tensor], hidden: Tensor | None, scale: Tensor, dtype: torch.dtype, by_columns: bool = True,
    factor: Tensor | None = None, square_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    value / scale as `dtype`, (N, K); the same transposed, (K, N), empty without by_columns; with square_scale, also
    relu(hidden)² / square_scale in e4m3, transposed. scale, square_scale: float32, one number.
    value: the parts (N, K_i) side by side. Or, with hidden (N, K) and no part, relu(hidden)²; with one part, the
    gradient of hidden, the part being that of relu(hidden)². factor: (N,) float32, multiplies each row.
    """
    if hidden is None:
        value = torch.cat([part.float() for part in parts], dim=1)
    else:
        root = F.relu(hidden).float()
        value = 2 * root * parts[0] if parts else root.square()
    if factor is not None:
        value = value * factor[:, None]
    rows, columns, squares = empty(parts or [hidden], dtype, by_columns, square_scale)
    value = (value * (1 / scale)).to(dtype)
    rows.copy_(value)
    if by_columns:
        columns.copy_(value.T)
    if square_scale is not None:
        squares.copy_((root.square() * (1 / square_scale)).T)
    return rows, columns, squares


def empty(
    values: Sequence[Tensor], dtype: torch.dtype, by_columns: bool, square_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    shape = len(values[0]), sum(value.size(1) for value in values)
    new = values[0].new_empty
    return (new(shape, dtype=dtype), new(shape[::-1] if by_columns else 0, dtype=dtype),
            new(shape[::-1] if square_scale is not None else 0, dtype=torch.float8_e4m3fn))


@cast.register_fake
def _(parts, hidden, scale, dtype, by_columns=True, factor=None, square_scale=None):
    return empty(parts or [hidden], dtype, by_columns, square_scale)


@cast.register_kernel("cuda")
def _(parts, hidden, scale, dtype, by_columns=True, factor=None, square_scale=None):
    from nanochat.model.fp8_kernel import cast_kernel  # Triton comes with torch for CUDA only

    values = [value.contiguous() for value in parts or [hidden]]
    if hidden is not None:
        hidden = hidden.contiguous()
    rows, columns, squares = empty(values, dtype, by_columns, square_scale)
    start = 0
    for value in values:
        count, own = value.shape
        cast_kernel[-(-own // COLUMNS), -(-count // ROWS)](
            value if parts else None, hidden, factor, scale, square_scale, rows[:, start:], columns[start:], squares,
            count, own, rows.size(1), bool(parts), hidden is not None, factor is not None, by_columns,
            square_scale is not None, ROWS, COLUMNS, num_warps=WARPS)
        start += own
    return rows, columns, squares
