"""
The model with a cache of keys and values.

No token sees a later one, so its keys and values never change: they are computed once and kept. Then a prompt is read
in a few passes (`extend`), and each further token costs one row of matrix products (`decode`) instead of a pass over
everything before it.

Keys and values are in one of two places. A `Prefix` is the beginning of a prompt, in pieces; it belongs to no row, so
any number of answers may continue it, and the prompt cache keeps its pieces. `insert` copies it into a row of the cache
proper, where one answer grows by one token per step:

    kv  (n_layer, 2, rows, H_kv, capacity, D)       row r holds rows[r].length tokens, from position 0 on

Rows have different lengths, and masks hide positions that a row has not reached. There are no holes between rows: when
a row is removed, the last one moves into its place. The cache grows in large steps, so little is copied. It shrinks
when long sequences have left, and is freed when all have left.
"""
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.model.gpt import GPT
from nanochat.model.layers import norm, rotary_angles

# The capacity is a multiple of this many positions, so it rarely changes.
CAPACITY_UNIT = 64


class Prefix(NamedTuple):
    """The part of a prompt that has been read."""

    pieces: tuple[Tensor, ...] = ()  # (n_layer, 2, H_kv, T, D) each: keys, values
    length: int = 0                  # tokens: the sum of the pieces' T
    last: int = -1                   # the last token; −1: none
    begin: int = 0                   # where the prefix's last document begins
    hidden: Tensor | None = None     # (T, C), the head's input for the last piece; None: it came from the cache


