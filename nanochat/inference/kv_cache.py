"""
The model with a cache of keys and values.

No token sees a later one, so its keys and values never change: they are computed once and kept. Then a prompt is read
in a few passes (`extend`), and each further token costs one row of matrix products (`decode`) instead of a pass over
everything before it.

What has been read is in one of two places. A `Prefix` is the beginning of a prompt, in pieces; it belongs to no row, so
any number of answers may continue it, and the prompt cache keeps its pieces. `insert` copies it into a row of the cache
proper, where one answer grows by a token a step:

    kv  (n_layer, 2, rows, H_kv, capacity, D)       row r holds lengths[r] tokens, from position 0 on

Rows have different lengths, and masks hide what a row has not reached. There are no holes between rows: when a row is
removed, the last one moves into its place. The cache grows by large steps, so that little is copied, shrinks when long
sequences have left, and is freed when all have.
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
    """The beginning of a prompt, as far as it has been read."""

    pieces: tuple[Tensor, ...] = ()  # (n_layer, 2, H_kv, T, D) each: keys, values
    length: int = 0                  # tokens: the sum of the pieces' T
    last: int = -1                   # the last token; −1: none
    hidden: Tensor | None = None     # (T, C), what the head reads, of the last piece; None: it was not computed here


class CachedModel:
    """
    A model's weights, laid out for decoding, and the cache, in the same dtype. Some weights are copies: make a new one
    after an update. At most max_rows sequences are decoded together.

    compile: compile `step` now, once for one row and once for several (docs/server.md says how long that takes).
    """

    def __init__(self, model: GPT, max_rows: int, compile: bool = False):
        self.model, self.config, self.max_rows, self.is_compiled = model, model.config, max_rows, compile
        config, device = self.config, model.lm_head.weight.device
        self.windows = {config.window(layer) for layer in range(config.n_layer)}
        prepared = partial(linear, pack=not compile)
        self.products = []  # of each block: qkv, attention's projection, the two of the MLP
        with torch.inference_mode():
            for block in model.transformer.h:
                attn, mlp = block.attn, block.mlp
                qkv = torch.cat((attn.c_q.weight, attn.c_k.weight, attn.c_v.weight))  # one product for all heads
                weights = qkv, attn.c_proj.weight, mlp.c_fc.weight, mlp.c_proj.weight
                self.products.append([prepared(weight) for weight in weights])
            self.head = prepared(model.lm_head.weight)
            self.angles = rotary_angles(config.sequence_len, config.head_dim, config.rope_theta, device)
        self.clear()
        if compile:
            self.step = torch.compile(self.step, dynamic=False)
            for rows in {1, min(5, max_rows)}:  # 5: a number that is no other size here, so it is taken for "any"
                prefix = self.extend(Prefix(), [0] * min(17, config.sequence_len - 1))
                for _ in range(rows):
                    self.insert(prefix)
                self.decode([0] * rows)
                self.clear()

    def clear(self) -> None:
        """Forget every sequence."""
        self.lengths: list[int] = []    # of each row: tokens that have been read
        self.last: list[int] = []       # of each row: the last of them, which the next one's embedding needs
        config = self.config
        self.kv = self.model.lm_head.weight.new_empty(config.n_layer, 2, 0, config.n_kv_head, 0, config.head_dim)

    # ---- Prompts

    def extend(self, prefix: Prefix, tokens: list[int]) -> Prefix:
        """Read the next tokens of a prompt of at most sequence_len, all at once. The cache does not change."""
        return self.extend_all([(prefix, tokens)])[0]

    @torch.inference_mode()
    def extend_all(self, prompts: list[tuple[Prefix, list[int]]]) -> list[Prefix]:
        """
        `extend` for several prompts in one pass. Their tokens lie end to end, T together: the products with weights,
        which take most of the time, are done for all of them; attention for one prompt after the other.
        """
        device = self.kv.device
        lengths = [len(tokens) for _, tokens in prompts]
        ids, previous, positions = [], [], []
        spans = []
        for prefix, tokens in prompts:
            span = range(prefix.length, prefix.length + len(tokens))
            spans.append(span)
            ids += tokens
            previous += [prefix.last, *tokens[:-1]]
            positions += span
        masks = {}
        for window in self.windows:
            # The first token of the span sees no key before `start + 1 - window`: earlier ones are left out.
            firsts = [max(span.start + 1 - window, 0) for span in spans]
            masks[window] = [
                (first, as_mask(visible(span.start, span.stop, first, window, device)))  # (tokens, keys)
                for first, span in zip(firsts, spans)
            ]
        pieces = []  # of each layer (2, H_kv, T, D)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pieces.append(torch.stack((k, v)).transpose(1, 2))
            new = pieces[-1].split(lengths, dim=2)
            outputs = []
            for (prefix, _), its_q, own, (first, mask) in zip(
                prompts, q.split(lengths), new, masks[self.config.window(layer)]
            ):
                read = [piece[layer] for piece in prefix.pieces]
                keys, values = torch.cat([*read, own], dim=2)[:, :, first:]             # (H_kv, keys, D) each
                queries = its_q.transpose(0, 1)                                         # (H, tokens, D)
                # Query heads that share a key head are one long list of queries to it.
                grouped = queries.reshape(len(keys), -1, q.size(-1))                    # (H_kv, G * tokens, D)
                y = scaled_dot_product(grouped, keys, values, mask.repeat(len(queries) // len(keys), 1))
                outputs.append(y.view(queries.shape).transpose(0, 1))                   # (tokens, H, D)
            return torch.cat(outputs)

        hidden = self.hidden(*torch.tensor([ids, previous, positions], device=device), attend)
        own_pieces = torch.stack(pieces).split(lengths, dim=3)  # (n_layer, 2, H_kv, tokens, D) each
        return [
            Prefix((*prefix.pieces, piece), span.stop, tokens[-1], its_hidden)
            for (prefix, tokens), piece, span, its_hidden in zip(prompts, own_pieces, spans, hidden.split(lengths))
        ]

    # ---- Rows

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
            return self.clear()
        capacity = self.rounded(1.25 * max(self.lengths))
        if self.kv.size(4) > 2 * capacity:
            self.resize(self.kv.size(2), capacity)

    @torch.inference_mode()
    def decode(self, tokens: list[int]) -> Tensor:
        """Read one more token in every row; returns the raw logits after it, (rows, vocab_size) in float32."""
        rows, device = len(tokens), self.kv.device
        longest = max(self.lengths) + 1
        self.reserve(rows, longest)
        # Nobody needs the positions beyond the longest row. They are left out in float32 on a CPU alone: its products
        # in bfloat16 are 2 to 10 times slower where the cache is not contiguous, and compiled code would become one
        # more when a row fills it.
        if self.is_compiled or self.kv.dtype != torch.float32 or device.type != "cpu":
            longest = self.kv.size(4)
        keys = torch.arange(longest, device=device)
        kv = [part for layer in self.kv[:, :, :rows].unbind() for part in layer.unbind()]
        now = torch.tensor([tokens, self.last, self.lengths], device=device)
        if self.is_compiled:
            mark = torch._dynamo.maybe_mark_dynamic  # these sizes change from step to step
            mark(now, 1)
            mark(keys, 0)
            for part in kv:
                mark(part, (0, 2))
        logits = self.step(now, keys, kv)
        self.lengths = [length + 1 for length in self.lengths]
        self.last = list(tokens)
        return logits

    def step(self, now: Tensor, keys: Tensor, kv: list[Tensor]) -> Tensor:
        """
        What `decode` computes. now (3, rows): the token of each row, the one before it, and its position; keys (K,):
        the positions to look at; kv: keys, then values of each layer, (rows, H_kv, capacity, D), to which it adds.
        """
        tokens, previous, positions = now.unbind()
        rows, heads = len(tokens), self.config.n_kv_head
        all_rows = torch.arange(rows, device=now.device)
        # A mask hides what a row has not reached, and what is beyond the window of a layer: that starts elsewhere in
        # each row, so there is no smaller rectangle.
        masks = {}
        for window in self.windows:
            seen = keys <= positions[:, None]                                   # (rows, K)
            if window < self.config.sequence_len:
                seen &= keys > positions[:, None] - window
            masks[window] = as_mask(seen).repeat_interleave(heads, dim=0)[:, None]  # (rows * H_kv, 1, K)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            all_keys, all_values = kv[2 * layer], kv[2 * layer + 1]
            all_keys[all_rows, :, positions] = k
            all_values[all_rows, :, positions] = v
            k, v = (part[:, :, : len(keys)].flatten(0, 1) for part in (all_keys, all_values))  # (rows * H_kv, K, D)
            grouped = q.reshape(rows * heads, -1, q.size(-1))                                  # (rows * H_kv, G, D)
            return scaled_dot_product(grouped, k, v, masks[self.config.window(layer)]).view(q.shape)

        return self.logits(self.hidden(tokens, previous, positions, attend))

    # ---- Both

    def hidden(self, tokens: Tensor, previous: Tensor, positions: Tensor, attend: Callable) -> Tensor:
        """
        The blocks of the model, for N tokens of any sequences: (N,) each → (N, C), what the head reads. previous: the
        token before each, −1 where there is none. attend(layer, q, k, v) → (N, H, D) lets the tokens see others: q is
        (N, H, D), k and v are (N, H_kv, D).
        """
        cos, sin = (angle[positions] for angle in self.angles)

        x = self.model.transformer.wte(tokens, previous)
        for layer, (block, products) in enumerate(zip(self.model.transformer.h, self.products)):
            qkv, attn_proj, mlp_fc, mlp_proj = products
            h = norm(x)
            values = None if block.values is None else block.values(tokens)
            q, k, v = block.attn.split_heads(qkv(h), cos, sin)                  # (N, H or H_kv, D)
            v = block.attn.add_value_embedding(h, v, values)
            y = attend(layer, q, k, v).reshape(h.shape)                         # (N, C)
            x = attn_proj(y).add_(x)
            x = x.add_(mlp_proj(F.relu(mlp_fc(norm(x))).square_()))
        return norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, C) → (N, vocab_size) in float32, before the softcap."""
        return self.head(hidden)[:, : self.config.vocab_size].float()

    # ---- Room

    def reserve(self, rows: int, length: int) -> None:
        """
        Make room, with some to spare: twice the rows, a quarter more positions. All copies together are a few times the
        final size, and at most a quarter of the positions (or a unit) are computed for nothing.
        """
        assert rows <= self.max_rows and length <= self.config.sequence_len, "positions beyond it were never trained"
        old_rows, old_capacity = self.kv.size(2), self.kv.size(4)
        new_rows, capacity = old_rows, old_capacity
        if rows > old_rows:
            new_rows = min(max(2 * old_rows, rows), self.max_rows)
        if length > old_capacity:
            capacity = self.rounded(max(length, 1.25 * old_capacity))
        if (new_rows, capacity) != (old_rows, old_capacity):
            self.resize(new_rows, capacity)

    def rounded(self, length: float) -> int:
        return min(math.ceil(length / CAPACITY_UNIT) * CAPACITY_UNIT, self.config.sequence_len)

    def resize(self, rows: int, capacity: int) -> None:
        """Copy into a cache of this size. New places are zeros: a NaN in memory, masked to zero, would stay NaN."""
        n_layer, _, old_rows, heads, old_capacity, D = self.kv.shape
        both = min(capacity, old_capacity)
        new = self.kv.new_zeros(n_layer, 2, rows, heads, capacity, D)
        new[:, :, :old_rows, :, :both] = self.kv[:, :, :, :, :both]
        self.kv = new


