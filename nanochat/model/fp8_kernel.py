"""The kernel of fp8_cast.py, in its own file because Triton comes with torch for CUDA only."""
import triton
import triton.language as tl


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
