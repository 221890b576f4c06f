"""What the model in gpt.py is made of, from the embedding to a block; the pieces of GPTConfig are in here."""
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.model.attention import attention, window_blocks
from nanochat.model.gpt_config import GPTConfig
from nanochat.runtime.compiling import of_any_length

NORM_EPS = 1.1920929e-07  # float32 machine epsilon, in every dtype
GATE_INPUTS = 32          # channels that a gate reads


def norm(x: Tensor) -> Tensor:
    """Root mean square over the last dimension becomes one; no learnable weights. Computed in float32."""
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)


def rotary_angles(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position · θ^(−2i/D), each (T, D/2) in float32. Su et al. 2021, arXiv:2104.09864."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head against each other by its position's angles. x: (…, T, H, D)."""
    halves = x.float().unflatten(-1, (2, -1))                                    # (…, T, H, 2, D/2)
    cos, sin = cos[:, None, None], torch.stack((sin, -sin), dim=-2)[:, None]     # the same for every head
    return (halves * cos + halves.flip(-2) * sin).flatten(-2).type_as(x)


class RotatedNorm(torch.autograd.Function):
    """
    norm(rotate(x)) for training. It is rounded once, and keeps only its result, as attention does. On a GPU each pass
    is compiled into one kernel that reads and writes x's dtype; autograd's own backward pass sends float32 through
    memory.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)  # a rotation does not change it
        y = (rotate(wide, cos, sin) * scale).type_as(x)
        ctx.save_for_backward(y, scale, cos, sin)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        y, scale, cos, sin = ctx.saved_tensors
        wide, grad = y.float(), grad.float()
        grad_rotated = scale * (grad - wide * (grad * wide).mean(-1, keepdim=True))
        return rotate(grad_rotated, cos, -sin).type_as(y), None, None


class SquaredReLU(torch.autograd.Function):
    """
    relu(x)². It keeps only its result, which the product after it keeps anyway: relu(x) is its root, to the bit (a root
    halves the relative rounding error of the square, and rounds it away).
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = F.relu(x).square()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return 2 * y.sqrt() * grad


class Gate(nn.Linear):
    """Numbers in (0, 2), one for each output, from the first channels of x (…, C); they start at 1."""

    def __init__(self, outputs: int, width: int):
        super().__init__(min(GATE_INPUTS, width), outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.sigmoid(super().forward(x[..., : self.in_features]))


class Table(nn.Embedding):
    """One vector for each id. nn.Embedding itself would draw them, which on the meta device imports the compiler."""

    def __init__(self, rows: int, width: int):
        super().__init__(rows, width, _weight=torch.empty(rows, width))


class Embedding(Table):
    """What the blocks read of the tokens. Smear: nanochat, modded-nanogpt, 2025."""

    def __init__(self, config: GPTConfig):
        super().__init__(config.padded_vocab_size, config.n_embd)
        self.smear = Gate(1, config.n_embd) if config.smear else None
        self.smear_scale = nn.Parameter(torch.empty(1)) if config.smear else None

    def forward(self, tokens: Tensor, previous: Tensor | None = None) -> Tensor:
        """
        tokens (…, T) → (…, T, C). previous (…, T): the token before each, −1 where there is none; None: the tokens are
        rows of text.
        """
        x = norm(super().forward(tokens))
        if self.smear:
            if previous is None:
                before = F.pad(x[..., :-1, :], (0, 0, 1, 0))
            else:
                before = norm(super().forward(previous.clamp(min=0))) * (previous >= 0)[..., None]
            x = x + self.smear_scale * self.smear(x) * before
        return x


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.window, self.qk_scale = config.window(layer), config.qk_scale
        kv_width = config.n_kv_head * config.head_dim
        self.c_q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.c_k = nn.Linear(config.n_embd, kv_width, bias=False)
        self.c_v = nn.Linear(config.n_embd, kv_width, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        alternate = config.value_embeddings and (config.n_layer - 1 - layer) % 2 == 0
        self.value_gate = Gate(config.n_kv_head, config.n_embd) if alternate else None
        self.linear = F.linear

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, T, H, D), keys and values (B, T, H_kv, D)."""
        # One product for all heads: fewer, larger kernels, and a third of their compilation.
        weight = torch.cat((self.c_q.weight, self.c_k.weight, self.c_v.weight))
        q, k, v = self.heads(self.linear(x, weight), cos, sin)
        return q.contiguous(), k.contiguous(), v.contiguous()

    def heads(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The products (…) for all heads → q (…, H, D), k, v (…, H_kv, D)."""
        heads, sizes = qkv.unflatten(-1, (-1, self.head_dim)), (self.n_head, self.n_kv_head)
        if torch.is_grad_enabled():
            q, k, v = heads.split((*sizes, self.n_kv_head), dim=-2)
            q, k = RotatedNorm.apply(q, cos, sin), RotatedNorm.apply(k, cos, sin)
        else:  # fewer operations, which is what decoding is made of
            qk, v = heads.split((sum(sizes), self.n_kv_head), dim=-2)
            q, k = norm(rotate(qk, cos, sin)).split(sizes, dim=-2)
        if self.qk_scale != 1:
            q, k = q * self.qk_scale, k * self.qk_scale
        return q, k, v

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, values: Tensor | None, look: Callable) -> Tensor:
        """
        x (…, C) and what `heads` made of it → what c_proj reads, (…, C). values: (…, H_kv · D), what the gate adds to
        the values that come of x; look(q, k, v) → (…, H, D): attention among tokens.
        """
        if values is not None:
            v = v + self.value_gate(x)[..., None] * values.view(v.shape)
        return look(q, k, v).reshape(x.shape)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)
        self.linear = F.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(SquaredReLU.apply(self.linear(x, self.c_fc.weight)), self.c_proj.weight)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer)
        self.mlp = MLP(config)
        self.residual_scales = config.residual_scales
        depth = layer / max(config.n_layer - 1, 1)
        self.first_scales = []  # what they start from
        if config.residual_scales:  # of the residual stream and of x0, as in nanochat
            self.first_scales += [1.15 - 0.10 * depth, 0.20 - 0.15 * depth]
        if config.backout and layer == config.n_layer - 1:
            self.first_scales.append(-0.2)
        self.scales = nn.Parameter(torch.empty(len(self.first_scales))) if self.first_scales else None
        kv_width = config.n_kv_head * config.head_dim
        self.values = Table(config.padded_vocab_size, kv_width) if self.attn.value_gate else None

    def forward(self, x: Tensor, streams: tuple[Tensor, ...], tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x, streams: (B, T, C); tokens: (B, T)."""
        values = None if self.values is None else self.values(tokens)
        return self.body(x, streams, cos, sin, values, window_blocks(x.size(1), self.attn.window, x.device))

    def body(
        self, x: Tensor, streams: tuple[Tensor, ...], cos: Tensor, sin: Tensor, values: Tensor | None, blocks
    ) -> Tensor:
        """What is compiled is in here: without lookups, whose gradients are sums in any order."""

        def look(*heads: Tensor) -> Tensor:
            return attention(*(part.transpose(1, 2) for part in heads), self.attn.window, blocks).transpose(1, 2)

        x, normed, *heads = self.before(x, streams, cos, sin)
        return self.after(x, self.attn.attend(normed, *heads, values, look))

    def before(self, x: Tensor, streams: tuple[Tensor, ...], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """The residual stream, and what attention reads of it: normed, queries, keys and values."""
        x = self.mix(x, streams)
        return x, (normed := norm(x)), *self.attn.project(normed, cos, sin)

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.attn.linear(y, self.attn.c_proj.weight)
        return x + self.mlp(norm(x))

    def compile_body(self, device: torch.device) -> None:
        """
        Blocks of a kind share compiled code: start-up does not grow with depth. Hooks stay outside of it. On a CPU it
        is what comes before and after attention: that is as fast by itself, and would make kinds of windows and value
        tables.
        """
        if device.type == "cpu":
            self.before, self.after = (
                of_any_length(torch.compile(part, dynamic=False)) for part in (self.before, self.after)
            )
        else:
            self.body = torch.compile(self.body, dynamic=False)

    def mix(self, x: Tensor, streams: tuple[Tensor, ...]) -> Tensor:
        """Add the streams (x0, the middle of the model), as far as there are any, each times a scalar."""
        if self.scales is None:
            return x
        scales = self.scales.unbind()
        if self.residual_scales:
            x, scales = x * scales[0], scales[1:]
        for scale, stream in zip(scales, streams):  # the middle is for the last block alone
            x = x + scale * stream
        return x
