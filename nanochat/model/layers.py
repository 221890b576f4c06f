"""The layers of the model in gpt.py, from the embedding to a block, with the pieces of GPTConfig."""
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.model.attention import attention, offset_keys, token_before
from nanochat.model.gpt_config import GPTConfig
from nanochat.runtime.compiling import by_position, of_any_length

# float32's machine epsilon, also for bfloat16, whose own would change the result.
NORM_EPS = 1.1920929e-07


class Positions(NamedTuple):
    """Where the tokens of a batch of rows stand."""

    cos: Tensor  # (T, D/2) float32, like sin: see `rotary_angles`
    sin: Tensor
    cu_seqlens: Tensor | None = None  # see `GPT.forward`; None where attention reads `doc_start`
    doc_start: Tensor | None = None   # (B, T), see `document_starts`; None: a row is one text
    # (N,) int64: these of the B · T positions the last block returns, (N, C); None: all, (B, T, C).
    loss_positions: Tensor | None = None
    # For decoding (kv_cache.py), where N tokens of several rows lie end to end, and shapes have N for B, T: the token
    # before each in its document, −1 if there is none; and attention over a cache, (layer, q, k, v) → (N, H, D).
    previous: Tensor | None = None
    attend: Callable | None = None


class Streams(NamedTuple):
    """What blocks read and pass on, (B, T, C) each."""

    x: Tensor  # the residual stream
    # Only if config.streams is 3.
    first: Tensor | None = None   # the first block's input
    middle: Tensor | None = None  # x after block n_layer // 2; until then the first block's input


def norm(x: Tensor) -> Tensor:
    """Scales the last dimension to a root mean square of one; no learnable weights. Computed in float32."""
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)


def rotary_angles(
    length: int,
    head_dim: int,
    theta: float,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """cos and sin of position · θ^(−2i/D), each (T, D/2) in float32. Su et al. 2021, arXiv:2104.09864."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head against each other by its position's angles. x: (…, T, H, D)."""
    halves = x.float().unflatten(-1, (2, -1))               # (…, T, H, 2, D/2)
    cos = cos[:, None, None]                                # (T, 1, 1, D/2): the same for every head
    sin = torch.stack((sin, -sin), dim=-2)[:, None]         # (T, 1, 2, D/2)
    return (halves * cos + halves.flip(-2) * sin).flatten(-2).type_as(x)


class RotatedNorm(torch.autograd.Function):
    """
    factor · norm(rotate(x)) for training. It rounds once, and keeps only its result, which attention also keeps. On a
    GPU each pass is compiled into one kernel that reads and writes x's dtype; autograd's own backward pass would write
    float32 to memory.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, factor: float) -> Tensor:
        wide = x.float()
        # The norm is taken before the rotation, which does not change it.
        scale = factor * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        # Float32 is copied, too. In code compiled by torch 2.11, if a forward pass returns the very tensor that an
        # operation received, its gradient arrives as zeros (pytorch 180642).
        y = (rotate(wide, cos, sin) * scale).to(x.dtype, copy=True)
        ctx.save_for_backward(y, scale, cos, sin)
        ctx.factor = factor
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        y, scale, cos, sin = ctx.saved_tensors
        # All of this pass is computed in float32.
        wide = y.float()
        # y = factor · norm: the factor is in `wide` here and once more below.
        along = (grad * wide).mean(-1, keepdim=True) / ctx.factor**2
        return rotate(scale * (grad - wide * along), cos, -sin).type_as(y), None, None, None


class SquaredReLU(torch.autograd.Function):
    """
    relu(x)². It keeps only its result, which the next product keeps anyway: relu(x) is its root, to the bit (the root
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
    """Numbers in (0, limit), one for each output, from the first channels of x (…, C); zero weights give limit/2."""

    def __init__(self, config: GPTConfig, outputs: int, inputs: int, limit: int):
        if not config.narrow_gates:
            inputs = 32
            limit = 2
        super().__init__(min(inputs, config.n_embd), outputs, bias=False)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        # A copy: a view would keep all of x for the backward pass.
        return self.limit * torch.sigmoid(super().forward(x[..., : self.in_features].contiguous()))


class Embedding(nn.Embedding):
    """One vector per id. nn.Embedding itself would draw weights, which on the meta device imports the compiler."""

    def __init__(self, rows: int, width: int):
        super().__init__(rows, width, _weight=torch.empty(rows, width))
        # table_gradient.py replaces it.
        self.lookup: Callable = F.embedding

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lookup(tokens, self.weight)


class ValueEmbedding(Embedding):
    """A block's own vector for each token, which its attention adds to the values."""


class TokenEmbedding(Embedding):
    """The embedding of the tokens, normalized. Smear: nanochat, modded-nanogpt, 2025."""

    def __init__(self, config: GPTConfig):
        super().__init__(config.padded_vocab_size, config.n_embd)
        self.smear = None
        if config.smear:
            self.smear = Gate(config, 1, inputs=24, limit=1)
            self.smear_scale = nn.Parameter(torch.empty(1))

    def forward(
        self,
        tokens: Tensor,
        doc_start: Tensor | None = None,
        previous: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, T) → (B, T, C); doc_start, previous: see `Positions`."""
        x = norm(super().forward(tokens))
        if self.smear is None:
            return x
        if previous is None:
            x_previous = token_before(x, doc_start)
        else:
            x_previous = norm(super().forward(previous.clamp(min=0))) * (previous >= 0)[..., None]
        return x + self.smear_scale * self.smear(x) * x_previous


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.window = config.window(layer)
        self.qk_scale = config.qk_scale
        self.key_offset = config.offsets_keys(layer)
        kv_width = config.n_kv_head * config.head_dim
        self.c_q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.c_k = nn.Linear(config.n_embd, kv_width, bias=False)
        self.c_v = nn.Linear(config.n_embd, kv_width, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.value_gate = None
        if config.value_embeddings and (config.n_layer - 1 - layer) % 2 == 0:
            self.value_gate = Gate(config, config.n_kv_head, inputs=12, limit=3)
        # fp8.py replaces them by products in 8 bits.
        self.linear: Callable = F.linear
        self.linears: Callable = linears

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        value_embeds: Tensor | None,
    ) -> Tensor:
        """
        The residual stream (B, T, C) → the heads' results, (B, T, C), for `output` to project. value_embeds: of the
        tokens, (B, T, H_kv · D).
        """
        normed, q, k, v = self.before_attention(x, positions.cos, positions.sin)
        if value_embeds is not None:
            v = v + self.value_gate(normed)[..., None] * value_embeds.view(v.shape)
        if positions.attend is not None:
            return positions.attend(self.layer, q, k, v).flatten(-2)
        if self.key_offset:
            k = offset_keys(k, positions.doc_start)
        return attention(q, k, v, self.window, positions.cu_seqlens, positions.doc_start).flatten(2)

    def before_attention(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, ...]:
        """The normalized stream (B, T, C), its queries (B, T, H, D), keys and values (B, T, H_kv, D)."""
        normed = norm(x)
        return normed, *[heads.contiguous() for heads in self.heads(normed, cos, sin)]

    def heads(
        self,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, T, H, D), keys and values (B, T, H_kv, D) of the normalized stream (B, T, C)."""
        weights = self.c_q.weight, self.c_k.weight, self.c_v.weight
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.linears(normed, weights))
        if torch.is_grad_enabled():
            q = RotatedNorm.apply(q, cos, sin, self.qk_scale)
            k = RotatedNorm.apply(k, cos, sin, self.qk_scale)
            return q, k, v
        # Few operations: decoding time depends on their number.
        qk = norm(rotate(torch.cat((q, k), dim=-2), cos, sin))
        if self.qk_scale != 1:
            qk *= self.qk_scale
        return *qk.split((q.size(-2), k.size(-2)), dim=-2), v

    def output(self, y: Tensor) -> Tensor:
        return self.linear(y, self.c_proj.weight)


def linears(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """
    x (…, C) times each weight (M, C) transposed: (…, M) each. One product: fewer, larger kernels, and a third of the
    compile time.
    """
    return F.linear(x, torch.cat(weights)).split([len(weight) for weight in weights], dim=-1)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)
        self.compute: Callable = mlp  # fp8.py replaces it

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.c_fc.weight, self.c_proj.weight)


