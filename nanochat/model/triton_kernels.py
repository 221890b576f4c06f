"""The kernels of GPUs, in a file of their own because torch for a CPU comes without Triton."""
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

# ---- The cast to 8 bits: see `cast` in fp8.py


@triton.jit
def cast_kernel(
    x, hidden, factor, scale, square_scale, by_rows, by_columns, squares, rows, columns, width, HAS_X: tl.constexpr,
    HAS_HIDDEN: tl.constexpr, HAS_FACTOR: tl.constexpr, BY_COLUMNS: tl.constexpr, SQUARES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """
    `cast` of one block: columns from program_id(0) · COLUMNS on, rows from program_id(1) · ROWS on. width: of by_rows.
    """
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    place = row[:, None] * columns + column[None, :]
    transposed = column[:, None] * rows + row[None, :]
    if HAS_X:
        value = tl.load(x + place, inside).to(tl.float32)
    if HAS_HIDDEN:
        root = tl.maximum(tl.load(hidden + place, inside).to(tl.float32), 0.0)
        if SQUARES:
            square = (root * root * tl.div_rn(1.0, tl.load(square_scale))).to(squares.dtype.element_ty)
            tl.store(squares + transposed, tl.trans(square), tl.trans(inside))
        if HAS_X:
            value = 2 * root * value
        else:
            value = root * root
    if HAS_FACTOR:
        value *= tl.load(factor + row, row < rows)[:, None]
    # div_rn rounds as torch does. It takes many instructions: dividing every number would take longer than all else.
    value = (value * tl.div_rn(1.0, tl.load(scale))).to(by_rows.dtype.element_ty)
    tl.store(by_rows + row[:, None] * width + column[None, :], value, inside)
    if BY_COLUMNS:
        tl.store(by_columns + transposed, tl.trans(value), tl.trans(inside))


# ---- The gradient of an embedding: for each token, the sum over its places, always in the same order. torch's kernel
# took a millisecond on an H100, mostly not for memory traffic; 22 layers have twelve embeddings.

# Places and columns that one program adds up.
PLACES, COLUMNS = 64, 512


class EmbeddingLookup(torch.autograd.Function):
    """F.embedding."""

    @staticmethod
    def forward(ctx, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(table)
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (tokens,) = ctx.saved_tensors
        return None, sum_by_token(grad.flatten(0, -2), tokens.flatten(), ctx.rows)


def sum_by_token(grad: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """grad (N, C), tokens (N,) int64 < rows → (rows, C), in grad's dtype; sums in float32."""
    places, columns = grad.shape
    ordered, order = tokens.sort(stable=True)
    # Where each token's places begin in sorted order, and where the last token's end.
    begins = torch.searchsorted(ordered, torch.arange(rows + 1, device=tokens.device))
    total = grad.new_empty(rows, columns)
    programs, parts = -(-places // PLACES), -(-columns // COLUMNS)
    # For tokens that span programs, two sums per program: of a token that began earlier, of a token that continues.
    partial = grad.new_empty(programs, 2, columns, dtype=torch.float32)
    add_places[programs, parts](
        grad.contiguous(), ordered, order, begins, total, partial, places, columns, PLACES, COLUMNS)
    add_programs[rows, parts](begins, total, partial, columns, PLACES, COLUMNS)
    return total


@triton.jit
def add_places(
    grad, ordered, order, begins, total, partial, places, columns, PLACES: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sums over PLACES sorted places: into `total` for a token without other places, else into `partial`."""
    start = tl.program_id(0) * PLACES
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    end = tl.minimum(start + PLACES, places)
    sums = tl.zeros([COLUMNS], tl.float32)
    for place in range(start, end):
        token = tl.load(ordered + place)
        sums += tl.load(grad + tl.load(order + place) * columns + column, inside, 0.0).to(tl.float32)
        token_begin = tl.load(begins + token)
        token_end = tl.load(begins + token + 1)
        if (place + 1 == token_end) | (place + 1 == end):  # the token's last place here
            if (token_begin >= start) & (token_end <= end):
                tl.store(total + token * columns + column, sums.to(total.dtype.element_ty), inside)
            else:
                slot = 2 * tl.program_id(0) + (token_begin >= start).to(tl.int32)
                tl.store(partial + slot.to(tl.int64) * columns + column, sums, inside)
            sums = tl.zeros([COLUMNS], tl.float32)


@triton.jit
def add_programs(begins, total, partial, columns, PLACES: tl.constexpr, COLUMNS: tl.constexpr):
    """The row of one token: zeros if it has no place, the sum over programs if its places span several."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    begin = tl.load(begins + token)
    end = tl.load(begins + token + 1)
    first = begin // PLACES
    last = (end - 1) // PLACES
    if begin == end:
        tl.store(total + token * columns + column, tl.zeros([COLUMNS], total.dtype.element_ty), inside)
    elif first != last:
        sums = tl.load(partial + (2 * first + 1) * columns + column, inside, 0.0)
        for program in range(first + 1, last + 1):
            sums += tl.load(partial + 2 * program * columns + column, inside, 0.0)
        tl.store(total + token * columns + column, sums.to(total.dtype.element_ty), inside)
