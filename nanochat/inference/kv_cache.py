"""
The model with a cache of keys and values.

No token sees a later one, so its keys and values never change: they are computed once and kept. The pass is training's
(`GPT.blocks`), but its queries see the cache, and its products' weights are laid out for few tokens:

    kv  (n_layer, 2, rows, H_kv, slots, D)      row r has read rows[r].length tokens, from position 0 on

In each pass every row reads its next tokens: one, or of a prompt many. The tokens lie end to end, N in all, so that the
products, which take most of the time, are computed for all at once. Masks hide slots that a row has not reached. There
are no holes between rows: when a row is removed, the last one moves into its place.
"""
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.model.gpt import GPT, Block, Positions, model_without_memory, norm, rotary_angles
from nanochat.model.products import Products

# Kernels are faster where the number of keys is a multiple of this.
KEYS_MULTIPLE = 16


class Row(NamedTuple):
    """What a row has read; its keys and values are in `kv`."""
    length: int = 0     # tokens
    last: int = -1      # the last token; −1: none
    begin: int = 0      # where the last document begins


class Part(NamedTuple):
    """What some consecutive rows, which read equally many tokens in a pass, see."""
    tokens: int                                 # of all these rows
    seen: dict[int, tuple[Tensor, Tensor]]      # by window: the part of `kv` that some query sees, and the mask


