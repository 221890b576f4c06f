"""
Products of matrices in 8 bits, at twice the rate of bfloat16 on GPUs from Hopper on. Micikevicius et al. 2022,
arXiv:2209.05433: activations and weights have 3 bits of mantissa (e4m3), gradients 2 bits and a larger range (e5m2).
Each tensor is scaled so that its largest number is the largest of its format; sums are float32. Never run on a GPU.
Passes without gradients (validation, CORE, samples) multiply in the model's own dtype, as whoever loads it will.
"""
import torch
from torch import Tensor

from nanochat.model.gpt import GPT
from nanochat.runtime.errors import UserError

# cuBLAS takes operands whose two sizes are multiples of this.
MULTIPLE = 16
# The narrowest model that is known to gain, 22 layers (nanochat, pull request 830): what has to be converted grows with
# the width, what is multiplied with its square.
MIN_WIDTH = 1408


def fp8_pays(device: torch.device, width: int, tokens: int) -> bool:
    """Whether the products of such a model are faster in 8 bits on this device: an H100, H200 or B200, compiled."""
    if device.type != "cuda" or width < MIN_WIDTH or tokens % MULTIPLE:
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major in (9, 10)


def use_fp8(model: GPT, device: torch.device, tokens: int) -> None:
    """
    Let the blocks multiply with their matrices in 8 bits. UserError for a GPU without such products, and for a number
    of tokens in a micro-batch that they cannot take.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        raise UserError(f"fp8=True needs an H100 or newer; this is {torch.cuda.get_device_name(device)}: leave fp8 out")
    if tokens % MULTIPLE:
        raise UserError(f"fp8=True needs micro-batches of a multiple of {MULTIPLE} tokens, and device_batch_size * "
                        f"max_seq_len is {tokens}")
    for block in model.own_blocks():
        block.attn.linear = fp8_linear
        block.mlp.linear = fp8_linear


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear(x, weight) of 8-bit copies, forward and backward: x (…, K), weight (M, K) → (…, M) in x's dtype."""
    if not torch.is_grad_enabled():
        return x @ weight.T
    return Fp8Linear.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


class Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = scaled(x, torch.float8_e4m3fn)
        weight8, weight_scale = scaled(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        return product(x8, x_scale, weight8, weight_scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        grad8, grad_scale = scaled(grad, torch.float8_e5m2)
        grad_x = product(grad8, grad_scale, weight8.T, weight_scale, grad.dtype)   # (N, K)
        grad_weight = product(grad8.T, grad_scale, x8.T, x_scale, grad.dtype)      # (M, K)
        return grad_x, grad_weight


def scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale in 8 bits, and the scale, float32. A number that is not finite makes all of it NaN."""
    scale = x.abs().amax().float().clamp(min=1e-30) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def product(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """a (N, K) times b (M, K) transposed, both scaled. fast: a GPU adds with fewer bits, enough for a forward pass."""
    # Torch's own kernel takes seconds on some CPUs.
    if a.device.type == "cpu":
        return (a.float() @ b.float().T * (a_scale * b_scale)).to(dtype)
    # The kernel wants rows of a and rows of b, each contiguous.
    return torch._scaled_mm(
        a.contiguous(), b.contiguous().T, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)
