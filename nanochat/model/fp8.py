"""
Matrix products in 8 bits, at twice the rate of bfloat16 on Hopper and later GPUs. Micikevicius et al. 2022,
arXiv:2209.05433: activations and weights have 3 bits of mantissa (e4m3), gradients 2 bits and a larger range (e5m2).
Each tensor is scaled so that its largest value, or a bound of it (`Fp8MLP`), becomes the format's largest; sums are
float32.
Passes without gradients (validation, CORE, samples: logits, or losses one by one) multiply in the model's own dtype,
as its users will.
"""
from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.model.gpt import GPT
from nanochat.model.products import Products
from nanochat.runtime.errors import UserError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# Rounding makes a weight in E4M3 up to 1/16 larger, and a sum in bfloat16 up to 1/256; gradients stay within their
# maximum.
ROUNDING = 1.1
# cuBLAS takes operands whose two sizes are multiples of this.
MULTIPLE = 16
# Rows and columns that one program of the cast's kernel casts, and its warps: on an H100 the fastest of eight
# (docs/tried.md).
ROWS, COLUMNS, WARPS = 32, 128, 4
# The narrowest model known to gain, 22 layers (nanochat, pull request 830): the cost of casts grows with the width,
# the cost of products with its square.
MIN_WIDTH = 1408


def fp8_pays(device: torch.device, width: int, tokens: int) -> bool:
    """Whether a model this wide multiplies faster in 8 bits on this device: an H100, H200 or B200, compiled."""
    if device.type != "cuda" or width < MIN_WIDTH or tokens % MULTIPLE:
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major in (9, 10)


def use_fp8(model: GPT, device: torch.device, tokens: int) -> None:
    """
    Let blocks and head multiply with their matrices in 8 bits. UserError for a GPU older than Hopper, and for a
    number of tokens in a micro-batch that they cannot take.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        raise UserError(f"fp8=True needs an H100 or newer; this is {torch.cuda.get_device_name(device)}: leave fp8 out")
    if tokens % MULTIPLE:
        raise UserError(f"fp8=True needs micro-batches of a multiple of {MULTIPLE} tokens, and device_batch_size * "
                        f"max_seq_len is {tokens}")
    for module in model.modules():
        if hasattr(module, "products"):
            module.products = Fp8Products()


class Fp8HeadProducts:
    """`HeadProducts` in 8 bits."""

    def __init__(self, head: Tensor):
        self.dtype = head.dtype
        self.head, self.columns, self.scale = scaled([head], E4M3)

    def logits(self, rows: Tensor) -> Tensor:
        rows8, _, scale = scaled([rows], E4M3)
        return product(rows8, scale, self.head, self.scale, self.dtype, fast=True)

    def gradients(self, grad: Tensor, total: Tensor, weights: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        # Rows of the logits' gradient may differ by e^20, more than 8 bits span: each is rescaled during the cast.
        grad_scale = scale_for(weights.abs().amax(), E5M2)
        grad8, grad_columns, _ = cast([grad], None, grad_scale, E5M2, factor=weights / total)
        _, rows_columns, rows_scale = scaled([rows], E4M3)
        return (product(grad8, grad_scale, self.columns, self.scale, self.dtype),
                product(grad_columns, grad_scale, rows_columns, rows_scale, self.dtype))


class Fp8Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        x8, x8_columns, x_scale = scaled([x], E4M3)
        weight8, weight8_columns, weight_scale = scaled([torch.cat(weights)], E4M3)
        ctx.save_for_backward(x8_columns, x_scale, weight8_columns, weight_scale)
        ctx.sizes = [len(weight) for weight in weights]
        return product(x8, x_scale, weight8, weight_scale, x.dtype, fast=True).split(ctx.sizes, dim=1)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x8_columns, x_scale, weight8_columns, weight_scale = ctx.saved_tensors
        dtype = grads[0].dtype
        grad8, grad8_columns, grad_scale = scaled(grads, E5M2)
        grad_x = product(grad8, grad_scale, weight8_columns, weight_scale, dtype, fast=True)  # (N, K)
        grad_weight = product(grad8_columns, grad_scale, x8_columns, x_scale, dtype)          # (M, K)
        return grad_x, *grad_weight.split(ctx.sizes)


class Fp8MLP(torch.autograd.Function):
    """
    Both products of an MLP with relu² between them, which is computed during the cast and never kept. The gradient of
    relu² is scaled by a bound, which saves a pass over 8 C numbers of a token: a product is at most the norm of its row
    times that of its column (Cauchy and Schwarz). It may be thousands of times the largest number, which costs E5M2
    nothing: 30 powers of two keep its precision, and gradients need few. E4M3 has 15: there the maximum is exact.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight_in: Tensor, weight_out: Tensor) -> Tensor:
        x8, x8_columns, x_scale = scaled([x], E4M3)
        in8, in8_columns, in_scale = scaled([weight_in], E4M3)
        hidden = product(x8, x_scale, in8, in_scale, x.dtype, fast=True)  # (N, 4 C)
        largest = F.relu(hidden).amax().float()
        square_scale = scale_for(largest.square(), E4M3)
        square8, _, _ = cast([], hidden, square_scale, E4M3, by_columns=False)
        out8, out8_columns, out_scale = scaled([weight_out], E4M3)
        longest = weight_out.float().square().sum(0).amax().sqrt()  # of its columns
        ctx.save_for_backward(x8_columns, x_scale, in8_columns, in_scale, hidden, square_scale, out8_columns, out_scale,
                              2 * largest * longest)
        return product(square8, square_scale, out8, out_scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x8_columns, x_scale, in8_columns, in_scale, hidden, square_scale, out8_columns, out_scale,
         slope) = ctx.saved_tensors
        dtype = grad.dtype
        grad8, grad8_columns, grad_scale = scaled([grad], E5M2)
        # (N, 4 C), gradient of relu²
        wide = product(grad8, grad_scale, out8_columns, out_scale, dtype, fast=True)
        # A row of grad is at most √C times its largest number long.
        row = grad_scale * torch.finfo(E5M2).max * grad.size(1) ** 0.5
        wide_scale = scale_for(ROUNDING * slope * row, E5M2)
        # relu² is cast again: keeping it would take an eighth more memory at depth 22.
        wide8, wide8_columns, square8_columns = cast([wide], hidden, wide_scale, E5M2, square_scale=square_scale)
        grad_out = product(grad8_columns, grad_scale, square8_columns, square_scale, dtype)
        grad_in = product(wide8_columns, wide_scale, x8_columns, x_scale, dtype)
        return product(wide8, wide_scale, in8_columns, in_scale, dtype, fast=True), grad_in, grad_out


