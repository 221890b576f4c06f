"""
Conversations → rows of tokens, the same rows on any number of ranks; the loader of mid-training and fine-tuning.

Before the first step each rank renders its share of the conversations, and the ranks exchange the tokens. So every
rank knows how many steps there are and what each step contains.
"""
import hashlib
import heapq
import itertools
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanochat.data.batch_shape import BatchShape, document_offsets
from nanochat.data.best_fit import WaitingItems
from nanochat.data.conversation import Conversation, render_parts
from nanochat.data.padding import WeightedTokens, on_device, padded_batch, padded_length
from nanochat.data.tokenizer import Tokenizer
from nanochat.runtime.collectives import gather_objects, rank_and_size
from nanochat.runtime.console import print0
from nanochat.runtime.errors import UserError
from nanochat.runtime.processes import in_processes
from nanochat.runtime.progress import progress

PackedRows = list[list[int]]  # for each row the numbers of its conversations (or parts of a long one)
BUFFER_CONVERSATIONS = 512  # best fit chooses among these; more fill rows better but keep less of the shuffled order


def render_share(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, max_tokens: int, share: range
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """
    (ids, masks, lengths, too_long) of the conversations with these numbers; too_long: how many answers are left out.
    """
    # With the masks 5 bytes per token; lists of integers would take several times as much.
    ids = array("i")
    masks = bytearray()
    lengths = []
    too_long = 0
    for index in progress(share, "rendering", "conversations"):
        parts, left_out = render_parts(tokenizer, conversations[index], max_tokens)
        too_long += left_out
        for rendered in parts:
            ids.extend(rendered.ids)
            masks += bytes(rendered.mask)
            lengths.append(len(rendered.ids))
    return np.frombuffer(ids, np.int32), np.frombuffer(masks, bool), np.array(lengths, np.int64), np.array([too_long])


class RenderedConversations:
    """
    Tokens and masks of all conversations, end to end; a long one is split, see `render_parts`. Answers that do not fit
    into max_tokens even alone are left out. name: what the printed line calls this data. COLLECTIVE.
    """

    def __init__(self, conversations: Sequence[Conversation], tokenizer: Tokenizer, max_tokens: int,
                 name: str = "training"):
        rank, ranks = rank_and_size()
        count = len(conversations)
        # A rank on a CPU forks one process per thread that it owns. A rank with a GPU forks none.
        workers = torch.get_num_threads() if not torch.cuda.is_available() else 1
        # Mixtures are shuffled, so equal shares mean about equal work.
        bounds = [count * part // (ranks * workers) for part in range(rank * workers, (rank + 1) * workers + 1)]
        shares = [range(start, stop) for start, stop in itertools.pairwise(bounds)]
        rendered = in_processes(partial(render_share, conversations, tokenizer, max_tokens), shares)
        of_rank = [np.concatenate(arrays) for arrays in zip(*rendered)]
        # Of all ranks, end to end; some may be empty.
        self.ids, self.masks, self.lengths, too_long = (np.concatenate(gather_objects(part)) for part in of_rank)
        if not len(self):
            raise UserError(f"none of the {count} conversations can be trained on: "
                            f"an answer must fit into max_seq_len={max_tokens - 1}")
        self.starts = np.cumsum(self.lengths) - self.lengths
        content = self.ids.tobytes() + self.masks.tobytes() + self.lengths.tobytes()
        self.fingerprint = hashlib.sha256(content).hexdigest()
        answers = self.masks[self.ids == tokenizer.encode_special("<|assistant_end|>")].sum()
        print0(f"{name}: {count:,} conversations in {len(self):,} parts, {len(self.ids):,} tokens; "
               f"{answers:,} of {answers + too_long.sum():,} answers are learned, {self.masks.sum():,} tokens")

    def __len__(self) -> int:
        return len(self.lengths)

    def row_length(self, indices: list[int]) -> int:
        """Total tokens of these conversations."""
        return int(self.lengths[indices].sum())

    def read(self, indices: list[int]) -> WeightedTokens:
        """These conversations end to end; each token of an answer weighs 1."""
        where = np.concatenate([np.arange(self.starts[i], self.starts[i] + self.lengths[i]) for i in indices])
        return self.ids[where], self.masks[where]


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The numbers of `count` conversations in the order of an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count).tolist()


def pack(lengths: Sequence[int], conversations: list[int], row_len: int) -> PackedRows:
    """
    Rows of at most row_len tokens, each conversation whole in exactly one row: best fit among the next
    BUFFER_CONVERSATIONS, see best_fit.py. A row ends when none of them fits.
    """
    upcoming = iter(conversations)
    rows: PackedRows = []
    waiting = WaitingItems()
    while True:
        while len(waiting.items) < BUFFER_CONVERSATIONS and (index := next(upcoming, None)) is not None:
            waiting.add(index, (lengths[index], index))
        if not waiting.items:
            return rows
        row = []
        space = row_len
        # It fits: no conversation is longer than a row.
        taken = waiting.take_oldest()
        while taken:
            length, index = taken
            row.append(index)
            space -= length
            taken = waiting.take_longest(space)
        rows.append(row)


def balance(lengths: Any, conversations: list[int], unit: int, row_len: int) -> PackedRows:
    """
    These conversations in rows of about equal length, at most row_len tokens each. The number of rows is the smallest
    multiple of `unit` that works. The longest conversation goes first; each goes to the shortest row.
    """
    # Longest first: the short ones then even out the rows (greedy scheduling, Graham 1969).
    by_length = sorted(conversations, key=lengths.__getitem__, reverse=True)
    for count in range(unit, len(by_length) + unit, unit):
        rows: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(count)]  # a heap, by tokens
        for index in by_length:
            tokens, number, row = rows[0]
            heapq.heapreplace(rows, (tokens + lengths[index], number, [*row, index]))
        if max(rows)[0] <= row_len:
            break
    return [row for _, _, row in rows if row]


def conversation_loader(
    conversations: RenderedConversations, steps: list[PackedRows], shape: BatchShape, pad: bool, start_step: int = 0,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """
    Yields for each micro-step of this rank, from the first of start_step on: inputs and targets, (B, T) int64, and
    `document_offsets`, one document per conversation.

    steps: the rows of each optimizer step; rows of similar lengths share a micro-step, the longest first. After
        the last step every micro-step is empty.
    pad: T is the `padded_length` of a micro-step's longest row, the same on all ranks; else max_seq_len.
    """
    for step in itertools.count(start_step):
        # Rows of similar lengths together: little padding, and no rank waits for another.
        step_rows = sorted(steps[step] if step < len(steps) else [], key=conversations.row_length, reverse=True)
        for rows in shape.micro_steps(step_rows):
            length = shape.max_seq_len
            if pad:
                longest = conversations.row_length(rows[0]) if rows else 0
                length = padded_length(longest, length, shape.device)
            own = shape.of_this_rank(rows)
            tokens = [conversations.read(row) for row in own]
            inputs, targets, _ = padded_batch(tokens, shape.device_batch_size, length, shape.device)
            lengths = [conversations.lengths[row].tolist() for row in own]
            cu_seqlens = document_offsets(lengths, shape.device_batch_size, length)
            yield inputs, targets, on_device(cu_seqlens, shape.device)
