"""The kernels of table_gradient.py, in their own file because Triton comes with torch for CUDA only."""
import triton
import triton.language as tl


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
