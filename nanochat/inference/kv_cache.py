"""
The model with a cache of keys and values.

No token sees a later one, so its keys and values never change: they are computed once and kept. Then a prompt is read
in a few passes (`extend`), and each further token costs one row of matrix products (`decode`) instead of a pass over
everything before it.

What has been read is in one of two places. A `Prefix` is the beginning of a prompt, in pieces; it belongs to no row, so
any number of answers may continue it, and the prompt cache keeps its pieces. `insert` copies it into a row of the cache
proper, where one answer grows by a token a step:

    kv  (n_layer, 2, rows, H_kv, capacity, D)       row r holds rows[r].length tokens, from position 0 on

Rows have different lengths, and masks hide what a row has not reached. There are no holes between rows: when a row is
removed, the last one moves into its place. The cache grows by large steps, so that little is copied, shrinks when long
sequences have left, and is freed when all have.
"""
import math
from collections.abc import Callable
from functools import partial
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
    begin: int = 0                   # where the last document among them begins
    hidden: Tensor | None = None     # (T, C), what the head reads, of the last piece; None: it was not computed here


class CachedModel:
    """
    A model's weights, laid out for decoding, and the cache, in the same dtype. Some weights are copies: make a new one
    after an update. At most max_rows sequences are decoded together.
    """

    def __init__(self, model: GPT, max_rows: int):
        self.model = model
        self.config = model.config
        self.max_rows = max_rows
        config, device = model.config, model.lm_head.weight.device
        self.windows = {config.window(layer) for layer in range(config.n_layer)}
        self.products = []  # of each block: qkv, attention's projection, the two of the MLP
        with torch.inference_mode():
            for block in model.transformer.h:
                attn, mlp = block.attn, block.mlp
                qkv = torch.cat((attn.c_q.weight, attn.c_k.weight, attn.c_v.weight))  # one product for all heads
                weights = qkv, attn.c_proj.weight, mlp.c_fc.weight, mlp.c_proj.weight
                self.products.append([linear(weight) for weight in weights])
            self.head = linear(model.lm_head.weight)
            self.angles = rotary_angles(config.sequence_len, config.head_dim, config.rope_theta, device)
        self.clear()

    def clear(self) -> None:
        """Forget every sequence."""
        self.rows: list[Prefix] = []    # what has been read of each row, without its tensors
        config = self.config
        self.kv = self.model.lm_head.weight.new_empty(config.n_layer, 2, 0, config.n_kv_head, 0, config.head_dim)

    # ---- Prompts

    @torch.inference_mode()
    def extend(self, prompts: list[tuple[Prefix, list[int]]]) -> list[Prefix]:
        """
        Read the next tokens of several prompts, each of at most sequence_len, in one pass. The cache does not change.

        Their tokens lie end to end, T together: the products with weights, which take most of the time, are done for
        all of them; attention for one prompt after the other.
        """
        device = self.kv.device
        spans = []      # positions of each prompt's new tokens
        ids, previous, positions, begins = [], [], [], []
        last_begins = []  # where the last document of each prompt begins
        for prefix, tokens in prompts:
            span = range(prefix.length, prefix.length + len(tokens))
            spans.append(span)
            ids += tokens
            previous += [prefix.last, *tokens[:-1]]
            positions += span
            its_begins = begins_after(prefix, tokens, self.config.document_token)
            begins += its_begins
            last_begins.append(its_begins[-1])
        lengths = [len(span) for span in spans]
        # One copy to the device.
        ids, previous, positions, begins = torch.tensor([ids, previous, positions, begins], device=device)

        masks = {}      # for each window, one of each prompt and the key that it begins with
        for window in self.windows:
            masks[window] = []
            for span, its_begins in zip(spans, begins.split(lengths)):
                # The first token of the span sees no key before this one: earlier ones are left out.
                first = max(span.start + 1 - window, 0)
                mask = as_mask(visible(span.start, span.stop, first, window, device, its_begins))  # (tokens, keys)
                masks[window].append((first, mask))

        new = []        # of each layer (2, H_kv, T, D)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            new.append(torch.stack((k, v)).transpose(1, 2))
            outputs = []
            queries = q.split(lengths)
            own = new[layer].split(lengths, dim=2)
            for (prefix, _), its_q, its_kv, (first, mask), its_begins in zip(
                prompts, queries, own, masks[self.config.window(layer)], begins.split(lengths)
            ):
                earlier = [piece[layer] for piece in prefix.pieces]
                kv = torch.cat([*earlier, its_kv], dim=2)       # (2, H_kv, length, D)
                follows = None
                if self.config.offsets_keys(layer):     # then first is 0
                    follows = torch.arange(kv.size(2), device=device) > its_begins[:, None]  # (tokens, length)
                outputs.append(attend_one(its_q, kv[:, :, first:], mask, follows))
            return torch.cat(outputs)

        hidden = self.hidden(ids, previous, positions, attend).split(lengths)   # (tokens, C) each
        pieces = torch.stack(new).split(lengths, dim=3)         # (n_layer, 2, H_kv, tokens, D) each
        extended = []
        for (prefix, tokens), piece, span, begin, its_hidden in zip(prompts, pieces, spans, last_begins, hidden):
            extended.append(Prefix((*prefix.pieces, piece), span.stop, tokens[-1], begin, its_hidden))
        return extended

    # ---- Rows

    @torch.inference_mode()
    def insert(self, prefix: Prefix) -> None:
        """Add a row that continues a prefix."""
        row = len(self.rows)
        self.reserve(row + 1, prefix.length)
        self.kv[:, :, row, :, : prefix.length] = torch.cat(prefix.pieces, dim=3)
        self.rows.append(prefix._replace(pieces=(), hidden=None))

    @torch.inference_mode()
    def piece(self, row: int, start: int, end: int) -> Tensor:
        """A copy of the keys and values of these positions of a row: a piece of a prefix."""
        return self.kv[:, :, row, :, start:end].clone(memory_format=torch.contiguous_format)

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """Free a row; the last one moves into its place, so that rows 0 to n − 1 are always the ones in use."""
        moved = self.rows.pop()
        end = len(self.rows)
        if row != end:
            self.rows[row] = moved
            self.kv[:, :, row, :, : moved.length] = self.kv[:, :, end, :, : moved.length]
        if not self.rows:
            self.clear()
            return
        capacity = self.rounded(1.25 * max(prefix.length for prefix in self.rows))
        if self.kv.size(4) > 2 * capacity:  # a long sequence has left: nobody should go on computing with its positions
            self.resize(self.kv.size(2), capacity)

    @torch.inference_mode()
    def decode(self, tokens: list[int]) -> Tensor:
        """Read one more token in every row; returns the raw logits after it, (rows, vocab_size) in float32."""
        rows, device = len(tokens), self.kv.device
        heads = self.config.n_kv_head
        extended, columns = [], []
        for prefix, token in zip(self.rows, tokens):
            begin = prefix.length if token == self.config.document_token else prefix.begin
            extended.append(Prefix(length=prefix.length + 1, last=token, begin=begin))
            columns.append((token, prefix.last, prefix.length, begin))
        longest = max(prefix.length for prefix in extended)
        self.reserve(rows, longest)
        # Nobody needs the positions beyond the longest row. They are left out in float32 on a CPU alone: its products
        # in bfloat16 are 2 to 10 times slower where the cache is not contiguous.
        if self.kv.dtype != torch.float32 or device.type != "cpu":
            longest = self.kv.size(4)
        now, previous, positions, begins = torch.tensor(columns, device=device).T  # one copy to the device
        all_rows = torch.arange(rows, device=device)
        keys = torch.arange(longest, device=device)     # (K,)

        # A mask hides what a row has not reached, and what is beyond the window of a layer: that starts elsewhere in
        # each row, so there is no smaller rectangle.
        masks = {}
        for window in self.windows:
            first = torch.maximum(begins, positions + 1 - window)[:, None]
            seen = (keys >= first) & (keys <= positions[:, None])                   # (rows, K)
            masks[window] = as_mask(seen).repeat_interleave(heads, dim=0)[:, None]  # (rows * H_kv, 1, K)
        follows = (keys > begins[:, None]).repeat_interleave(heads, dim=0)[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv = self.kv[layer, :, :rows]                       # (2, rows, H_kv, capacity, D)
            kv[0, all_rows, :, positions] = k
            kv[1, all_rows, :, positions] = v
            k, v = kv[:, :, :, :longest].flatten(1, 2)          # (rows * H_kv, K, D) each
            grouped = q.reshape(rows * heads, -1, q.size(-1))   # (rows * H_kv, G, D)
            offset = follows if self.config.offsets_keys(layer) else None
            return scaled_dot_product(grouped, k, v, masks[self.config.window(layer)], offset).view(q.shape)

        logits = self.logits(self.hidden(now, previous, positions, attend))
        self.rows = extended
        return logits

    # ---- Both

    def hidden(self, tokens: Tensor, previous: Tensor, positions: Tensor, attend: Callable) -> Tensor:
        """
        The blocks of the model, for N tokens of any sequences: (N,) each → (N, C), what the head reads. previous: the
        token before each, −1 where there is none. attend(layer, q, k, v) → (N, H, D) lets the tokens see others: q is
        (N, H, D), k and v are (N, H_kv, D).
        """
        cos, sin = (angle[positions] for angle in self.angles)

        x = first = middle = self.model.transformer.wte(tokens, previous)
        for layer, (block, products) in enumerate(zip(self.model.transformer.h, self.products)):
            qkv, attn_proj, mlp_fc, mlp_proj = products
            x = block.begin(x, first)
            h = norm(x)
            values = None if block.values is None else block.values(tokens)
            q, k, v = block.attn.split_heads(qkv(h), cos, sin)                  # (N, H or H_kv, D)
            v = block.attn.add_value_embedding(h, v, values)
            y = attend(layer, q, k, v).reshape(h.shape)                         # (N, C)
            x = attn_proj(y).add_(x)
            x = x.add_(mlp_proj(F.relu(mlp_fc(norm(x))).square_()))
            x = block.end(x, middle)
            if layer == self.config.n_layer // 2:
                middle = x
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
        units = math.ceil(length / CAPACITY_UNIT)
        return min(units * CAPACITY_UNIT, self.config.sequence_len)

    def resize(self, rows: int, capacity: int) -> None:
        """Copy into a cache of this size. New places are zeros: a NaN in memory, masked to zero, would stay NaN."""
        old = self.kv[:, :, :, :, :capacity]
        n_layer, _, old_rows, heads, kept, D = old.shape
        self.kv = old.new_zeros(n_layer, 2, rows, heads, capacity, D)
        self.kv[:, :, :old_rows, :, :kept] = old


def begins_after(prefix: Prefix, tokens: list[int], document_token: int) -> list[int]:
    """For each of the tokens that follow a prefix the position where its document begins."""
    begin = prefix.begin
    begins = []
    for position, token in enumerate(tokens, start=prefix.length):
        if token == document_token:
            begin = position
        begins.append(begin)
    return begins


def as_mask(seen: Tensor) -> Tensor:
    """A tensor of bools as what is added to scores: 0 where a key is seen, else −inf; float32."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -math.inf)


def attend_one(q: Tensor, kv: Tensor, mask: Tensor, follows: Tensor | None) -> Tensor:
    """
    One prompt: q (tokens, H, D), keys and values (2, H_kv, K, D), mask and follows (tokens, K) → (tokens, H, D).
    """
    keys, values = kv
    queries = q.transpose(0, 1)                                 # (H, tokens, D)
    # Query heads that share a key head are one long list of queries to it.
    grouped = queries.reshape(len(keys), -1, q.size(-1))        # (H_kv, G * tokens, D)
    group_size = len(queries) // len(keys)
    if follows is not None:
        follows = follows.repeat(group_size, 1)
    y = scaled_dot_product(grouped, keys, values, mask.repeat(group_size, 1), follows)
    return y.view(queries.shape).transpose(0, 1)


def scaled_dot_product(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, follows: Tensor | None) -> Tensor:
    """
    q (N, Q, D) against keys and values (N, K, D) → (N, Q, D). N counts pairs of a sequence and a key head, Q the
    queries that look at these keys. mask: from `as_mask`, broadcast to (N, Q, K). Two plain products, like training's
    `blockwise_attention`; scores and softmax in float32.

    follows: with `offset_keys`, which keys have a token before them, broadcast to (N, Q, K). The cache has every
    token's own keys; the slow channels' part of the scores moves by one instead.
    """
    D = q.size(-1)
    if follows is None:
        scores = torch.bmm(q, keys.mT)                                              # (N, Q, K)
    else:
        slow = torch.arange(D, device=q.device) % (D // 2) >= D // 4                # (D,): as `offset_keys`
        before = F.pad(torch.bmm(q * slow, keys.mT)[..., :-1], (1, 0))
        scores = torch.bmm(q * ~slow, keys.mT) + before * follows
    p = torch.add(mask, scores, alpha=D**-0.5).softmax(-1)
    return torch.bmm(p.to(values.dtype), values)


# ---- Products with constant weights: with few rows of x, reading the weight takes the time

def linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """
    The function x → x weightᵀ of x (N, C), in x's dtype, for a weight (O, C) that stays as it is.

    On a CPU the weight is laid out once, here: float32 as (C, O), along which a product of few rows reads memory at
    full rate; bfloat16 in the blocks that oneDNN wants, which F.linear would make in every call (2 to 4 times slower
    with AMX).
    """
    if weight.device.type != "cpu":
        return partial(F.linear, weight=weight)
    if weight.dtype == torch.bfloat16:
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            packed_product(packed, weight[:1])
            return partial(packed_product, packed)
        except (AttributeError, NotImplementedError, RuntimeError):
            pass    # these kernels are not torch's public interface, and not for every processor
    return partial(torch.mm, mat2=weight.T.contiguous())


def packed_product(packed: Tensor, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
