"""
The model, without optimizers and sharding.

A GPT with rotary positions, RMSNorm without weights (after the embedding, before attention, MLP and head), queries and
keys normalized after the rotation, ReLU² in the MLP, no biases, an untied head with softcapped logits. Output
projections start at zero, so that every block begins as the identity.
"""
import math
import zlib
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanochat.attention import attention
from nanochat.errors import UserError
from nanochat.loss import MAX_SOFTCAP, cap, softcapped_cross_entropy, token_losses

LOGIT_SOFTCAP = 15.0
ROPE_THETA = 10_000.0
NORM_EPS = 1.1920929e-07  # float32 machine epsilon, in every dtype
VOCAB_MULTIPLE = 64       # the vocabulary is padded to it: whole tiles in the largest matrix product


@dataclass(frozen=True)
class GPTConfig:
    """Everything that determines the shapes of a model. UserError for a softcap that the loss cannot compute with."""

    sequence_len: int   # longest row the model is trained on
    vocab_size: int     # tokens that exist; the weights are padded beyond it
    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int      # fewer than n_head: grouped-query attention
    softcap: float | None = LOGIT_SOFTCAP  # limit of the logits; None or 0: none

    def __post_init__(self) -> None:
        limit = self.softcap
        if limit is not None and not (isinstance(limit, (int, float)) and 0 <= limit <= MAX_SOFTCAP):
            expected = f"a number of at most {MAX_SOFTCAP}, or None or 0 for no softcap"
            raise UserError(f"softcap={limit!r}: expected {expected}")

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


def config_from_depth(
    depth: int, vocab_size: int, sequence_len: int, kv_group: int = 1, softcap: float | None = LOGIT_SOFTCAP
) -> GPTConfig:
    """The one-number family: width 64 per layer, heads 128 wide, or the next smaller even width that divides."""
    width = depth * 64
    n_head = next(n for n in range(math.ceil(width / 128), width + 1) if width % (2 * n) == 0)
    if n_head % kv_group:
        divisors = ", ".join(str(n) for n in range(1, n_head + 1) if n_head % n == 0)
        heads = f"the {n_head} heads of depth {depth}"
        raise UserError(f"kv_group={kv_group} does not divide {heads}; expected one of {divisors}")
    return GPTConfig(sequence_len, vocab_size, depth, width, n_head, n_head // kv_group, softcap)


def norm(x: Tensor) -> Tensor:
    """Root mean square over the last dimension becomes one; no learnable weights. Computed in float32."""
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)