def as_mask(seen: Tensor) -> Tensor:
    """A tensor of bools as what is added to scores: 0 where a key is seen, else −inf; float32."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))


def scaled_dot_product(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """
    q (N, Q, D) against keys and values (N, K, D) → (N, Q, D). N counts pairs of a sequence and a key head, Q the
    queries that look at these keys. mask: from `as_mask`, broadcast to (N, Q, K). Two plain products, like training's
    `blockwise_attention`; scores and softmax in float32.
    """
    scores = torch.bmm(q, keys.mT)                                                  # (N, Q, K)
    p = torch.add(mask, scores, alpha=q.size(-1) ** -0.5).softmax(-1)
    return torch.bmm(p.to(values.dtype), values)


# ---- Products with constant weights: with few rows of x, reading the weight takes the time

def linear(weight: Tensor, pack: bool = True) -> Callable[[Tensor], Tensor]:
    """
    The function x → x weightᵀ of x (N, C), in x's dtype, for a weight (O, C) that stays as it is.

    On a CPU the weight is laid out once, here: float32 as (C, O), along which a product of few rows reads memory at
    full rate; bfloat16 in the blocks that oneDNN wants, which F.linear would make in every call (2 to 4 times slower
    with AMX). pack=False: without such blocks, which torch.compile cannot read.
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
