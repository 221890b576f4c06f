"""
The model, without optimizers and sharding.

A GPT with rotary positions, RMSNorm without weights (after the embedding, before attention, MLP and head), queries and
keys normalized after the rotation, ReLU² in the MLP, no biases, an untied head with softcapped logits. Output
projections start at zero, so that every block begins as the identity. That is the classic architecture; the pieces of
gpt_config.py add to it.

What makes it fast on one kind of machine is behind three doors: `attention` in attention.py, `Products` in products.py
(in 8 bits: fp8.py), and `softcapped_cross_entropy` in loss.py. For decoding, inference/kv_cache.py hands in attention
over its cache (`Positions.attend`).
"""
import math
import zlib
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanochat.model.attention import attention, document_starts, has_varlen, offset_keys, token_before
from nanochat.model.gpt_config import GPTConfig
from nanochat.model.loss import cap, softcapped_cross_entropy, token_losses
from nanochat.model.products import Products
from nanochat.runtime.compiling import by_position, mark_dynamic, of_any_length

Role = Literal["embedding", "head", "matrix", "value_embedding", "gate", "smear", "residual_scale", "first_scale"]
ROLES: dict[str, Role] = {
    "wte": "embedding", "values": "value_embedding", "lm_head": "head", "value_gate": "gate", "smear": "smear",
    "smear_scale": "smear", "middle_scale": "smear", "residual_scale": "residual_scale", "first_scale": "first_scale",
    "c_q": "matrix", "c_k": "matrix", "c_v": "matrix", "c_proj": "matrix", "c_fc": "matrix",
}
Reduction = Literal["mean", "sum", "none"]

# float32's machine epsilon, also for bfloat16, whose own would change the result.
NORM_EPS = 1.1920929e-07


class Positions(NamedTuple):
    """
    Where the tokens of a batch of rows stand. For three callers: training and evaluation (`GPT.positions`: cos, sin and
    one of cu_seqlens and doc_start), the last block on a CPU (adds loss_positions), decoding (cos, sin, previous and
    attend).
    """

    cos: Tensor  # (T, D/2) float32, like sin: see `rotary_angles`
    sin: Tensor
    cu_seqlens: Tensor | None = None  # see `GPT.forward`; None where attention reads `doc_start`
    doc_start: Tensor | None = None   # (B, T), see `document_starts`; None: a row is one text
    # (N,) int64: these of the B · T positions the last block returns, (N, C); None: all, (B, T, C).
    loss_positions: Tensor | None = None
    # ---- For decoding only (kv_cache.py): the tokens of several rows lie end to end, so all shapes have N for B, T.
    previous: Tensor | None = None    # (N,) the token before each in its document, −1 if there is none
    # (layer, q, k, v) → (N, H, D): attention over the cache, which also knows windows, documents and the offset.
    attend: Callable | None = None


class Streams(NamedTuple):
    """What blocks read and pass on, (B, T, C) each."""

    x: Tensor  # the residual stream
    # Only if config.streams is 3.
    first: Tensor | None = None   # the first block's input
    # x after block n_layer // 2; until then the first block's input (with one or two layers in all of them).
    middle: Tensor | None = None


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
    factor · norm(rotate(x)) for training. It rounds once, and keeps its result, which attention also keeps. On a
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


class SigmoidGate(nn.Linear):
    """
    Numbers in (0, limit), one for each output, from the first channels of x (…, C); zero weights give limit/2.
    inputs, limit: only with config.narrow_gates; else 32 and 2.
    """

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
        self.lookup: Callable = F.embedding  # on a GPU compile.py replaces it

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lookup(tokens, self.weight)


class TokenEmbedding(Embedding):
    """The embedding of the tokens, normalized. Smear: nanochat, modded-nanogpt, 2025."""

    def __init__(self, config: GPTConfig):
        super().__init__(config.padded_vocab_size, config.n_embd)
        self.smear = None
        if config.smear:
            self.smear = SigmoidGate(config, 1, inputs=24, limit=1)
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
            self.value_gate = SigmoidGate(config, config.n_kv_head, inputs=12, limit=3)
        self.products = Products()

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
        """
        The normalized stream (B, T, C), its queries (B, T, H, D), keys and values (B, T, H_kv, D). On a CPU this is
        compiled. `heads` returns views of one product, which would be kept whole for the backward pass and reach
        attention in another layout in training than in evaluations: here they are copied.
        """
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
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.products.linears(normed, weights))
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
        return self.products.linear(y, self.c_proj.weight)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)
        self.products = Products()

    def forward(self, x: Tensor) -> Tensor:
        return self.products.mlp(x, self.c_fc.weight, self.c_proj.weight)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer)
        self.mlp = MLP(config)
        # A table of vectors, one for each token, which attention adds to its values v: the "value embedding". The name
        # is that of the weights in checkpoints.
        self.values = None
        if self.attn.value_gate:
            self.values = Embedding(config.padded_vocab_size, config.n_kv_head * config.head_dim)
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
        # In block 0: for the compiler, one tensor passed twice would make another kind of block. (Only the last block
        # reads `middle`.)
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