def mlp(x: Tensor, weight_in: Tensor, weight_out: Tensor) -> Tensor:
    """x (…, C) → (…, C), with relu² of 4 C numbers between two products."""
    return F.linear(SquaredReLU.apply(F.linear(x, weight_in)), weight_out)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer)
        self.mlp = MLP(config)
        self.values = None
        if self.attn.value_gate:
            self.values = ValueEmbedding(config.padded_vocab_size, config.n_kv_head * config.head_dim)
        # Factors of shape (1,): kernels read them on the device, and fully_shard takes no 0-dimensional tensors.
        self.residual_scale = None
        if config.stream_scales:
            self.residual_scale = nn.Parameter(torch.empty(1))
            self.first_scale = nn.Parameter(torch.empty(1))
        self.middle_scale = None
        if config.subtract_middle and layer == config.n_layer - 1:
            self.middle_scale = nn.Parameter(torch.empty(1))

    def forward(
        self,
        streams: Streams,
        tokens: Tensor,
        positions: Positions,
    ) -> Tensor:
        """The residual stream (B, T, C) after the block, or (N, C): see `Positions.loss_positions`. tokens: (B, T)."""
        x, first, _ = streams
        value_embeds = None if self.values is None else self.values(tokens)  # (B, T, H_kv · D)
        # In block 0: for the compiler, one tensor passed twice would make another kind of block.
        if first is x:
            streams = streams._replace(first=x.view_as(x))
        return self.body(streams, positions, value_embeds)

    def body(
        self,
        streams: Streams,
        positions: Positions,
        value_embeds: Tensor | None,
    ) -> Tensor:
        """Compiled on a GPU. Lookups stay outside: compiled code would sum their gradients in any order."""
        x, first, middle = streams
        # nanochat, 2026; modded-nanogpt, 2024.
        if self.residual_scale is not None:
            # Computed first: then block 0 sums its input's gradients in the same order as under fully_shard.
            added = self.first_scale * first
            x = self.residual_scale * x + added
        y = self.attn(x, positions, value_embeds)
        if positions.loss_positions is not None:
            x, y, middle = (
                t if t is None else t.flatten(0, 1).index_select(0, positions.loss_positions) for t in (x, y, middle)
            )
        x = self.after_attention(x, y)
        # modded-nanogpt, 2025.
        return x if self.middle_scale is None else x - self.middle_scale * middle

    def after_attention(self, x: Tensor, y: Tensor) -> Tensor:
        """The residual stream x (…, C) after attention and MLP. y (…, C): what attention's heads returned."""
        x = x + self.attn.output(y)
        return x + self.mlp(norm(x))

    def compile_body(self, device: torch.device) -> None:
        """
        Blocks of one kind share compiled code: start-up does not grow with depth. Hooks stay outside. On a CPU only the
        parts before and after attention are compiled: eager attention is as fast, and in compiled code windows and
        value embeddings would make different kinds of blocks.
        """
        if device.type == "cpu":
            self.attn.before_attention = of_any_length(torch.compile(self.attn.before_attention, dynamic=False))
            self.after_attention = by_position(torch.compile(self.after_attention, dynamic=False))
        else:
            self.body = torch.compile(self.body, dynamic=False)
