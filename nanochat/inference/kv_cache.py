"""
The model with a cache of keys and values. Those of a token never change: a prompt is read in a few passes, and each
further token costs one row of matrix products instead of a pass over all before it.

Sequences of any lengths are in the first rows of the cache, one each, from position 0 on; when one is removed, the last
one moves into its row. The cache grows by large parts, so that little is copied. It shrinks when long sequences are
removed, and is freed when all are.
"""
import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.model.attention import visible
from nanochat.model.gpt import GPT
from nanochat.model.layers import norm, rotary_angles

CAPACITY_UNIT = 64  # positions; the capacity is a multiple of it


class Prefix(NamedTuple):
    """The beginning of a prompt, as far as it has been read; any number of sequences may continue it."""

    pieces: tuple[Tensor, ...] = ()  # (n_layer, 2, H_kv, T, D) each: keys, values
    length: int = 0                  # tokens, the T of all pieces
    last: int = -1                   # the last token; −1: none
    cached: int = 0                  # tokens that were not read for this prompt: the prompt cache had them
    logits: Tensor | None = None     # (1, vocab_size) after the last token, or (T, …) after each; None: it was cached


class CachedModel:
    """
    A model's weights, laid out for decoding, and a cache in their dtype. Some are copies: make a new one after updates.
    lengths[row]: how many tokens of the sequence in that row have been read; last[row]: the last of them, which the
    embedding of the next one needs. There are at most max_rows.
    """

    def __init__(self, model: GPT, max_rows: int, compile: bool = False):
        """compile: compile `step` now, for all numbers of rows and positions (docs/server.md says what that takes)."""
        self.model, self.config, self.max_rows, self.is_compiled = model, model.config, max_rows, compile
        prepared = partial(linear, pack=not compile)
        with torch.inference_mode():
            self.layers = [
                (block,
                 prepared(torch.cat((block.attn.c_q.weight, block.attn.c_k.weight, block.attn.c_v.weight))),
                 prepared(block.attn.c_proj.weight), prepared(block.mlp.c_fc.weight), prepared(block.mlp.c_proj.weight))
                for block in model.transformer.h
            ]
            self.head = prepared(model.lm_head.weight)
            config, device = self.config, model.lm_head.weight.device
            self.windows = {config.window(layer) for layer in range(config.n_layer)}
            self.angles = rotary_angles(config.sequence_len, config.head_dim, config.rope_theta, device)
        self.clear()
        if compile:
            self.step = torch.compile(self.step, dynamic=False)
            for rows in {1, min(5, max_rows)}:  # one row is code of its own; 5 is no other size here
                prefix = self.extend(Prefix(), [0] * min(17, self.config.sequence_len - 1))
                for _ in range(rows):
                    self.insert(prefix)
                self.decode([0] * rows)
                self.clear()

    def clear(self) -> None:
        """Forget every sequence."""
        self.lengths: list[int] = []
        self.last: list[int] = []
        # (n_layer, 2, rows, H_kv, capacity, D): keys, values
        shape = self.config.n_layer, 2, 0, self.config.n_kv_head, 0, self.config.head_dim
        self.kv = self.model.lm_head.weight.new_empty(shape)

    def extend(self, prefix: Prefix, tokens: list[int], every: bool = False) -> Prefix:
        """
        Read the next tokens of a prompt of at most sequence_len, all at once; the cache does not change. every: keep
        the logits after each of them, (T, vocab_size), not only after the last one.
        """
        return self.extend_all([(prefix, tokens)], every)[0]

    @torch.inference_mode()
    def extend_all(self, parts: list[tuple[Prefix, list[int]]], every: bool = False) -> list[Prefix]:
        """`extend` for several prompts in one pass. They lie end to end, T tokens together, and none sees another."""
        lengths = [len(tokens) for _, tokens in parts]
        spans = [(prefix.length, prefix.length + length) for (prefix, _), length in zip(parts, lengths)]
        # The key that the first token of each part sees.
        first = {window: [max(start + 1 - window, 0) for start, _ in spans] for window in self.windows}
        masks, kept = {}, []
        for window in self.windows:
            seen = [visible(*span, key, window, self.kv.device) for span, key in zip(spans, first[window])]
            unseen = ~torch.block_diag(*seen)
            mask = torch.zeros(unseen.shape, device=self.kv.device).masked_fill_(unseen, float("-inf"))
            masks[window] = mask.repeat(self.config.n_head // self.config.n_kv_head, 1)  # (G * T, keys)

        def look(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kept.append(torch.stack((k, v)).transpose(1, 2))  # (2, H_kv, T, D)
            window, whole = self.config.window(layer), []
            for (prefix, _), own, key in zip(parts, kept[-1].split(lengths, dim=2), first[window]):
                whole.append(torch.cat([*(piece[layer] for piece in prefix.pieces), own], dim=2)[:, :, key:])
            keys, values = torch.cat(whole, dim=2)[:, None]  # (1, H_kv, keys, D) each
            y = attend_one(q.transpose(0, 1).reshape(1, -1, q.size(-1)), keys, values, masks[window])
            return y.view(q.size(1), -1, q.size(-1)).transpose(0, 1)  # (T, H, D)

        ids = [id for _, tokens in parts for id in tokens]
        previous = [id for prefix, tokens in parts for id in (prefix.last, *tokens[:-1])]
        positions = [position for span in spans for position in range(*span)]
        x = self.hidden(*torch.tensor([ids, previous, positions], device=self.kv.device), look)
        x = x if every else torch.stack([of_part[-1] for of_part in x.split(lengths)])
        logits = self.logits(x).split(lengths if every else 1)
        pieces = torch.stack(kept).split(lengths, dim=3)  # (n_layer, 2, H_kv, length, D) each
        return [Prefix((*prefix.pieces, piece), end, tokens[-1], prefix.cached, after)
                for (prefix, tokens), (_, end), piece, after in zip(parts, spans, pieces, logits)]

    @torch.inference_mode()
    def insert(self, prefix: Prefix) -> None:
        """Add a row that continues a prefix."""
        row = len(self.lengths)
        self.reserve(row + 1, prefix.length)
        self.kv[:, :, row, :, : prefix.length] = torch.cat(prefix.pieces, dim=3)
        self.lengths.append(prefix.length)
        self.last.append(prefix.last)

    @torch.inference_mode()
    def piece(self, row: int, start: int, end: int) -> Tensor:
        """A copy of the keys and values of these positions of a row: a piece of a prefix."""
        return self.kv[:, :, row, :, start:end].clone(memory_format=torch.contiguous_format)

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """Free a row; the last one moves into its place."""
        length, last = self.lengths.pop(), self.last.pop()
        end = len(self.lengths)
        if row != end:
            self.lengths[row], self.last[row] = length, last
            self.kv[:, :, row, :, :length] = self.kv[:, :, end, :, :length]
        if not self.lengths:
            self.clear()
        elif self.kv.size(4) > 2 * (capacity := self.capacity_for(1.25 * max(self.lengths))):
            self.kv = resized(self.kv, self.kv.size(2), capacity)

    @torch.inference_mode()
    def decode(self, tokens: list[int]) -> Tensor:
        """Read one more token in every row; returns the raw logits after it, (rows, vocab_size) in float32."""
        rows, device = len(tokens), self.kv.device
        self.reserve(rows, max(self.lengths) + 1)
        # A rectangle of the cache, up to the longest row's end; whole where it has to be contiguous: a CPU's bf16
        # products are 2 to 10 times slower otherwise, and compiled code would become one more when a row fills it.
        whole = self.is_compiled or self.kv.dtype != torch.float32 or device.type != "cpu"
        keys = torch.arange(self.kv.size(4) if whole else max(self.lengths) + 1, device=device)
        kv = [part for layer in self.kv[:, :, :rows].unbind() for part in layer.unbind()]
        now = torch.tensor([tokens, self.last, self.lengths], device=device)
        if self.is_compiled:  # sizes that change
            for tensor, *dims in (now, 1), (keys, 0), *((part, 0, 2) for part in kv):
                torch._dynamo.maybe_mark_dynamic(tensor, dims)
        logits = self.step(now, keys, kv)
        self.lengths, self.last = [length + 1 for length in self.lengths], list(tokens)
        return logits

    def step(self, now: Tensor, keys: Tensor, kv: list[Tensor]) -> Tensor:
        """
        What `decode` computes. now (3, rows): the token of each row, the one before, and its position; keys (T,): the
        positions to look at; kv: keys, then values of each layer, (rows, H_kv, capacity, D), to which it adds.
        """
        tokens, previous, positions = now.unbind()
        all_rows = torch.arange(len(positions), device=now.device)
        # The masks hide what a row has not reached, or is beyond the window of its layer: that starts elsewhere in each
        # row, so there is no smaller rectangle.
        masks = {}
        for window in self.windows:
            unseen = keys > positions[:, None]
            if window < self.config.sequence_len:
                unseen |= keys <= positions[:, None] - window
            mask = torch.zeros(unseen.shape, device=now.device).masked_fill_(unseen, float("-inf"))
            masks[window] = mask.repeat_interleave(self.config.n_kv_head, dim=0)[:, None]  # (rows * H_kv, 1, T)

        def look(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            both = kv[2 * layer : 2 * layer + 2]
            for part, new in zip(both, (k, v)):
                part[all_rows, :, positions] = new
            seen = (part[:, :, : len(keys)] for part in both)
            return attend_one(q, *seen, masks[self.config.window(layer)])

        return self.logits(self.hidden(tokens, previous, positions, look))

    def hidden(self, tokens: Tensor, previous: Tensor, positions: Tensor, look: Callable) -> Tensor:
        """
        The blocks of the model → (N, C), for N tokens of any sequences; previous: the token before each, −1 where there
        is none. What they see of other tokens is up to
        look(layer, q (N, H, D), k (N, H_kv, D), v) → (N, H, D).
        """
        cos, sin = (angle[positions] for angle in self.angles)

        x = self.model.transformer.wte(tokens, previous)
        for layer, (block, qkv, attn_proj, fc, mlp_proj) in enumerate(self.layers):
            h = norm(x)
            values = None if block.values is None else block.values(tokens)
            q, k, v = block.attn.split_heads(qkv(h), cos, sin)
            v = block.attn.add_value_embedding(h, v, values)
            y = look(layer, q, k, v).reshape(h.shape)
            x = attn_proj(y).add_(x)
            x = x.add_(mlp_proj(F.relu(fc(norm(x))).square_()))
        return norm(x)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)[:, : self.config.vocab_size].float()

    def reserve(self, rows: int, length: int) -> None:
        """
        Make room: twice the rows, a quarter more positions. All copies together are a few times the final size; what is
        computed for positions that the longest sequence has not reached is at most that quarter or a unit.
        """
        assert rows <= self.max_rows and length <= self.config.sequence_len, "positions beyond it were never trained"
        old_rows, capacity = self.kv.size(2), self.kv.size(4)
        new_rows = min(max(2 * old_rows, rows), self.max_rows) if rows > old_rows else old_rows
        if length > capacity:
            capacity = self.capacity_for(max(length, 1.25 * capacity))
        if (new_rows, capacity) != (old_rows, self.kv.size(4)):
            self.kv = resized(self.kv, new_rows, capacity)

    def capacity_for(self, length: float) -> int:
        return min(math.ceil(length / CAPACITY_UNIT) * CAPACITY_UNIT, self.config.sequence_len)


def resized(kv: Tensor, rows: int, capacity: int) -> Tensor:
    """A copy with so many rows and positions. New ones are zeros: a NaN in memory, masked to zero, would stay NaN."""
    n_layer, _, old_rows, heads, old_capacity, D = kv.shape
    new = kv.new_zeros(n_layer, 2, rows, heads, capacity, D)
    both = min(capacity, old_capacity)
    new[:, :, :old_rows, :, :both] = kv[:, :, :, :, :both]
    return new


def attend_one(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """
    Queries of each row against that row's keys: q (N, H, D), a token of each of N rows, or (1, H · T, D), T tokens of
    one row, head by head; keys, values (N, H_kv, K, D); mask (N · H_kv, 1, K) or (G · T, K), 0 or −inf, float32.
    Returns q's shape. Two plain products, like `blockwise_attention`; scores and softmax in float32.
    """
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    scores = torch.bmm(q.reshape(len(keys), -1, q.size(-1)), keys.mT)             # (N · H_kv, queries, K)
    p = torch.add(mask, scores, alpha=q.size(-1) ** -0.5).softmax(-1)
    return torch.bmm(p.to(values.dtype), values).view(q.shape)


# ---- Products with constant weights: decoding has few rows of x, so that reading the weight takes the time

def linear(weight: Tensor, pack: bool = True) -> Callable[[Tensor], Tensor]:
    """
    The function x → x weightᵀ of x (N, C), in x's dtype, for a weight (O, C) that stays as it is. On a CPU the weight
    is laid out here, once: float32 as (C, O), along which a product of few rows reads memory at its rate; bfloat16 in
    the blocks that oneDNN reads, which F.linear makes in every call, unless pack is False: torch.compile cannot read
    them.
    """
    if weight.device.type != "cpu":
        return partial(F.linear, weight=weight)
    if weight.dtype == torch.float32 or not pack or not can_pack(weight.dtype):
        return partial(torch.mm, mat2=weight.T.contiguous())
    return partial(packed_product, torch.ops.mkldnn._reorder_linear_weight(weight))


def packed_product(packed: Tensor, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether torch has these kernels for this CPU. They are not its public interface, so they are tried."""
    x, weight = torch.ones(4, 32, dtype=dtype), torch.ones(64, 32, dtype=dtype)
    try:
        return torch.equal(packed_product(torch.ops.mkldnn._reorder_linear_weight(weight), x), x @ weight.T)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
