"""
The model, without optimizers and sharding.

A GPT with rotary positions, RMSNorm without weights (after the embedding, before attention, MLP and head), queries and
keys normalized after the rotation, ReLU² in the MLP, no biases, an untied head with softcapped logits. Output
projections start at zero, so that every block begins as the identity. That is the classic architecture; the fields of
GPTConfig below "Pieces" add to it, each by itself. docs/ablations.md shows what each is worth.
"""
import math
import zlib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanochat.attention import attention, window_blocks
from nanochat.errors import UserError
from nanochat.loss import MAX_SOFTCAP, VOCAB_MULTIPLE, cap, negatives, softcapped_cross_entropy, token_losses

LOGIT_SOFTCAP = 15.0
NORM_EPS = 1.1920929e-07  # float32 machine epsilon, in every dtype
HEAD_DIM = 128            # of the one-number family
GATE_INPUTS = 32          # channels that a gate reads
ARCHITECTURES = {         # named sets of pieces
    "classic": {},
    "modern": dict(short_windows=True, value_embeddings=True, smear=True, embedding_std=0.8, fc_scale=0.4),
}
Role = Literal["embedding", "head", "matrix", "table", "scalar"]


@dataclass(frozen=True)
class GPTConfig:
    """Everything that determines the shapes of a model. UserError for impossible values."""

    sequence_len: int   # longest row the model is trained on
    vocab_size: int     # tokens that exist; the weights are padded beyond it
    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int      # fewer than n_head: grouped-query attention
    softcap: float | None = LOGIT_SOFTCAP  # limit of the logits; None or 0: none
    # ---- Pieces
    rope_theta: float = 10_000.0    # base of the rotary wavelengths
    qk_scale: float = 1.0           # normalized queries and keys are multiplied by it: sharper attention
    short_windows: bool = False     # three of four layers see a quarter of sequence_len, each fourth and the last all
    value_embeddings: bool = False  # alternate layers, the last one included, add a gated vector of the token to values
    bigrams: int = 0                # blocks add a vector of the last two tokens: rows of its table / vocabulary
    residual_scales: bool = False   # each block begins with r · x + a · x0, learned; x0 is the embedding
    smear: bool = False             # the embedding adds a gated part of that of the token before
    backout: bool = False           # the last block takes away a learned part of what the middle of the model had
    head_gates: bool = False        # each head's output is multiplied by a gate in (0, 2)
    embedding_std: float = 1.0      # at the start
    fc_scale: float = 1.0           # of c_fc at the start, relative to 1/√width

    def __post_init__(self) -> None:
        limit = self.softcap
        if limit is not None and not (isinstance(limit, (int, float)) and 0 <= limit <= MAX_SOFTCAP):
            expected = f"a number of at most {MAX_SOFTCAP}, or None or 0 for no softcap"
            raise UserError(f"softcap={limit!r}: expected {expected}")
        for name, least in dict(rope_theta=1, qk_scale=0, bigrams=0, embedding_std=0, fc_scale=0).items():
            if not least <= getattr(self, name) < 1e9:
                raise UserError(f"{name}={getattr(self, name)}: expected a number from {least} to 1e9")

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def window(self, layer: int) -> int:
        """How many keys a query of this layer sees at most, its own included."""
        whole = not self.short_windows or layer % 4 == 3 or layer == self.n_layer - 1
        return self.sequence_len if whole else math.ceil(self.sequence_len / 4)


def architecture(arch: str) -> dict:
    """
    The pieces of "classic" or "modern", or of one of them with changes: "modern,smear=False,rope_theta=1e4".
    UserError for names and values that there are not.
    """
    name, *changes = arch.split(",")
    if name not in ARCHITECTURES:
        raise UserError(f"arch={arch!r}: expected {' or '.join(ARCHITECTURES)}, then changes such as ,smear=False")
    kinds = {f.name: type(f.default) for f in fields(GPTConfig) if f.default is not MISSING and f.name != "softcap"}
    pieces = dict(ARCHITECTURES[name])
    for change in changes:
        piece, _, value = change.strip().partition("=")
        try:
            pieces[piece] = {"True": True, "False": False}[value] if kinds[piece] is bool else kinds[piece](value)
        except (KeyError, ValueError):
            expected = ", ".join(f"{piece}={kind.__name__}" for piece, kind in kinds.items())
            raise UserError(f"arch={arch!r}: there is no {change.strip()!r}; pieces are {expected}") from None
    return pieces


