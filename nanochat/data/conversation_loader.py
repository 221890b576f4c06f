"""
Conversations → rows of tokens, the same rows on any number of ranks; the loader of mid-training and fine-tuning.

All conversations are rendered once, at the start, a share on each rank, and the ranks exchange what they made: then
every rank knows before the first step how many steps there are, and what each of them holds.
"""
import hashlib
import math
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from nanochat.data.conversation import Conversation, render
from nanochat.data.packing import WaitingItems
from nanochat.data.tokenizer import Tokenizer
from nanochat.runtime.collectives import concatenate_parts, rank_and_size
from nanochat.runtime.console import print0
from nanochat.runtime.errors import UserError
from nanochat.runtime.progress import progress

BUFFER_CONVERSATIONS = 512  # what best fit chooses from; more fill rows better, and keep the shuffled order less
SHORTEST_PADDED = 64        # a GPU compiles each length once: rows are padded to this times a power of two
CPU_MULTIPLE = 8            # a CPU compiles for all lengths: rows are padded to a multiple of this

Row = tuple[list[int], list[float]]  # tokens, and the weight of each of them as a target


class RenderedConversations:
    """
    Tokens and masks of conversations, end to end; those without anything to learn are left out, and counted. what: the
    name of the line that says how many there are. COLLECTIVE.
    """

    def __init__(self, conversations: Sequence[Conversation], tokenizer: Tokenizer, max_tokens: int,
                 what: str = "training"):
        rank, ranks = rank_and_size()
        count = len(conversations)
        share = range(count * rank // ranks, count * (rank + 1) // ranks)  # mixtures are shuffled: equal work
        name = "rendering" if ranks == 1 else f"rendering, rank 0 of {ranks}"
        tokens, trained, lengths, cuts = array("i"), bytearray(), [], []  # of the share; 5 bytes a token
        for index in progress(share, name, "conversations"):
            ids, mask, cut = render(tokenizer, conversations[index], max_tokens)
            if any(mask):
                tokens.extend(ids)
                trained += bytes(mask)
                lengths.append(len(ids))
                cuts.append(cut > 0)
        self.ids = concatenate_parts(np.frombuffer(tokens, np.int32))
        self.masks = concatenate_parts(np.frombuffer(trained, bool))
        self.lengths = concatenate_parts(np.array(lengths, np.int64))
        self.cut = int(concatenate_parts(np.array(cuts, bool)).sum())
        self.dropped = count - len(self)
        if not len(self):
            none = f"none of the {count} conversations can be trained on"
            raise UserError(f"{none}: an answer must fit into max_seq_len={max_tokens - 1}")
        self.starts = np.cumsum(self.lengths) - self.lengths
        content = hashlib.sha256()
        for part in (self.ids, self.masks, self.lengths):
            content.update(part)
        self.fingerprint = content.hexdigest()
        print0(
            f"{what}: {len(self):,} conversations, {len(self.ids):,} tokens, {self.masks.sum():,} of them answers; "
            f"{self.cut:,} too long and cut at a message, {self.dropped:,} left out because no answer fits"
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def row_length(self, indices: list[int]) -> int:
        """Tokens of these conversations together."""
        return sum(int(self.lengths[i]) for i in indices)

    def read(self, indices: list[int]) -> Row:
        """These conversations, one after the other."""
        parts = [slice(self.starts[i], self.starts[i] + self.lengths[i]) for i in indices]
        return ([token for part in parts for token in self.ids[part].tolist()],
                [float(trained) for part in parts for trained in self.masks[part]])


def order(count: int, seed: int, epoch: int) -> list[int]:
    """The shuffled order of so many conversations in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count).tolist()


def pack(lengths: Sequence[int], order: list[int], row_len: int) -> list[list[int]]:
    """
    Rows of conversations, none longer than row_len together, each conversation in exactly one: best fit of the next
    BUFFER_CONVERSATIONS, see packing.py. A row ends when none of those fits.
    """
    upcoming, rows, waiting = iter(order), [], WaitingItems()
    while True:
        while len(waiting.items) < BUFFER_CONVERSATIONS and (conversation := next(upcoming, None)) is not None:
            waiting.add(conversation, (lengths[conversation], conversation))
        if not waiting.items:
            return rows
        rows.append([])
        space, taken = row_len, waiting.take_oldest()
        while taken:
            length, conversation = taken
            rows[-1].append(conversation)
            space -= length
            taken = waiting.take_longest(space)


def tensors(rows: Sequence[Row], length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """
    A padded batch: (inputs, targets, weights), each (B, length), of rows of at most length + 1 tokens; int64, int64,
    float32. Targets are one position ahead, −1 where the weight is zero. An empty row has no targets at all.
    """
    tokens = torch.zeros(len(rows), length + 1, dtype=torch.int64)
    weights = torch.zeros(len(rows), length + 1)
    for i, (ids, counts) in enumerate(rows):
        tokens[i, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        weights[i, : len(ids)] = torch.tensor(counts)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].masked_fill(weights[:, 1:] == 0, -1)
    pinned = device.type == "cuda"  # from there the copy does not wait for what the device computes
    parts = (inputs, targets, weights[:, 1:].contiguous())
    return tuple((part.pin_memory() if pinned else part).to(device, non_blocking=pinned) for part in parts)


def padded_length(longest: int, max_seq_len: int, device: torch.device) -> int:
    """
    What rows of at most so many tokens are padded to: on a CPU a multiple of CPU_MULTIPLE, else SHORTEST_PADDED times a
    power of two; at most max_seq_len.
    """
    needed = max(longest - 1, 1)  # the last token is only a target
    if device.type == "cpu":
        return min(math.ceil(needed / CPU_MULTIPLE) * CPU_MULTIPLE, max_seq_len)
    length = SHORTEST_PADDED
    while length < needed:
        length *= 2
    return min(length, max_seq_len)


def conversation_loader(
    conversations: RenderedConversations, rows: list[list[int]], rows_per_step: int, *,
    device_batch_size: int, max_seq_len: int, pad: bool, rank: int = 0, world_size: int = 1,
    device: torch.device | str = "cpu", start_step: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """
    Yields (inputs, targets), (B, T) int64, of each micro-step of this rank, from the first of start_step on; step s has
    the rows [s · rows_per_step, (s + 1) · rows_per_step), the longest first, and micro-batch m · world_size + rank of
    them is this rank's. T is max_seq_len, or with `pad` what `padded_length` says. Past the last row come empty ones,
    whose loss is zero: rows_per_step need not divide anything, and after the last step all are empty.
    """
    step, unit, device = start_step, device_batch_size * world_size, torch.device(device)
    while True:
        of_step = rows[step * rows_per_step : (step + 1) * rows_per_step]
        # Rows of similar lengths together: little padding, and no rank waits for another.
        of_step.sort(key=conversations.row_length, reverse=True)
        for start in range(0, rows_per_step, unit):
            of_ranks = of_step[start : start + unit]
            batch = [conversations.read(row) for row in of_ranks[rank * device_batch_size :][:device_batch_size]]
            longest = conversations.row_length(of_ranks[0]) if of_ranks else 0
            length = padded_length(longest, max_seq_len, device) if pad else max_seq_len
            yield tensors(batch + [([], [])] * (device_batch_size - len(batch)), length, device)[:2]
        step += 1