class CachedModel:
    """
    A model's weights, laid out for decoding, and the cache, in the same dtype. Some weights are copies: make a new
    CachedModel after an update. max_rows: most sequences at a time; capacity: most tokens of each.
    """

    def __init__(self, model: GPT, max_rows: int, capacity: int):
        config, weight = model.config, model.lm_head.weight
        self.config = config
        self.windows = [config.window(layer) for layer in range(config.n_layer)]
        with torch.inference_mode():
            self.model, self.head = for_decoding(model), laid_out(weight)
            self.angles = rotary_angles(capacity, config.head_dim, config.rope_theta, weight.device)
            # A slot more than tokens: see `write_offset_keys`. Zeros, because zero times a NaN left in memory is NaN.
            self.kv = weight.new_zeros(config.n_layer, 2, max_rows, config.n_kv_head, rounded(capacity + 1),
                                       config.head_dim)
        self.rows: list[Row] = []  # the caller appends a Row() for each new text

    # ---- Rows

    def copy(self, source: int, row: int, tokens: Sequence[int]) -> None:
        """Let a row hold these tokens, with which another row begins."""
        begin = max((place for place, token in enumerate(tokens) if token == self.config.document_token), default=0)
        self.rows[row] = Row(len(tokens), tokens[-1], begin)
        self._copy(source, row)

    def remove(self, row: int) -> None:
        """Free a row; the last row moves into its place, so rows 0 to n − 1 are always in use."""
        moved = self.rows.pop()
        if row != len(self.rows):
            self.rows[row] = moved
            self._copy(len(self.rows), row)

    @torch.inference_mode()
    def _copy(self, source: int, row: int) -> None:
        slots = slice(self.rows[row].length + 1)    # one more: see `write_offset_keys`
        self.kv[:, :, row, :, slots] = self.kv[:, :, source, :, slots]

    # ---- A pass

    @torch.inference_mode()
    def read(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Read the next tokens of each row, at least one. Returns the head's input after each, (N, C), row by row."""
        columns, begun = [], []
        for row, new in enumerate(tokens):
            length, last, begin = self.rows[row]
            for position, token in enumerate(new, length):
                if token == self.config.document_token or position == 0:
                    begin, last = position, -1
                    begun.append((row, position))
                columns.append((token, last, row, position, begin))
                last = token
            self.rows[row] = Row(length + len(new), last, begin)
        # One copy to the device.
        ids, previous, rows, positions, begins = torch.tensor(columns, device=self.kv.device).T
        parts = self.parts([len(new) for new in tokens], positions, begins)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.kv[layer]               # (rows, H_kv, slots, D) each
            values[rows, :, positions] = v              # (N, H_kv, D)
            if self.config.offsets_keys(layer):
                write_offset_keys(keys, k, rows, positions, begun)
            else:
                keys[rows, :, positions] = k
            outputs = []
            for part, queries in zip(parts, q.split([part.tokens for part in parts])):
                near, mask = part.seen[self.windows[layer]]
                heads = queries.unflatten(0, (len(mask), -1)).transpose(1, 2)           # (S, H, T, D)
                # Query heads that share a key head form one long list of queries.
                grouped = heads.reshape(len(mask), keys.size(1), -1, keys.size(3))      # (S, H_kv, G · T, D)
                near_keys, near_values = near[layer]
                y = F.scaled_dot_product_attention(grouped, near_keys, near_values, attn_mask=mask)
                outputs.append(y.reshape(heads.shape).transpose(1, 2).flatten(0, 1))    # (S · T, H, D)
            return torch.cat(outputs)

        cos, sin = (angle[positions] for angle in self.angles)
        at = Positions(cos, sin, previous=previous, attend=attend)
        streams = self.model.embed(ids, at)
        return norm(self.model.blocks(range(self.config.n_layer), ids, streams, at).x)

    def parts(self, lengths: Sequence[int], positions: Tensor, begins: Tensor) -> list[Part]:
        """The parts of a pass whose rows have just got so many tokens each; positions, begins: (N,)."""
        group = self.config.n_head // self.config.n_kv_head
        parts: list[Part] = []
        row = token = 0
        for T, equal in groupby(lengths):
            rows = slice(row, row + len(list(equal)))
            S = rows.stop - rows.start
            own = slice(token, token + S * T)
            position, begin = (column[own].view(S, 1, T, 1) for column in (positions, begins))
            ends = [one.length for one in self.rows[rows]]
            seen = {}
            for window in set(self.windows):
                # Slots before the first window, and those that no row has reached, are left out.
                near = slice(max(min(ends) - T + 1 - window, 0) // KEYS_MULTIPLE * KEYS_MULTIPLE, rounded(max(ends)))
                slot = torch.arange(near.start, near.stop, device=positions.device)
                hidden = (slot > position) | (slot <= position - window) | (slot < begin)       # (S, 1, T, K)
                mask = torch.zeros_like(hidden, dtype=self.kv.dtype).masked_fill_(hidden, -math.inf)
                seen[window] = self.kv[:, :, rows, :, near], mask.expand(S, group, T, -1).reshape(S, 1, group * T, -1)
            parts.append(Part(S * T, seen))
            row, token = rows.stop, own.stop
        return parts

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, C) → (N, vocab_size) in float32, before the softcap."""
        return self.head(hidden)[:, : self.config.vocab_size].float()


def rounded(slots: int) -> int:
    return math.ceil(slots / KEYS_MULTIPLE) * KEYS_MULTIPLE


def write_offset_keys(
    keys: Tensor, new: Tensor, rows: Tensor, positions: Tensor, begun: list[tuple[int, int]],
) -> None:
    """
    Write new keys, (N, H_kv, D), as `offset_keys` would lay them out: the slow channels one slot further. begun: rows
    and positions where a document begins, whose slow channels are zeros.
    """
    fast, slow = keys.unflatten(-1, (2, 2, -1)).unbind(-2)      # (rows, H_kv, slots, 2, D/4) each
    fast[rows, :, positions], slow[rows, :, positions + 1] = new.unflatten(-1, (2, 2, -1)).unbind(-2)
    for row, position in begun:
        slow[row, :, position] = 0


# ---- Products with constant weights: with few rows of x, most time goes into reading the weight

def for_decoding(model: GPT) -> GPT:
    """The same model with the same weights, but blocks multiply by copies that are laid out by `linear`."""
    twin = model_without_memory(model.config)
    twin.load_state_dict(dict(model.named_parameters()), assign=True)
    for block in twin.transformer.h:
        block.attn.products = block.mlp.products = LaidOut(block)
    return twin


class LaidOut(Products):
    """A block's products by copies of its weights, so the weights that are passed are not read."""

    def __init__(self, block: Block):
        attn = block.attn
        self.qkv = laid_out(torch.cat((attn.c_q.weight, attn.c_k.weight, attn.c_v.weight)))
        self.out = laid_out(attn.c_proj.weight)
        self.fc, self.proj = laid_out(block.mlp.c_fc.weight), laid_out(block.mlp.c_proj.weight)

    def linears(self, x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.qkv(x).split([len(weight) for weight in weights], dim=-1)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.out(x)

    def mlp(self, x: Tensor, *weights: Tensor) -> Tensor:
        return self.proj(F.relu(self.fc(x)).square_())


def laid_out(weight: Tensor) -> Callable[[Tensor], Tensor]:
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