class CachedModel:
    """
    A model's weights, laid out for decoding, and the cache, in the same dtype. Some weights are copies: make a new
    CachedModel after an update. At most max_rows sequences are decoded together.
    """

    def __init__(self, model: GPT, max_rows: int):
        self.model = model
        self.config = model.config
        self.max_rows = max_rows
        config, device = model.config, model.lm_head.weight.device
        self.products = []  # for each block: qkv, attention's projection, the MLP's two
        with torch.inference_mode():
            for block in model.transformer.h:
                attn, mlp = block.attn, block.mlp
                # One product for all heads: fewer, larger memory reads.
                qkv = torch.cat((attn.c_q.weight, attn.c_k.weight, attn.c_v.weight))
                weights = qkv, attn.c_proj.weight, mlp.c_fc.weight, mlp.c_proj.weight
                self.products.append([linear(weight) for weight in weights])
            self.head = linear(model.lm_head.weight)
            self.angles = rotary_angles(config.sequence_len, config.head_dim, config.rope_theta, device)
        self.clear()

    def clear(self) -> None:
        """Forget every sequence."""
        # What each row has read, without its tensors, which are in `kv`.
        self.rows: list[Prefix] = []
        config = self.config
        self.kv = self.model.lm_head.weight.new_empty(config.n_layer, 2, 0, config.n_kv_head, 0, config.head_dim)

    # ---- Prompts

    @torch.inference_mode()
    def extend(self, prompts: list[tuple[Prefix, list[int]]]) -> list[Prefix]:
        """
        Read the next tokens of several prompts, each of at most sequence_len, in one pass. The cache does not change.

        The tokens lie end to end, T in all. The products with weights, which take most of the time, are computed for
        all tokens at once; attention for one prompt after another.
        """
        columns, extended = self.columns(prompts)
        lengths = [len(tokens) for _, tokens in prompts]
        masks = []
        for (prefix, _), after, own in zip(prompts, extended, columns.split(lengths, dim=1)):
            masks.append(self.masks(own[:, None], prefix.length, after.length))

        new = []        # for each layer (2, H_kv, T, D)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            new.append(torch.stack((k, v)).transpose(1, 2))
            outputs = []
            new_kv = new[layer].split(lengths, dim=2)
            for (prefix, _), by_layer, queries, own in zip(prompts, masks, q.split(lengths), new_kv):
                earlier = [piece[layer] for piece in prefix.pieces]
                kv = torch.cat([*earlier, own], dim=2)      # (2, H_kv, length, D)
                outputs.append(attention(queries[None], kv[:, None], *by_layer[layer])[0])
            return torch.cat(outputs)

        ids, previous, positions, _ = columns
        hidden = self.hidden(ids, previous, positions, attend).split(lengths)   # (tokens, C) each
        pieces = torch.stack(new).split(lengths, dim=3)             # (n_layer, 2, H_kv, tokens, D) each
        return [
            after._replace(pieces=(*prefix.pieces, piece), hidden=h)
            for (prefix, _), after, piece, h in zip(prompts, extended, pieces, hidden)
        ]

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
        """Free a row; the last row moves into its place, so rows 0 to n − 1 are always in use."""
        moved = self.rows.pop()
        end = len(self.rows)
        if row != end:
            self.rows[row] = moved
            self.kv[:, :, row, :, : moved.length] = self.kv[:, :, end, :, : moved.length]
        if not self.rows:
            self.clear()
            return
        capacity = self.rounded(1.25 * max(prefix.length for prefix in self.rows))
        # When a long sequence has left, computing with its positions would be waste.
        if self.kv.size(4) > 2 * capacity:
            self.resize(self.kv.size(2), capacity)

    @torch.inference_mode()
    def decode(self, tokens: list[int]) -> Tensor:
        """Read one more token in every row; returns the raw logits after it, (rows, vocab_size) in float32."""
        rows = len(tokens)
        columns, extended = self.columns([(prefix, [token]) for prefix, token in zip(self.rows, tokens)])
        longest = max(prefix.length for prefix in extended)
        self.reserve(rows, longest)
        # Positions beyond the longest row are not needed. Only float32 on a CPU leaves them out: bfloat16 products
        # there are 2 to 10 times slower if the cache is not contiguous.
        if self.kv.dtype != torch.float32 or self.kv.device.type != "cpu":
            longest = self.kv.size(4)
        ids, previous, positions, _ = columns
        all_rows = torch.arange(rows, device=positions.device)
        # Each row's window starts at a different position, so the common rectangle of keys starts at position 0.
        masks = self.masks(columns[:, :, None], 0, longest)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv = self.kv[layer, :, :rows]                       # (2, rows, H_kv, capacity, D)
            kv[0, all_rows, :, positions] = k
            kv[1, all_rows, :, positions] = v
            return attention(q[:, None], kv[:, :, :, :longest], *masks[layer])

        logits = self.logits(self.hidden(ids, previous, positions, attend))
        self.rows = extended
        return logits

    # ---- Both

    def columns(self, parts: list[tuple[Prefix, list[int]]]) -> tuple[Tensor, list[Prefix]]:
        """
        The next tokens of several sequences, end to end, as the blocks read them, (4, N): for each the token, the one
        before it in its document or −1, its position, and where its document begins. Also each prefix after these
        tokens, without its tensors.
        """
        columns, extended = [], []
        for prefix, tokens in parts:
            begins = begins_after(prefix, tokens, self.config.document_token)
            read = zip(tokens, [prefix.last, *tokens], begins)
            for position, (token, previous, begin) in enumerate(read, prefix.length):
                columns.append((token, previous if position > begin else -1, position, begin))
            extended.append(Prefix((), prefix.length + len(tokens), tokens[-1], begins[-1]))
        # One copy to the device.
        return torch.tensor(columns, device=self.kv.device).T, extended

    def masks(self, columns: Tensor, start: int, stop: int) -> list[tuple[Tensor, Tensor | None]]:
        """
        For each layer the last two arguments of `attention`, for T new tokens of each of S sequences, (4, S, T). Keys
        end before position `stop`. No new token comes before `start`, so keys before its window are left out.
        """
        positions, begins = columns[2:, :, :, None]         # (S, T, 1) each
        keys = torch.arange(stop, device=positions.device)  # (K,)
        by_window = {}
        for window in {self.config.window(layer) for layer in range(self.config.n_layer)}:
            first = torch.maximum(begins, positions + 1 - window)
            near = keys[max(start + 1 - window, 0) :]
            seen = (near >= first) & (near <= positions)    # (S, T, K)
            by_window[window] = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -math.inf)
        follows = keys > begins     # (S, T, K)
        masks = []
        for layer in range(self.config.n_layer):
            # Layers that offset their keys have no window, so `follows` has as many keys as their mask.
            masks.append((by_window[self.config.window(layer)], follows if self.config.offsets_keys(layer) else None))
        return masks

    def hidden(self, tokens: Tensor, previous: Tensor, positions: Tensor, attend: Callable) -> Tensor:
        """
        The blocks of the model, for N tokens of any sequences: (N,) each → (N, C), the head's input. previous: the
        token before each, −1 where a document begins. attend(layer, q, k, v) → (N, H, D) lets the tokens see others: q
        is (N, H, D), k and v are (N, H_kv, D).

        The twin of `Block.body` in nanochat/model/layers.py, without gradients: change both. tests/test_engine.py
        compares them (test_greedy_is_the_uncached_model_token_for_token).
        """
        cos, sin = (angle[positions] for angle in self.angles)

        x = first = middle = self.model.transformer.wte(tokens, previous=previous)
        for layer, (block, products) in enumerate(zip(self.model.transformer.h, self.products)):
            qkv, attn_proj, mlp_fc, mlp_proj = products
            x = block.start(x, first)
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
        """Copy into a cache of this size. New places are zeros: zero times a NaN left in memory would be NaN."""
        old = self.kv[:, :, :, :, :capacity]
        n_layer, _, old_rows, heads, kept, D = old.shape
        self.kv = old.new_zeros(n_layer, 2, rows, heads, capacity, D)
        self.kv[:, :, :old_rows, :, :kept] = old