def rotary_angles(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position · θ^(−2i/D), each (T, D/2) in float32. Su et al. 2021, arXiv:2104.09864."""
    frequency = ROPE_THETA ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head against each other by its position's angles. x: (B, T, H, D)."""
    x1, x2 = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]  # (T, 1, D/2): the same for every head
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1).type_as(x)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        kv_width = config.n_kv_head * config.head_dim
        self.c_q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.c_k = nn.Linear(config.n_embd, kv_width, bias=False)
        self.c_v = nn.Linear(config.n_embd, kv_width, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x.shape
        # One product and one rotation for all heads: fewer, larger kernels, and a third of their compilation.
        weight = torch.cat((self.c_q.weight, self.c_k.weight, self.c_v.weight))
        qkv = F.linear(x, weight).view(B, T, self.n_head + 2 * self.n_kv_head, self.head_dim)
        qk, v = qkv.split((self.n_head + self.n_kv_head, self.n_kv_head), dim=2)
        q, k = norm(rotate(qk, cos, sin)).transpose(1, 2).split((self.n_head, self.n_kv_head), dim=1)
        y = attention(q, k, v.transpose(1, 2))  # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attn = CausalSelfAttention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(norm(x), cos, sin)
        return x + self.mlp(norm(x))


class Head(nn.Linear):
    """Turns hidden states (B, T, C) into logits, or with targets into the loss."""

    def __init__(self, config: GPTConfig):
        super().__init__(config.n_embd, config.padded_vocab_size, bias=False)
        self.vocab_size, self.softcap = config.vocab_size, config.softcap

    def forward(self, x: Tensor, targets: Tensor | None, weights: Tensor | None, reduction: str) -> Tensor:
        if targets is None:
            return cap(x @ self.weight.T, self.vocab_size, self.softcap)[..., : self.vocab_size]
        arguments = x.flatten(0, 1), self.weight, targets.flatten(), self.vocab_size, self.softcap
        if reduction == "none":
            return token_losses(*arguments).view(targets.shape)
        loss = softcapped_cross_entropy(*arguments, None if weights is None else weights.flatten())
        return loss / (targets >= 0).sum() if reduction == "mean" else loss


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({
            # nn.Embedding would draw its weights, which on the meta device imports the compiler.
            "wte": nn.Embedding.from_pretrained(torch.empty(config.padded_vocab_size, config.n_embd), freeze=False),
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
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
        bound = math.sqrt(3 / self.config.n_embd)  # uniform with standard deviation 1/√width
        for name, p in self.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # a CPU's reads 32 bits
            weights = torch.empty(p.shape)
            match name.split(".")[-2]:
                case "wte":
                    weights.normal_(0, 1, generator=generator)
                case "lm_head":
                    weights.normal_(0, 0.001, generator=generator)
                case "c_q" | "c_k" | "c_v" | "c_fc":
                    weights.uniform_(-bound, bound, generator=generator)
                case "c_proj":
                    weights.zero_()
                case _:
                    raise AssertionError(f"no initialisation for {name}")
            p.copy_(weights)

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) → what the head reads, (B, T, C)."""
        cos, sin = rotary_angles(tokens.size(1), self.config.head_dim, tokens.device)
        x = norm(self.transformer.wte(tokens))
        for block in self.transformer.h:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return norm(x)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, reduction: Literal["mean", "sum", "none"] = "mean",
        weights: Tensor | None = None,
    ) -> Tensor:
        """
        Without targets: logits (B, T, vocab_size), float32. With targets (B, T), −1 where there is none: the loss
        in nats, the mean or sum over the targets, or with "none" of each target (B, T), without gradient.
        weights (B, T), float32: what each target counts for in a sum. UserError when the first batch has ids beyond the
        vocabulary; in a later one the loss of such a target is infinite.
        """
        readable = type(tokens) is Tensor and not tokens.is_meta and not torch.compiler.is_compiling()
        if not self.tokens_checked and readable:  # once: this waits for the device
            largest = max(int(ids.max()) for ids in (tokens, targets) if ids is not None)
            if largest >= self.config.vocab_size:
                known = f"this model knows 0 to {self.config.vocab_size - 1}"
                raise UserError(f"the batch has token {largest}; {known}: use the tokenizer that it was made for")
            self.tokens_checked = True
        return self.lm_head(self.hidden(tokens), targets, weights, reduction)

    def compile_blocks(self) -> None:
        """All blocks share one compiled body: start-up does not grow with depth. A block's hooks stay outside of it."""
        for block in self.transformer.h:
            block.forward = torch.compile(block.forward, dynamic=False)

    def units(self) -> list[nn.Module]:
        """The modules whose parameters are sent and gathered together, in the order of the forward pass."""
        return [self.transformer.wte, *self.transformer.h, self.lm_head]

    def estimate_flops(self) -> int:
        """
        FLOPs per token of a training step, forward and backward: 6 per matrix parameter, and 12 · width · T per
        layer for attention in full. The embedding is a lookup. Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
        """
        matrix_parameters = sum(p.numel() for p in self.parameters()) - self.transformer.wte.weight.numel()
        return 6 * matrix_parameters + 12 * self.config.n_layer * self.config.n_embd * self.config.sequence_len

    @torch.inference_mode()
    def generate(
        self, tokens: list[int], max_tokens: int, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
    ):
        """
        Yields up to max_tokens further tokens, each from a full forward pass over all before it: slow, plain, and
        what the engine is compared with. temperature 0 is greedy; top_k None or 0 considers every token.
        """
        device = self.lm_head.weight.device
        generator = torch.Generator(device=device).manual_seed(seed)
        ids = torch.tensor([tokens], device=device)
        for _ in range(max_tokens):
            logits = self(ids[:, -self.config.sequence_len :])[:, -1]  # (1, vocab_size)
            if temperature == 0:
                next_id = logits.argmax(-1, keepdim=True)
            else:
                if top_k:
                    kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                    logits = logits.masked_fill(logits < kth, float("-inf"))
                next_id = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            ids = torch.cat((ids, next_id), dim=1)
            yield next_id.item()  # the caller wants the token now: a sync per token is the point
