"""
The model, without optimizers and sharding.

A GPT with rotary positions, RMSNorm without weights (after the embedding, before attention, MLP and head), queries and
keys normalized after the rotation, ReLU² in the MLP, no biases, an untied head with softcapped logits. Output
projections start at zero, so that every block begins as the identity. That is the classic architecture; the pieces of
gpt_config.py add to it. Blocks are in layers.py.
"""
import math
import zlib
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanochat.model.attention import document_starts, has_varlen
from nanochat.model.gpt_config import GPTConfig
from nanochat.model.layers import Block, Gate, Positions, Streams, TokenEmbedding, ValueEmbedding, norm, rotary_angles
from nanochat.model.loss import Products, cap, softcapped_cross_entropy, token_losses
from nanochat.runtime.compiling import mark_dynamic

Role = Literal["embedding", "head", "matrix", "value_embedding", "gate", "smear", "residual_scale", "first_scale"]
Reduction = Literal["mean", "sum", "none"]


class Head(nn.Linear):
    """Turns hidden states (…, C) into logits, or with targets (…) into the loss."""

    def __init__(self, config: GPTConfig):
        super().__init__(config.n_embd, config.padded_vocab_size, bias=False)
        self.vocab_size = config.vocab_size
        self.softcap = config.softcap
        self.products: Callable = Products

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
        loss = softcapped_cross_entropy(*rows, weights, self.products)
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
        # Of those in `estimate_flops`, what `forward` has left out since this was last set to 0.
        self.flops_left_out = 0

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw all weights in place."""
        for name, p in self.named_parameters():
            p.copy_(self.draw(name, seed))

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
        match name.removesuffix(".weight").split(".")[-1]:
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

    def own_blocks(self) -> list[Block]:
        """The blocks that `keep_layers` kept; all, if it was not called."""
        return [block for block in self.transformer.h if isinstance(block, Block)]

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
                width = self.config.n_embd
                # Attention's output (width²), the MLP (8 width²) and the head, forward and backward.
                flops = 6 * width * (9 * width + self.config.padded_vocab_size)
                self.flops_left_out += flops * (counts.numel() - len(loss_positions))
        return self.lm_head(self.hidden(tokens, cu_seqlens, loss_positions), targets, weights, reduction)

    def cu_seqlens_of(self, tokens: Tensor) -> Tensor:
        """Where documents begin in rows (B, T), as `forward` takes it. Waits for a GPU."""
        doc_start = tokens == self.config.document_token
        doc_start[:, 0] = True
        return F.pad(doc_start.flatten().nonzero().flatten(), (0, 1), value=doc_start.numel()).int()

    def compile_blocks(self) -> None:
        device = next(self.parameters()).device
        for block in self.own_blocks():
            block.compile_body(device)

    def units(self) -> list[nn.Module]:
        """The modules whose parameters are sent and gathered together, in the order of the forward pass."""
        return [self.transformer.wte, *self.transformer.h, self.lm_head]

    def roles(self) -> dict[str, Role]:
        """The role of each parameter, by name: optimizers, FLOPs and the horizon depend on roles, not on names."""
        kinds = {TokenEmbedding: "embedding", ValueEmbedding: "value_embedding", Head: "head", Gate: "gate",
                 nn.Linear: "matrix"}
        roles: dict[str, Role] = {}
        for prefix, module in self.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                role: Any = name
                if prefix.endswith("smear") or name in ("smear_scale", "middle_scale"):
                    role = "smear"
                elif name == "weight":
                    # The first class that fits: a Head is a Linear, too, and fully_shard subclasses all of them.
                    role = next(kinds[kind] for kind in kinds if isinstance(module, kind))
                roles[f"{prefix}.{name}"] = role
        return roles

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


def model_without_memory(config: GPTConfig) -> GPT:
    """A model on the device "meta": parameters have shapes, but no memory, as random weights would be replaced."""
    with torch.device("meta"):
        return GPT(config)
