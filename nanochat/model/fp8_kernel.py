"""The kernel of fp8_cast.py, in its own file because Triton comes with torch for CUDA only."""
import triton
import triton.language as tl


@triton.jit
def cast_kernel(
    x, hidden, factor, scale, by_rows, by_columns, rows, columns, HAS_X: tl.constexpr, HAS_HIDDEN: tl.constexpr,
    HAS_FACTOR: tl.constexpr, BY_ROWS: tl.constexpr, BY_COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):
    """`cast` of one block: columns from program_id(0) · BLOCK on, rows from program_id(1) · BLOCK on."""
    row = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    place = row[:, None] * columns + column[None, :]
    if HAS_X:
        value = tl.load(x + place, inside).to(tl.float32)
    if HAS_HIDDEN:
        root = tl.maximum(tl.load(hidden + place, inside).to(tl.float32), 0.0)
        if HAS_X:
            value = 2 * root * value
        else:
            value = root * root
    if HAS_FACTOR:
        value *= tl.load(factor + row, row < rows)[:, None]
    # Rounded as torch does; Triton's own division is off by a bit now and then.
    value = tl.div_rn(value, tl.load(scale)).to(by_rows.dtype.element_ty)
    if BY_ROWS:
        tl.store(by_rows + place, value, inside)
    if BY_COLUMNS:
        tl.store(by_columns + column[:, None] * rows + row[None, :], tl.trans(value), tl.trans(inside))
