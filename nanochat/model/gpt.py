"""
The model, without optimizers and sharding.

A GPT with rotary positions, RMSNorm without weights (after the embedding, before attention, MLP and head), queries and
keys normalized after the rotation, ReLU² in the MLP, no biases, an untied head with softcapped logits. Output
projections start at zero, so that every block begins as the identity. That is the classic architecture; the pieces of
gpt_config.py add to it. A block is in layers.py.
"""
import math
import zlib
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanochat.model.gpt_config import GPTConfig
from nanochat.model.layers import Block, Embedding, Gate, Table, norm, rotary_angles
from nanochat.model.loss import cap, softcapped_cross_entropy, token_losses
from nanochat.runtime.errors import UserError

Role = Literal["embedding", "head", "matrix", "table", "scalar"]


class Head(nn.Linear):
    """Turns hidden states (B, T, C) into logits, or with targets into the loss."""

    def __init__(self, config: GPTConfig):
        super().__init__(config.n_embd, config.padded_vocab_size, bias=False)
        self.vocab_size, self.softcap = config.vocab_size, config.softcap

    def forward(
        self, x: Tensor, targets: Tensor | None = None, weights: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        if targets is None:
            return cap((x @ self.weight.T)[..., : self.vocab_size], self.softcap)
        arguments = x.flatten(0, 1), self.weight, targets.flatten(), self.vocab_size, self.softcap
        if reduction == "none":
            return token_losses(*arguments).view(targets.shape)
        loss = softcapped_cross_entropy(*arguments, None if weights is None else weights.flatten())
        return loss / (targets >= 0).sum().clamp(min=1) if reduction == "mean" else loss


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
        """Draw all weights in place."""
        for name, p in self.named_parameters():
            p.copy_(self.draw(name, seed))

    def draw(self, name: str, seed: int) -> Tensor:
        """
        The first weights of a parameter, float32 on the CPU, from a generator of its own (seed, name): they are the
        same whatever else the model has, on every rank and for every sharding.
        """
        config = self.config
        bound = math.sqrt(3 / config.n_embd)  # uniform with standard deviation 1/√width
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # a CPU's reads 32 bits
        weights = torch.empty(self.get_parameter(name).shape)
        match name.removesuffix(".weight").split(".")[-1]:
            case "wte":
                weights.normal_(0, config.embedding_std, generator=generator)
            case "lm_head":
                weights.normal_(0, 0.001, generator=generator)
            case "c_q" | "c_k" | "c_v" | "values":
                weights.uniform_(-bound, bound, generator=generator)
            case "c_fc":
                weights.uniform_(-bound * config.fc_scale, bound * config.fc_scale, generator=generator)
            case "c_proj" | "smear" | "smear_scale" | "value_gate":
                weights.zero_()
            case "scales":
                weights.copy_(torch.tensor(self.get_submodule(name.removesuffix(".scales")).first_scales))
            case _:
                raise AssertionError(f"no initialisation for {name}")
        return weights

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
        x = self.transformer.wte(tokens, previous)
        return (x, x) if self.config.residual_scales else (x,)

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
        weights: Tensor | None = None,
    ) -> Tensor:
        """
        Without targets: logits (B, T, vocab_size), float32. With targets (B, T), −1 where there is none: the loss
        in nats, the mean or sum over the targets, or with "none" of each target (B, T), without gradient.
        weights (B, T), float32: what each target counts for in a sum. UserError when the first batch has ids beyond
        the vocabulary; in a later one the loss of such a target is infinite.
        """
        self.check_first(tokens, targets)
        return self.lm_head(self.hidden(tokens), targets, weights, reduction)

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

    def estimate_flops(self) -> int:
        """
        FLOPs per token of a training step, forward and backward: 6 per parameter of matrices and head, and 12 · width ·
        window per layer for attention in full. Tables are lookups; gates and scalars are left out. Chowdhery et al.
        2022, arXiv:2204.02311, appendix B.
        """
        windows = sum(map(self.config.window, range(self.config.n_layer)))
        return 6 * self.count_parameters("matrix", "head") + 12 * self.config.n_embd * windows

    @torch.no_grad()  # not inference_mode: on stage 3 training goes on with the memory that units are gathered into
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