def config_from_depth(
    depth: int, vocab_size: int, sequence_len: int, kv_group: int = 1, softcap: float | None = LOGIT_SOFTCAP,
    arch: str = "classic",
) -> GPTConfig:
    """The one-number family: width 64 per layer, rounded up to whole heads of 128; arch: as `architecture` takes it."""
    n_head = math.ceil(depth * 64 / HEAD_DIM)
    if n_head % kv_group:
        divisors = ", ".join(str(n) for n in range(1, n_head + 1) if n_head % n == 0)
        heads = f"the {n_head} heads of depth {depth}"
        raise UserError(f"kv_group={kv_group} does not divide {heads}; expected one of {divisors}")
    shapes = sequence_len, vocab_size, depth, n_head * HEAD_DIM, n_head, n_head // kv_group
    return GPTConfig(*shapes, softcap, **architecture(arch))


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
    """
    What the blocks read of the tokens. Smear: nanochat, modded-nanogpt, 2025. Bigram vectors: a table of hashed pairs
    (modded-nanogpt 2026, after Svenstrup et al. 2017, arXiv:1709.03933).
    """

    def __init__(self, config: GPTConfig):
        super().__init__(config.padded_vocab_size, config.n_embd)
        self.smear = Gate(1, config.n_embd) if config.smear else None
        self.smear_scale = nn.Parameter(torch.empty(1)) if config.smear else None
        self.bigram = Table(config.bigrams * config.padded_vocab_size, config.n_embd) if config.bigrams else None

    def forward(self, tokens: Tensor, previous: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """
        tokens (…, T) → (embedding, bigram vectors or None), each (…, T, C). previous (…, T): the token before each, −1
        where there is none; None: the tokens are rows of text.
        """
        x = norm(super().forward(tokens))
        if self.smear:
            if previous is None:
                before = F.pad(x[..., :-1, :], (0, 0, 1, 0))
            else:
                before = norm(super().forward(previous.clamp(min=0))) * (previous >= 0)[..., None]
            x = x + self.smear_scale * self.smear(x) * before
        if self.bigram is None:
            return x, None
        previous = F.pad(tokens[..., :-1], (1, 0), value=-1) if previous is None else previous
        return x, self.bigram(((previous + 1) * 0x9E3779B1 + tokens * 0x85EBCA77 >> 7) % self.bigram.num_embeddings)


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
        self.head_gate = Gate(config.n_head, config.n_embd) if config.head_gates else None
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
        y = look(q, k, v)
        if self.head_gate:
            y = y * self.head_gate(x)[..., None]
        return y.reshape(x.shape)


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
        self.first_scales = [  # what they start from: those of the residual stream and of x0 as in nanochat
            *([1.15 - 0.10 * depth, 0.20 - 0.15 * depth] if config.residual_scales else []),
            *([0.1] if config.bigrams else []),
            *([-0.2] if config.backout and layer == config.n_layer - 1 else []),
        ]
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
        for name in ("before", "after") if device.type == "cpu" else ("body",):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=False))

    def mix(self, x: Tensor, streams: tuple[Tensor, ...]) -> Tensor:
        """Add the streams (x0, bigram vectors, the middle of the model; as far as there are), each times a scalar."""
        if self.scales is None:
            return x
        scales = self.scales.unbind()
        if self.residual_scales:
            x, scales = x * scales[0], scales[1:]
        for scale, stream in zip(scales, streams):  # the middle is for the last block alone
            x = x + scale * stream
        return x