class Head(nn.Linear):
    """Turns hidden states (…, C) into logits, or with targets (…) into the loss."""

    def __init__(self, config: GPTConfig):
        super().__init__(config.n_embd, config.padded_vocab_size, bias=False)
        self.vocab_size = config.vocab_size
        self.softcap = config.softcap
        self.products = Products()

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> Tensor:
        if targets is None:
            logits = x @ self.weight.T  # (…, padded_vocab_size)
            return cap(logits[..., : self.vocab_size], self.softcap)
        rows = x.flatten(0, -2), self.weight, targets.flatten(), self.vocab_size, self.softcap  # (N, C), …
        if reduction == "none":
            return token_losses(*rows).view(targets.shape)
        if weights is not None:
            weights = weights.flatten()
        loss = softcapped_cross_entropy(*rows, weights, self.products.head)
        if reduction == "mean":
            loss = loss / (targets >= 0).sum().clamp(min=1)
        return loss


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({
            "wte": TokenEmbedding(config),
            "h": nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
        })
        self.lm_head = Head(config)
        # True: recompute each block in the backward pass.
        self.activation_checkpointing = False

    def draw(self, name: str, seed: int) -> Tensor:
        """
        A parameter's initial weights, float32 on the CPU, from its own generator (seed, name): they do not depend on
        the model's other parameters, on ranks or sharding.
        """
        config = self.config
        # A uniform distribution with standard deviation 1/√width.
        bound = math.sqrt(3 / config.n_embd)
        # 32 bits, because a CPU's generator ignores the seed's other bits.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        weights = torch.empty(self.get_parameter(name).shape)
        match piece_of(name):
            case "wte":
                weights.normal_(0, config.embedding_std, generator=generator)
            case "lm_head":
                weights.normal_(0, 0.001, generator=generator)
            case "c_q" | "c_k" | "c_v" | "values":
                weights.uniform_(-bound, bound, generator=generator)
            case "c_fc":
                weights.uniform_(-bound * config.fc_scale, bound * config.fc_scale, generator=generator)
            case "value_gate" if config.narrow_gates:
                weights.uniform_(0, 0.02, generator=generator)
            case "residual_scale" | "first_scale" as piece:
                start, fall = {"residual_scale": (1.15, 0.1), "first_scale": (0.2, 0.15)}[piece]
                layer = int(name.split(".")[2])
                weights.fill_(start - fall * layer / max(config.n_layer - 1, 1))
            case "middle_scale":
                weights.fill_(0.2)
            case "c_proj" | "smear" | "smear_scale" | "value_gate":
                weights.zero_()
            case _:
                raise AssertionError(f"no initialisation for {name}")
        return weights

    def hidden(self, tokens: Tensor, cu_seqlens: Tensor | None = None, loss_positions: Tensor | None = None) -> Tensor:
        """
        tokens (B, T) → the head's input, (B, T, C), or (N, C) of the N `loss_positions`: see `Positions`. cu_seqlens:
        see `forward`.
        """
        positions = self.positions(tokens, cu_seqlens)._replace(loss_positions=loss_positions)
        streams = self.embed(tokens, positions)
        return norm(self.blocks(range(self.config.n_layer), tokens, streams, positions).x)

    def positions(self, tokens: Tensor, cu_seqlens: Tensor | None) -> Positions:
        rows, length = tokens.shape
        cos, sin = rotary_angles(length, self.config.head_dim, self.config.rope_theta, tokens.device)
        doc_start = None
        if cu_seqlens is None or self.config.document_token < 0:
            cu_seqlens = length * torch.arange(rows + 1, device=tokens.device, dtype=torch.int32)
        else:
            doc_start = document_starts(cu_seqlens, rows, length)
        return Positions(cos, sin, mark_dynamic(cu_seqlens), doc_start)

    def embed(self, tokens: Tensor, positions: Positions) -> Streams:
        """tokens (B, T) → the first block's input."""
        x = self.transformer.wte(tokens, positions.doc_start, positions.previous)
        return Streams(x, x, x) if self.config.streams > 1 else Streams(x)

    def blocks(
        self,
        layers: range,
        tokens: Tensor,
        streams: Streams,
        positions: Positions,
    ) -> Streams:
        """The streams after the blocks of these layers. tokens: (B, T)."""
        config, x = self.config, streams.x
        group = config.n_head // config.n_kv_head
        if positions.cu_seqlens is not None and not has_varlen(x.device, x.dtype, config.head_dim, group):
            positions = positions._replace(cu_seqlens=None)
        for layer in layers:
            block = self.transformer.h[layer]
            at = positions if layer == config.n_layer - 1 else positions._replace(loss_positions=None)
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, streams, tokens, at, use_reentrant=False)
            else:
                x = block(streams, tokens, at)
            streams = streams._replace(x=x)
            if streams.middle is not None and layer == config.n_layer // 2:
                streams = streams._replace(middle=x)
        return streams

    def keep_layers(self, layers: range) -> None:
        """Remove all other blocks, the embedding unless the first block is kept, the head unless the last one is."""
        if layers.start > 0:
            self.transformer.wte = nn.Identity()
        if layers.stop < self.config.n_layer:
            self.lm_head = nn.Identity()
        for layer in range(self.config.n_layer):
            if layer not in layers:
                # Not deleted, so that the other blocks keep their names.
                self.transformer.h[layer] = nn.Identity()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        reduction: Reduction = "mean",
        weights: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """
        Without targets: logits (B, T, vocab_size), float32. With targets (B, T), −1 for none: the loss in nats, the
        mean or sum over the targets, or with "none" each target's (B, T), without gradient.
        weights (B, T), float32: a factor for each target's loss in a sum; its gradient is that loss where it is not 0.
        A target beyond the vocabulary has an infinite loss, so its step is skipped.

        cu_seqlens (N + 1,), int32: where documents begin in the concatenated rows (each row begins one), then B · T. A
        model with `document_token` keeps documents apart; None: each row is one.
        """
        assert weights is None or reduction == "sum"
        loss_positions = None
        # After its attention the last block needs only positions with a target (from two on, for compiled code). On a
        # GPU the host would have to wait to learn their number.
        if targets is not None and reduction != "none" and tokens.device.type == "cpu":
            counts = targets >= 0 if weights is None else (targets >= 0) & (weights != 0)
            if 1 < counts.sum() < counts.numel():
                loss_positions = counts.flatten().nonzero()[:, 0]
                targets, weights = (t if t is None else t.flatten()[loss_positions] for t in (targets, weights))
        return self.lm_head(self.hidden(tokens, cu_seqlens, loss_positions), targets, weights, reduction)

    def cu_seqlens_of(self, tokens: Tensor) -> Tensor:
        """Where documents begin in rows (B, T), as `forward` takes it. Waits for a GPU."""
        doc_start = tokens == self.config.document_token
        doc_start[:, 0] = True
        return F.pad(doc_start.flatten().nonzero().flatten(), (0, 1), value=doc_start.numel()).int()

    def units(self) -> list[nn.Module]:
        """The modules whose parameters are sent and gathered together, in the order of the forward pass."""
        return [self.transformer.wte, *self.transformer.h, self.lm_head]

    def roles(self) -> dict[str, Role]:
        """The role of each parameter, by name: optimizers, FLOPs and the horizon depend on roles, not on names."""
        return {name: ROLES[piece_of(name)] for name, _ in self.named_parameters()}

    def count_parameters(self, *roles: Role) -> int:
        """The number of parameters with one of these roles."""
        role_of = self.roles()
        return sum(p.numel() for name, p in self.named_parameters() if role_of[name] in roles)

    def estimate_flops(self) -> int:
        """
        FLOPs per token of a training step, forward and backward: 6 per parameter of matrices and head, and 12 · width ·
        window per layer for attention, masked scores included. Embeddings are lookups; gates and scalars are left out.
        Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
        """
        windows = sum(map(self.config.window, range(self.config.n_layer)))
        return 6 * self.count_parameters("matrix", "head") + 12 * self.config.n_embd * windows

    # Not inference_mode: on stage 3, training reuses the memory that units are gathered into.
    @torch.no_grad()
    def generate(self, tokens: list[int], max_tokens: int):
        """
        Yields up to max_tokens more tokens, each the most likely one after a full pass over all tokens before it. Slow
        and simple: the engine's reference.
        """
        ids = torch.tensor([tokens], device=self.lm_head.weight.device)
        for _ in range(max_tokens):
            ids = ids[:, -self.config.sequence_len :]
            logits = self(ids, cu_seqlens=self.cu_seqlens_of(ids))[:, -1]  # (1, vocab_size)
            next_id = logits.argmax(-1, keepdim=True)
            ids = torch.cat((ids, next_id), dim=1)
            # The caller wants the token now, so a sync per token is the point.
            yield next_id.item()


def piece_of(name: str) -> str:
    """The piece of the model that a parameter belongs to: c_q of transformer.h.0.attn.c_q.weight."""
    return name.removesuffix(".weight").split(".")[-1]


def model_without_memory(config: GPTConfig) -> GPT:
    """A model on the device "meta": parameters have shapes, but no memory, as random weights would be replaced."""
    with torch.device("meta"):
        return GPT(config)


def parameter_shapes(config: GPTConfig) -> dict[str, torch.Size]:
    """Name and shape of every parameter of such a model."""
    return {name: p.shape for name, p in model_without_memory(config).named_parameters()}