class Fp8Products(Products):
    """`Products` with 8-bit copies of the operands, forward and backward."""

    head = Fp8HeadProducts

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.linears(x, (weight,))[0]

    def linears(self, x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        if not torch.is_grad_enabled():
            return super().linears(x, weights)
        return [y.unflatten(0, x.shape[:-1]) for y in Fp8Linears.apply(x.flatten(0, -2), *weights)]

    def mlp(self, x: Tensor, weight_in: Tensor, weight_out: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().mlp(x, weight_in, weight_out)
        return Fp8MLP.apply(x.flatten(0, -2), weight_in, weight_out).unflatten(0, x.shape[:-1])


def scaled(parts: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The parts (N, K_i), side by side, / scale in 8 bits, (N, K), the same transposed, (K, N), and the scale."""
    scale = scale_for(reduce(torch.maximum, [part.abs().amax() for part in parts]), dtype)
    rows, columns, _ = cast(parts, None, scale, dtype)
    return rows, columns, scale


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale, float32, of numbers up to `largest`. If that is not finite, all of them become NaN."""
    return largest.float().clamp(min=1e-30) / torch.finfo(dtype).max


def product(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """
    a (N, K) times b (M, K) transposed, both scaled and contiguous. fast: a GPU accumulates in fewer bits, which is
    enough for some thousands of products, but not for sums over all tokens or the vocabulary (docs/tried.md).
    """
    # Torch's own kernel takes seconds on some CPUs.
    if a.device.type == "cpu":
        return (a.float() @ b.float().T * (a_scale * b_scale)).to(dtype, copy=True)  # copy: see RotatedNorm
    return torch._scaled_mm(a, b.T, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)


# ---- The cast. An H100 multiplies 8-bit operands only along contiguous numbers, so a step needs each matrix by rows
# and by columns. One kernel writes both in one read; torch's code writes the transposed copy slowly (docs/tried.md).

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
def cast_on_gpu(parts, hidden, scale, dtype, by_columns=True, factor=None, square_scale=None):
    from nanochat.model.triton_kernels import cast_kernel  # torch for a CPU comes without it

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
