"""
Text → rows of tokens, the same rows on any number of ranks.

1. Each shard is tokenized once, in the background, into a file of token ids beside the data (2 bytes per token). Later
   epochs, evaluations and restarts memory-map this file.
2. A planner packs documents into rows. It needs only lengths, so every rank plans all rows without communication. With
   several data sets each has its own planner, and the planners take turns.
3. Each rank copies out its own rows of every micro-step, in a thread, some micro-steps early.
"""
import functools
import sys
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanochat.data.batch_shape import BatchShape, chunks, document_offsets
from nanochat.data.best_fit import WaitingItems
from nanochat.data.padding import on_device
from nanochat.data.shard_reader import data_shares, dataset_dir, fingerprint, shard_texts, split_shards
from nanochat.data.tokenizer import Tokenizer
from nanochat.runtime.console import print0
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import locked, write_aside

# Documents among which best fit chooses. More of them mean fewer cuts, but a larger state in the checkpoints.
BUFFER_DOCUMENTS = 512
ENCODE_BATCH = 1024  # documents that the tokenizer's threads get at a time
# Token files open at a time. Each needs a file descriptor, and macOS gives a process 256.
OPEN_SHARDS = 64
NPY_HEADER = 128  # bytes that np.save writes before a one-dimensional array

# A document or a part of one: (tokens that it takes in a row, which are <|bos|> and its own; number of the shard; where
# its own begin in the shard), and in a row (tokens that it takes, tokens of the shard, where its own begin). Plain
# tuples: a NamedTuple made the loader a quarter slower (CPU time of 32 rows of 2,048 tokens).
Waiting = tuple[int, int, int]
Span = tuple[int, np.ndarray, int]


class Batch(NamedTuple):
    inputs: Tensor      # (B, T) int64
    targets: Tensor     # (B, T) int64, one position ahead of the inputs; −1 in missing rows
    cu_seqlens: Tensor  # see `document_offsets`
    step_state: dict    # where the optimizer step of this batch begins