class Head(nn.Linear):
    """Turns hidden states (B, T, C) into logits, or with targets into the loss."""

    def __init__(self, config: GPTConfig):
        super().__init__(config.n_embd, config.padded_vocab_size, bias=False)
        self.vocab_size, self.softcap = config.vocab_size, config.softcap

    def forward(
        self, x: Tensor, targets: Tensor | None, weights: Tensor | None, reduction: str, softmax_share: float = 1.0
    ) -> Tensor:
        if targets is None:
            return cap((x @ self.weight.T)[..., : self.vocab_size], self.softcap)
        arguments = x.flatten(0, 1), self.weight, targets.flatten(), self.vocab_size, self.softcap
        if reduction == "none":
            return token_losses(*arguments).view(targets.shape)
        sampled = negatives(targets, self.vocab_size, softmax_share)
        loss = softcapped_cross_entropy(*arguments, None if weights is None else weights.flatten(), sampled)
        return loss / (targets >= 0).sum() if reduction == "mean" else loss


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({
            "wte": Embedding(config),
            "h": nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
        })
        self.lm_head = Head(config)
        self.activation_checkpointing = False  # recompute each block in the backward pass
        self.tokens_checked = False            # whether a batch's ids were compared with the vocabulary

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """
        Draw every weight in float32 from a generator of its own (seed, name): it starts the same whatever else the
        model has, on every rank and for every sharding.
        """
        config = self.config
        bound = math.sqrt(3 / config.n_embd)  # uniform with standard deviation 1/√width
        for name, p in self.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # a CPU's reads 32 bits
            weights = torch.empty(p.shape)
            match name.removesuffix(".weight").split(".")[-1]:
                case "wte":
                    weights.normal_(0, config.embedding_std, generator=generator)
                case "lm_head":
                    weights.normal_(0, 0.001, generator=generator)
                case "c_q" | "c_k" | "c_v" | "values":
                    weights.uniform_(-bound, bound, generator=generator)
                case "c_fc":
                    weights.uniform_(-bound * config.fc_scale, bound * config.fc_scale, generator=generator)
                case "c_proj" | "bigram" | "smear" | "smear_scale" | "value_gate" | "head_gate":
                    weights.zero_()
                case "scales":
                    weights.copy_(torch.tensor(self.get_submodule(name.removesuffix(".scales")).first_scales))
                case _:
                    raise AssertionError(f"no initialisation for {name}")
            p.copy_(weights)

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) → what the head reads, (B, T, C)."""
        return norm(self.blocks(range(self.config.n_layer), tokens, self.embed(tokens))[0])

    def blocks(self, layers: range, tokens: Tensor, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The streams, each (B, T, C), after these of the blocks. tokens: (B, T)."""
        cos, sin = rotary_angles(tokens.size(1), self.config.head_dim, self.config.rope_theta, tokens.device)

        def run(layer: int, x: Tensor, streams: tuple[Tensor, ...]) -> Tensor:
            block, arguments = self.transformer.h[layer], (x, streams, tokens, cos, sin)
            if self.activation_checkpointing and torch.is_grad_enabled():
                return checkpoint(block, *arguments, use_reentrant=False)
            return block(*arguments)

        return self.run_blocks(layers, streams, run)

    def embed(self, tokens: Tensor, previous: Tensor | None = None) -> tuple[Tensor, ...]:
        """The residual stream before the first block, then what blocks add to it again. previous: see Embedding."""
        x, bigram = self.transformer.wte(tokens, previous)
        return x, *((x,) if self.config.residual_scales else ()), *(() if bigram is None else (bigram,))

    def run_blocks(self, layers: range, streams: tuple[Tensor, ...], run: Callable) -> tuple[Tensor, ...]:
        """x, the first of the streams, becomes run(layer, x, other streams) in each of these blocks."""
        x, *others = streams
        for layer in layers:
            if self.config.backout and layer == self.config.n_layer // 2:
                others.append(x)
            x = run(layer, x, tuple(others))
        return x, *others

    def keep(self, layers: range) -> None:
        """Become the part of the model with these blocks, the first with the embedding, the last with the head."""
        if layers.start > 0:
            self.transformer.wte = nn.Identity()
        if layers.stop < self.config.n_layer:
            self.lm_head = nn.Identity()
        for layer in set(range(self.config.n_layer)).difference(layers):
            self.transformer.h[layer] = nn.Identity()  # the others keep their names

    def own_blocks(self) -> list[Block]:
        """All blocks, or those that `keep` has left."""
        return [block for block in self.transformer.h if isinstance(block, Block)]

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, reduction: Literal["mean", "sum", "none"] = "mean",
        weights: Tensor | None = None, softmax_share: float = 1.0,
    ) -> Tensor:
        """
        Without targets: logits (B, T, vocab_size), float32. With targets (B, T), −1 where there is none: the loss
        in nats, the mean or sum over the targets, or with "none" of each target (B, T), without gradient.
        weights (B, T), float32: what each target counts for in a sum; softmax_share: of the vocabulary, in a mean or
        sum, see `negatives`. UserError when the first batch has ids beyond the vocabulary; in a later one the loss of
        such a target is infinite.
        """
        self.check_first(tokens, targets)
        return self.lm_head(self.hidden(tokens), targets, weights, reduction, softmax_share)

    def check_first(self, tokens: Tensor, targets: Tensor | None) -> None:
        """UserError where the first batch has ids beyond the vocabulary. Once: this waits for the device."""
        readable = type(tokens) is Tensor and not tokens.is_meta and not torch.compiler.is_compiling()
        if not self.tokens_checked and readable:
            largest = max(int(ids.max()) for ids in (tokens, targets) if ids is not None)
            if largest >= self.config.vocab_size:
                known = f"this model knows 0 to {self.config.vocab_size - 1}"
                raise UserError(f"the batch has token {largest}; {known}: use the tokenizer that it was made for")
            self.tokens_checked = True

    def compile_blocks(self) -> None:
        device = next(self.parameters()).device
        for block in self.own_blocks():
            block.compile_body(device)

    def multiply_by(self, linear: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Use this function of x and weight instead of F.linear for the products with the blocks' matrices."""
        for block in self.own_blocks():
            block.attn.linear = block.mlp.linear = linear

    def units(self) -> list[nn.Module]:
        """The modules whose parameters are sent and gathered together, in the order of the forward pass."""
        return [self.transformer.wte, *self.transformer.h, self.lm_head]

    def roles(self) -> dict[str, Role]:
        """What each parameter is, by name: optimizers, FLOPs and the horizon go by it, not by names."""
        kinds = {Embedding: "embedding", Table: "table", Head: "head", Gate: "scalar", nn.Linear: "matrix"}
        return {  # the first kind that fits: fully_shard makes subclasses of these classes
            f"{prefix}.{name}": next((role for kind, role in kinds.items() if isinstance(module, kind)), "scalar")
            if name == "weight" else "scalar"
            for prefix, module in self.named_modules() for name, _ in module.named_parameters(recurse=False)
        }

    def count_parameters(self, *roles: Role) -> int:
        """How many parameters have one of these roles."""
        own = self.roles()
        return sum(p.numel() for name, p in self.named_parameters() if own[name] in roles)

    def estimate_flops(self, softmax_share: float = 1.0) -> int:
        """
        FLOPs per token of a training step, forward and backward: 6 per parameter of matrices and head, and 12 · width ·
        window per layer for attention in full. Tables are lookups; gates and scalars are left out. Chowdhery et al.
        2022, arXiv:2204.02311, appendix B.
        """
        windows = sum(map(self.config.window, range(self.config.n_layer)))
        computing = self.count_parameters("matrix") + round(softmax_share * self.count_parameters("head"))
        return 6 * computing + 12 * self.config.n_embd * windows

    @torch.inference_mode()
    def generate(self, tokens: list[int], max_tokens: int):
        """
        Yields up to max_tokens further tokens, each the most likely one after a full pass over all before it: slow,
        plain, and what the engine is compared with.
        """
        ids = torch.tensor([tokens], device=self.lm_head.weight.device)
        for _ in range(max_tokens):
            next_id = self(ids[:, -self.config.sequence_len :])[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, next_id), dim=1)
            yield next_id.item()  # the caller wants the token now: a sync per token is the point