def begins_after(prefix: Prefix, tokens: list[int], document_token: int) -> list[int]:
    """For each token after a prefix, the position where its document begins."""
    begin = prefix.begin
    begins = []
    for position, token in enumerate(tokens, start=prefix.length):
        if token == document_token:
            begin = position
        begins.append(begin)
    return begins


def attention(q: Tensor, kv: Tensor, mask: Tensor, follows: Tensor | None) -> Tensor:
    """
    T queries of each of S sequences, q (S, T, H, D), to the last K of its keys and values, kv (2, S, H_kv, ≥ K, D)
    → (S, T, H, D). mask (S, T, K), float32: 0 where a query sees a key, else −inf. Two plain products, like training's
    `blockwise_attention`; scores and softmax in float32.

    follows: with `offset_keys`, which keys have a token before them, (S, T, K). The cache has every token's own keys;
    instead, the slow channels' part of the scores is shifted by one.
    """
    S, T, H, D = q.shape
    keys, values = kv[:, :, :, -mask.size(-1) :].flatten(1, 2)  # (S * H_kv, K, D) each
    # Query heads that share a key head form one long list of queries.
    grouped = q.transpose(1, 2).reshape(len(keys), -1, D)       # (S * H_kv, G * T, D)
    by_head = S, -1, H // kv.size(2), T, mask.size(-1)          # (S, H_kv, G, T, K)
    if follows is None:
        scores = torch.bmm(grouped, keys.mT).view(by_head)
    else:
        # The same channels as in `offset_keys`.
        slow = torch.arange(D, device=q.device) % (D // 2) >= D // 4
        before = F.pad(torch.bmm(grouped * slow, keys.mT)[..., :-1], (1, 0))
        scores = torch.bmm(grouped * ~slow, keys.mT).view(by_head) + before.view(by_head) * follows[:, None, None]
    p = torch.add(mask[:, None, None], scores, alpha=D**-0.5).softmax(-1)
    y = torch.bmm(p.to(values.dtype).view(len(keys), -1, keys.size(1)), values)   # (S * H_kv, G * T, D)
    return y.view(S, H, T, D).transpose(1, 2)


# ---- Products with constant weights: with few rows of x, most time goes into reading the weight

def linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """
    The function x → x weightᵀ for x (N, C), in x's dtype, and a constant weight (O, C).

    On a CPU the weight is laid out once, here: float32 as (C, O), which products with few rows read at full memory
    bandwidth; bfloat16 in oneDNN's blocked layout, which F.linear would make in every call (2 to 4 times slower with
    AMX).
    """
    if weight.device.type != "cpu":
        return partial(F.linear, weight=weight)
    if weight.dtype == torch.bfloat16:
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            packed_product(packed, weight[:1])
            return partial(packed_product, packed)
        except (AttributeError, NotImplementedError, RuntimeError):
            # These kernels are not part of torch's public interface, and not available on every processor.
            pass
    return partial(torch.mm, mat2=weight.T.contiguous())


def packed_product(packed: Tensor, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