class TokenizedShards:
    """The shards of a split as token arrays: all documents end to end, each with a <|bos|> before it."""

    def __init__(self, data: str, split: str, tokenizer: Tokenizer):
        self.data = data
        self.split = split
        self.tokenizer = tokenizer
        self.dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
        self.entries = split_shards(data, split)
        self.background = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self.load = functools.lru_cache(OPEN_SHARDS)(self.open)

    def open(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """
        (tokens,) uint16 or uint32, and (documents + 1,) offsets into them: document i is [offsets[i], offsets[i + 1]).
        """
        # np.load would parse the file's header with `ast`, which Python 3.11 cannot do in two threads at once: "AST
        # constructor recursion depth mismatch". The compiler may be parsing code in the main thread.
        # A plain array, because slices of a memmap are slow.
        tokens = np.asarray(np.memmap(self.token_file(shard), self.dtype, "r", NPY_HEADER))
        # No text can contain <|bos|>, so it marks where documents begin.
        return tokens, np.append(np.flatnonzero(tokens == self.tokenizer.get_bos_token_id()), len(tokens))

    def token_file(self, shard: int) -> Path:
        """The path of the shard's token file, which is made if it is missing or cut short."""
        entry = self.entries[shard]
        folder = dataset_dir(self.data)
        path = folder / "tokens" / f"{entry['sha256'][:16]}-{self.tokenizer.fingerprint[:16]}.npy"
        # The ranks of a machine share the file: one rank makes it, the others wait and then read it.
        with locked(path.with_suffix(".lock")):
            if not path.exists() or not self.is_whole(path):
                documents = []
                for texts in chunks(list(shard_texts(folder / entry["file"])), ENCODE_BATCH):
                    for ids in self.tokenizer.encode(texts, prepend="<|bos|>"):
                        documents.append(np.array(ids, dtype=self.dtype))
                with write_aside(path) as aside, open(aside, "wb") as file:
                    np.save(file, np.concatenate(documents))
        return path

    def is_whole(self, path: Path) -> bool:
        """Whether a token file has the length that its header says: a copy of the folder may have been cut off."""
        tokens = (path.stat().st_size - NPY_HEADER) // self.dtype().itemsize
        with open(path, "rb") as file:
            return b"(%d,)" % tokens in file.read(NPY_HEADER)


class RowPlanner:
    """
    Packs documents into rows of `row_len` tokens. A row is a list of spans, end to end.

    A row begins with the document that has waited longest; then best fit, see best_fit.py. When none fits, the longest
    is cut: its head fills the row, its tail waits again as a document with its own <|bos|>. Every position of a row is
    trained, and every token is used once per epoch, but for the documents that wait at its end: they come in the next.
    The order of documents is drawn from (seed, epoch).
    """

    POSITION = ("epoch", "shard_position", "document_position", "epoch_tokens")  # as `documents` counts

    def __init__(self, shards: TokenizedShards, row_len: int, seed: int, state: dict | None = None):
        self.shards = shards
        self.row_len = row_len
        self.seed = seed
        # At most a small part of the corpus: so many documents may move into the next epoch.
        documents = sum(entry["rows"] for entry in shards.entries)
        self.capacity = max(min(BUFFER_DOCUMENTS, documents // 32), 1)
        state = state or {**dict.fromkeys(self.POSITION, 0), "ordinal": 0, "buffer": []}
        self.position = tuple(state[key] for key in self.POSITION)
        self.upcoming = self.documents(*self.position)
        self.ordinal = state["ordinal"]  # number of spans that have waited so far
        self.waiting = WaitingItems()
        for ordinal, shard, start, end in state["buffer"]:
            self.waiting.add(ordinal, (end - start + 1, shard, start))

    def state(self) -> dict:
        """Everything that future rows depend on, as JSON."""
        buffer = [(ordinal, shard, start, start + length - 1)
                  for ordinal, (length, shard, start) in self.waiting.items.items()]
        return dict(zip(self.POSITION, self.position)) | {"ordinal": self.ordinal, "buffer": buffer}

    def documents(self, epoch: int, first_shard: int, first_document: int, epoch_tokens: int) -> Iterator[Waiting]:
        """The documents from a position on, epoch after epoch without end. Empty documents are skipped."""
        while True:
            order = self.permutation(len(self.shards.entries), epoch).tolist()
            for shard_position, shard in enumerate(order[first_shard:], first_shard):
                _, offsets = self.shards.load(shard)
                # The next shard is tokenized while this one is read. An error there surfaces when that shard is loaded.
                for following in order[shard_position + 1 :][:1]:
                    self.shards.background.submit(self.shards.load, following)
                # Lists, in reading order: numbers are read one at a time, which is slow with arrays.
                documents = self.permutation(len(offsets) - 1, epoch, shard)[first_document:]
                starts = (offsets[documents] + 1).tolist()
                lengths = np.diff(offsets)[documents].tolist()
                for document_position, (length, start) in enumerate(zip(lengths, starts), first_document + 1):
                    if length > 1:
                        epoch_tokens += length
                        self.position = epoch, shard_position, document_position, epoch_tokens
                        yield length, shard, start
                first_document = 0
            # Without this check an empty corpus would be read for ever, and a small one would repeat within a row.
            if epoch_tokens < self.row_len:
                where = f"data {self.shards.data!r} ({self.shards.split})"
                raise UserError(f"{where} has {epoch_tokens} tokens, fewer than one row of max_seq_len + 1 = "
                                f"{self.row_len}; add text or lower max_seq_len")
            epoch += 1
            first_shard = epoch_tokens = 0
            if self.shards.split == "train":
                print0(f"data {self.shards.data!r} begins again: all of it was read {epoch} time(s)")

    def permutation(self, size: int, *key: int) -> np.ndarray:
        return np.random.default_rng([self.seed, *key]).permutation(size)

    def enqueue(self, item: Waiting) -> None:
        self.waiting.add(self.ordinal, item)
        self.ordinal += 1

    def next_row(self) -> list[Span]:
        row: list[Span] = []
        space = self.row_len
        while space:
            while len(self.waiting.items) < self.capacity:
                self.enqueue(next(self.upcoming))
            if row:
                length, shard, start = self.waiting.take_longest(space) or self.waiting.take_longest()
            else:
                length, shard, start = self.waiting.take_oldest()
            if length > space:
                # The head takes `space` tokens; before the tail there is another <|bos|>.
                self.enqueue((length - space + 1, shard, start + space - 1))
                length = space
            tokens, _ = self.shards.load(shard)
            row.append((length, tokens, start))
            space -= length
        return row


@dataclass
class MixturePlanner:
    """
    Rows of several data sets, each with its own planner. The next row comes from the data set that would be furthest
    behind its share of all rows; nothing is random. All rows are equally long, so with two data sets each is always
    within one row of its share of the tokens.
    """

    planners: list[RowPlanner]
    shares: list[float]
    rows: list[int]  # how many each planner has already given

    def state(self) -> dict:
        return {"rows": list(self.rows), "planners": [planner.state() for planner in self.planners]}

    def next_row(self) -> list[Span]:
        number = sum(self.rows) + 1
        behind = [share * number - rows for share, rows in zip(self.shares, self.rows)]
        chosen = behind.index(max(behind))
        self.rows[chosen] += 1
        planner = self.planners[chosen]
        return planner.next_row()


Planner = RowPlanner | MixturePlanner


def plan_rows(data: str, split: str, tokenizer: Tokenizer, row_len: int, seed: int, state: dict | None) -> Planner:
    """The planner of one or several data sets; state: where an earlier planner was."""
    shares = data_shares(data)
    states = state["planners"] if state and len(shares) > 1 else [state] * len(shares)
    planners = [RowPlanner(TokenizedShards(name, split, tokenizer), row_len, seed, before)
                for name, before in zip(shares, states)]
    if len(planners) == 1:
        return planners[0]
    return MixturePlanner(planners, list(shares.values()), list(state["rows"]) if state else [0] * len(planners))


def content_of(data: str) -> str:
    """Equal exactly if texts and shares are: a data set's fingerprint, or the fingerprints and shares of several."""
    shares = data_shares(data)
    if len(shares) == 1:
        return fingerprint(*shares)
    return ", ".join(f"{fingerprint(name)} * {share:.9f}" for name, share in shares.items())


def document_loader(
    data: str, split: str, tokenizer: Tokenizer, shape: BatchShape, *,
    rows_per_step: int = 0, seed: int = 0, state: dict | None = None, num_rows: int = sys.maxsize,
) -> Generator[Batch]:
    """
    Yields this rank's batches, on its device, without end.

    The rows of an optimizer step are a function of data, tokenizer, seed, rows_per_step and max_seq_len.
    `BatchShape.micro_steps` and `of_this_rank` distribute them.

    data: a data set, or several as `data_shares` takes them.
    rows_per_step: over all ranks; 0: as many as one micro-step has.
    state: the step_state of a batch. A loader made from it yields that step again, from its first micro-step on, on any
        number of ranks. UserError if it belongs to other data, tokenizer or settings.
    num_rows: only these first rows have targets, so an evaluation's sum does not depend on ranks or batch size.
    """
    identity = {"data": content_of(data), "tokenizer": tokenizer.fingerprint, "split": split, "seed": seed,
                "max_seq_len": shape.max_seq_len}
    for key, value in identity.items():
        if state and state[key] != value:
            raise UserError(f"cannot continue exactly: {key} is not what the checkpoint was trained with; "
                            "restore it, or set another --model_tag")
    planner = plan_rows(data, split, tokenizer, shape.max_seq_len + 1, seed, state)
    rows_per_step = rows_per_step or shape.rows_per_micro_step
    batches = batches_on_host(planner, shape, rows_per_step, num_rows)
    # Two steps early, because opening a shard takes longer than reading a row.
    early = 2 * len(shape.micro_steps([0] * rows_per_step))
    for *tensors, step_state in prefetched(batches, early):
        inputs, targets, cu_seqlens = (on_device(tensor, shape.device) for tensor in tensors)
        yield Batch(inputs, targets, cu_seqlens, identity | step_state)


def batches_on_host(planner: Planner, shape: BatchShape, rows_per_step: int, num_rows: int) -> Iterator[Batch]:
    """This rank's batches, without end, in host memory."""
    while True:
        step_state = planner.state()
        step_rows = [planner.next_row() for _ in range(min(rows_per_step, num_rows))]
        num_rows -= len(step_rows)
        for rows in shape.micro_steps(step_rows):
            own = shape.of_this_rank(rows)
            tokens = torch.zeros(shape.device_batch_size, shape.max_seq_len + 1, dtype=torch.int64)
            for line, row in zip(tokens.numpy(), own):
                parts = []
                for length, source, start in row:
                    # A shard's first token is <|bos|>.
                    parts += [source[:1], source[start : start + length - 1]]
                np.concatenate(parts, out=line, casting="unsafe")
            inputs = tokens[:, :-1].contiguous()
            # A clone, because with a single row a view would share memory with the inputs.
            targets = tokens[:, 1:].clone()
            targets[len(own) :] = -1
            lengths = [[length for length, _, _ in row] for row in own]
            cu_seqlens = document_offsets(lengths, shape.device_batch_size, shape.max_seq_len)
            yield Batch(inputs, targets, cu_seqlens, step_state)


def prefetched(iterator: Iterator, ahead: int) -> Generator:
    """The items of an endless iterator; a thread produces up to `ahead` of them early, and its errors surface here."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
    items = deque(pool.submit(next, iterator) for _ in range(ahead))
    try:
        while True:
            items.append(pool.submit(next, iterator))
            yield items.popleft().result()
    finally:
        # This also works at interpreter exit, where shutdown(cancel_futures=True) would fail.
        for item in items:
            item.cancel()
        # Waits, because a thread in native code at interpreter exit would abort the process.
        pool.shutdown()


def validation_rows(data: str, tokenizer: Tokenizer, eval_tokens: int, max_seq_len: int) -> int:
    """
    Number of rows with eval_tokens targets, at most one pass over the validation split, at least one row. A row with
    max_seq_len targets reads max_seq_len + 1 tokens.
    """
    tokens, _ = TokenizedShards(data, "val", tokenizer).load(0)
    one_pass = len(tokens) // (max_seq_len + 1)
    return max(min(eval_tokens // max_seq_len, one_pass), 1)
