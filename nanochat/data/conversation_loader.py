"""
Conversations → rows of tokens, the same rows on any number of ranks; the loader of mid-training and fine-tuning.

Before the first step each rank renders its share of the conversations, and the ranks exchange the tokens. So every
rank knows how many steps there are and what each of them holds.
"""
import hashlib
import heapq
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanochat.data.best_fit import WaitingItems
from nanochat.data.conversation import Conversation, render_parts
from nanochat.data.padding import Row, padded_batch, padded_length
from nanochat.data.tokenizer import Tokenizer
from nanochat.runtime.collectives import concatenate_parts, rank_and_size
from nanochat.runtime.console import print0
from nanochat.runtime.errors import UserError
from nanochat.runtime.progress import progress

Rows = list[list[int]]      # of each row the numbers of its conversations (below: also a part of a long one)
BUFFER_CONVERSATIONS = 512  # best fit chooses among these; more fill rows better, and keep the shuffled order less


class RenderedConversations:
    """
    Tokens and masks of all conversations, end to end; a long one is several, see `render_parts`. Left out are answers
    that do not fit into max_tokens even alone. name: of this data, in the line that is printed. COLLECTIVE.
    """

    def __init__(self, conversations: Sequence[Conversation], tokenizer: Tokenizer, max_tokens: int,
                 name: str = "training"):
        rank, ranks = rank_and_size()
        count = len(conversations)
        share = range(count * rank // ranks, count * (rank + 1) // ranks)  # mixtures are shuffled: equal work
        ids = array("i")  # with the masks 5 bytes a token
        masks = bytearray()
        lengths = []
        split = too_long = 0
        for index in progress(share, "rendering", "conversations"):
            parts, left_out = render_parts(tokenizer, conversations[index], max_tokens)
            split += len(parts) > 1
            too_long += left_out
            for rendered in parts:
                ids.extend(rendered.ids)
                masks += bytes(rendered.mask)
                lengths.append(len(rendered.ids))
        self.ids = concatenate_parts(np.frombuffer(ids, np.int32))
        self.masks = concatenate_parts(np.frombuffer(masks, bool))
        self.lengths = concatenate_parts(np.array(lengths, np.int64))
        split, too_long = concatenate_parts(np.array([[split, too_long]])).sum(0)
        if not len(self):
            raise UserError(f"none of the {count} conversations can be trained on: "
                            f"an answer must fit into max_seq_len={max_tokens - 1}")
        self.starts = np.cumsum(self.lengths) - self.lengths
        content = hashlib.sha256()
        for array_of_all in (self.ids, self.masks, self.lengths):
            content.update(array_of_all.data)
        self.fingerprint = content.hexdigest()
        answers = self.masks[self.ids == tokenizer.encode_special("<|assistant_end|>")].sum()
        long = f"; {split:,} are longer than {max_tokens - 1} tokens: {len(self):,} parts in all" if split else ""
        lost = f"; {too_long:,} are too long even alone and left out" if too_long else ""
        print0(f"{name}: {count:,} conversations, {len(self.ids):,} tokens{long}; "
               f"{answers:,} of {answers + too_long:,} answers are learned, {self.masks.sum():,} tokens{lost}")

    def __len__(self) -> int:
        return len(self.lengths)

    def row_length(self, indices: list[int]) -> int:
        """Tokens of these conversations together."""
        return int(self.lengths[indices].sum())

    def read(self, indices: list[int]) -> Row:
        """These conversations end to end; each token of an answer weighs 1."""
        ids: list[int] = []
        weights: list[float] = []
        for i in indices:
            where = slice(self.starts[i], self.starts[i] + self.lengths[i])
            ids += self.ids[where].tolist()
            weights += self.masks[where].astype(float).tolist()
        return ids, weights


def order(count: int, seed: int, epoch: int) -> list[int]:
    """The shuffled order of `count` conversations in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count).tolist()


def pack(lengths: Sequence[int], order: list[int], row_len: int) -> Rows:
    """
    Rows of at most row_len tokens, each conversation whole in exactly one of them: best fit among the next
    BUFFER_CONVERSATIONS, see best_fit.py. A row ends when none of those fits.
    """
    upcoming = iter(order)
    rows: Rows = []
    waiting = WaitingItems()
    while True:
        while len(waiting.items) < BUFFER_CONVERSATIONS and (index := next(upcoming, None)) is not None:
            waiting.add(index, (lengths[index], index))
        if not waiting.items:
            return rows
        row = []
        space = row_len
        taken = waiting.take_oldest()  # it fits: no conversation is longer than a row
        while taken:
            length, index = taken
            row.append(index)
            space -= length
            taken = waiting.take_longest(space)
        rows.append(row)


def balance(lengths: Any, conversations: list[int], unit: int, row_len: int) -> Rows:
    """
    Rows of at most row_len tokens, about equally long, with these conversations: as few multiples of `unit` as can be.
    The longest conversation goes first, and each to the shortest row so far.
    """
    by_length = sorted(conversations, key=lengths.__getitem__, reverse=True)
    for count in range(unit, len(by_length) + unit, unit):
        rows: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(count)]  # a heap, by tokens
        for index in by_length:
            tokens, number, row = rows[0]
            heapq.heapreplace(rows, (tokens + lengths[index], number, [*row, index]))
        if max(rows)[0] <= row_len:
            break
    return [row for _, _, row in rows if row]


def by_step(items: list, per_step: int) -> list[list]:
    """The items of each optimizer step."""
    return [items[start : start + per_step] for start in range(0, len(items), per_step)]


def micro_steps(rows: int, rows_at_once: int) -> int:
    """Of an optimizer step with this many rows, over all ranks: one of empty rows, where there are none."""
    return max(math.ceil(rows / rows_at_once), 1)


class BatchShape(NamedTuple):
    """How rows become batches of ranks."""

    rows: int               # of a rank and micro-step; not every one of them is filled
    max_seq_len: int        # tokens of a row, at most
    pad: bool               # only to the length that `padded_length` says, not to max_seq_len
    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def rows_at_once(self) -> int:
        """Of all ranks, in a micro-step."""
        return self.rows * self.world_size


def conversation_loader(
    conversations: RenderedConversations, steps: list[Rows], shape: BatchShape, start_step: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """
    Yields (inputs, targets), (B, T) int64, of each micro-step of this rank, from the first of start_step on.

    steps: the rows of each step; `micro_steps` says how many it has. The longest come first; this rank takes the
    micro-batches m · world_size + rank. Past the last row come empty ones without targets, so a step need not have a
    multiple of anything.
    """
    step = start_step
    while True:
        step_rows = steps[step] if step < len(steps) else []
        # Rows of similar lengths together: little padding, and no rank waits for another.
        step_rows = sorted(step_rows, key=conversations.row_length, reverse=True)
        for of_all_ranks in by_step(step_rows, shape.rows_at_once) or [[]]:
            own = of_all_ranks[shape.rank * shape.rows :][: shape.rows]
            batch = [conversations.read(row) for row in own]
            length = shape.max_seq_len
            if shape.pad:
                longest = max(map(conversations.row_length, of_all_ranks), default=0)
                length = padded_length(longest, length, shape.device)  # the same on all ranks
            inputs, targets, _ = padded_batch(batch, shape.rows, length, shape.device)
            yield inputs, targets
        step += 1
