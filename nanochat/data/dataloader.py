"""
Text → rows of tokens, the same rows on any number of ranks.

Three steps. Each shard is tokenized once, in the background, into a file of token ids beside the data (2 bytes per
token): later epochs, evaluations and restarts read it by memory map. A planner packs documents into rows; it needs
only lengths, so every rank plans all rows and no communication is needed. Each rank then copies out its own rows.
"""
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanochat.data.dataset import dataset_dir, fingerprint, shard_texts, split_shards
from nanochat.data.packing import WaitingItems
from nanochat.data.tokenizer import Tokenizer
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import locked, write_aside

BUFFER_DOCUMENTS = 512  # what best fit chooses from; more leaves fewer cuts, and makes the state larger
ENCODE_BATCH = 1024     # documents handed to the tokenizer's threads at a time
OPEN_SHARDS = 64        # token files open at a time, each a file descriptor; macOS gives a process 256

Piece = tuple[int, int, int]  # (shard, start, end): these tokens of a shard


class TokenizedShards:
    """The shards of a split as token arrays: every document is <|bos|> and its tokens, one after the other."""

    def __init__(self, data: str, split: str, tokenizer: Tokenizer):
        self.data, self.split, self.tokenizer = data, split, tokenizer
        self.entries = split_shards(data, split)
        self.paths = [dataset_dir(data) / entry["file"] for entry in self.entries]
        self.bos = tokenizer.get_bos_token_id()
        self.background = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self.pending: dict[int, Future[tuple[np.ndarray, np.ndarray]]] = {}
        self.opened: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # the last one used is the last one here

    def prefetch(self, shard: int) -> None:
        """Start to tokenize a shard in the background."""
        if shard not in self.opened and shard not in self.pending:
            self.pending[shard] = self.background.submit(self.open, shard)

    def load(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """
        (tokens,) uint16 or uint32, and (documents + 1,) offsets into them: document i is [offsets[i], offsets[i + 1]).
        """
        self.prefetch(shard)
        if shard in self.pending:
            self.opened[shard] = self.pending.pop(shard).result()
        self.opened[shard] = self.opened.pop(shard)  # now the last
        if len(self.opened) > OPEN_SHARDS:
            del self.opened[next(iter(self.opened))]
        return self.opened[shard]

    def open(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.load(self.token_file(shard), mmap_mode="r")
        # No text can contain <|bos|>, so it marks where documents begin.
        return tokens, np.append(np.flatnonzero(np.asarray(tokens) == self.bos), len(tokens))

    def token_file(self, shard: int) -> Path:
        """The shard's token file, made now unless it is there. Of several processes one makes it, the others wait."""
        name = f"{self.entries[shard]['sha256'][:16]}-{self.tokenizer.fingerprint[:16]}.npy"
        path = dataset_dir(self.data) / "tokens" / name
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                tokens = self.encode_shard(shard)
                with write_aside(path) as aside, open(aside, "wb") as file:
                    np.save(file, tokens)
        return path

    def encode_shard(self, shard: int) -> np.ndarray:
        """The tokens of a shard's documents, from its text."""
        dtype = np.uint16 if self.tokenizer.get_vocab_size() <= 2**16 else np.uint32
        texts, parts = list(shard_texts(self.paths[shard])), []
        for start in range(0, len(texts), ENCODE_BATCH):
            batch = texts[start : start + ENCODE_BATCH]
            parts += [np.array(ids, dtype=dtype) for ids in self.tokenizer.encode(batch, prepend=self.bos)]
        return np.concatenate(parts)


class RowPlanner:
    """
    Packs documents into rows of `row_len` tokens; a row is a list of pieces (shard, start, end), each to be read as
    <|bos|> and the tokens [start, end).

    Best fit, see packing.py; where none fits, the longest is cut: its head fills the row, its tail goes back as a
    document with a <|bos|> of its own. Every token is used once per epoch and every position of a row is trained.
    Documents come in an order drawn from (seed, epoch).
    """

    POSITION = ("epoch", "shard_position", "document_position", "ordinal", "epoch_tokens")

    def __init__(self, shards: TokenizedShards, row_len: int, seed: int, state: dict | None = None):
        self.shards, self.row_len, self.seed = shards, row_len, seed
        # A small part of any corpus: what waits here is not seen this epoch.
        self.capacity = max(min(BUFFER_DOCUMENTS, sum(entry["rows"] for entry in shards.entries) // 32), 1)
        self.epoch = self.shard_position = self.document_position = self.ordinal = self.epoch_tokens = 0
        self.waiting = WaitingItems()
        if state is not None:
            vars(self).update({key: state[key] for key in self.POSITION})
            for ordinal, shard, start, end in state["buffer"]:
                self.waiting.add(ordinal, (end - start + 1, shard, start, end))
        self.order = self.permutation(len(self.shards.paths)).tolist()
        self.open_shard()

    def state(self) -> dict:
        """Everything the rows to come depend on, as JSON."""
        buffer = [(ordinal, *piece) for ordinal, (_, *piece) in self.waiting.items.items()]
        return {key: getattr(self, key) for key in self.POSITION} | {"buffer": buffer}

    def permutation(self, size: int, *key: int) -> np.ndarray:
        return np.random.default_rng([self.seed, self.epoch, *key]).permutation(size)

    def open_shard(self) -> None:
        self.shard = self.order[self.shard_position]
        _, offsets = self.shards.load(self.shard)
        order = self.permutation(len(offsets) - 1, self.shard)
        # Plain integers: a document costs a few list operations, not a few array accesses.
        self.starts, self.ends = (offsets[:-1][order] + 1).tolist(), offsets[1:][order].tolist()
        if self.shard_position + 1 < len(self.order):
            self.shards.prefetch(self.order[self.shard_position + 1])

    def next_document(self) -> tuple[int, int, int, int]:
        """(length, shard, start, end) of the next document that has text; continues into further epochs without end."""
        start = end = 0
        while end == start:
            while self.document_position == len(self.starts):
                self.document_position = 0
                self.shard_position += 1
                if self.shard_position == len(self.order):
                    self.begin_epoch()
                self.open_shard()
            start, end = self.starts[self.document_position], self.ends[self.document_position]
            self.document_position += 1
        length = end - start + 1  # with its <|bos|>
        self.epoch_tokens += length
        return length, self.shard, start, end

    def begin_epoch(self) -> None:
        if self.epoch_tokens < self.row_len:
            has = f"data {self.shards.data!r} ({self.shards.split}) has {self.epoch_tokens} tokens, fewer than one row"
            raise UserError(f"{has} of max_seq_len + 1 = {self.row_len}; add text or lower max_seq_len")
        self.epoch, self.shard_position, self.epoch_tokens = self.epoch + 1, 0, 0
        self.order = self.permutation(len(self.shards.paths)).tolist()

    def next_row(self) -> list[Piece]:
        row, space, waiting = [], self.row_len, self.waiting
        while space:
            while len(waiting.items) < self.capacity:
                waiting.add(self.ordinal, self.next_document())
                self.ordinal += 1
            length, shard, start, end = waiting.take_longest(space, or_any=True) if row else waiting.take_oldest()
            if length > space:
                cut = start + space - 1
                waiting.add(self.ordinal, (end - cut + 1, shard, cut, end))
                self.ordinal += 1
                length, end = space, cut
            row.append((shard, start, end))
            space -= length
        return row

    def read(self, rows: list[list[Piece]]) -> np.ndarray:
        """The tokens of planned rows, (rows, row_len) int64."""
        out = np.empty((len(rows), self.row_len), dtype=np.int64)
        for line, row in zip(out, rows):
            at = 0
            for shard, start, end in row:
                line[at] = self.shards.bos
                line[at + 1 : at + 1 + end - start] = self.shards.load(shard)[0][start:end]
                at += 1 + end - start
        return out


def tokenizing_distributed_data_loader(
    data: str, split: str, tokenizer: Tokenizer, *,
    device_batch_size: int, max_seq_len: int, grad_accum_steps: int = 1, rank: int = 0, world_size: int = 1,
    seed: int = 0, device: torch.device | str = "cpu", state: dict | None = None, num_rows: int | None = None,
    rows_per_step: int | None = None,
) -> Iterator[tuple[Tensor, Tensor, dict]]:
    """
    Yields (inputs, targets, state) without end: (B, T) int64 on the device, targets one position ahead.

    The rows of an optimizer step are a function of data, tokenizer, seed, rows per step and max_seq_len; micro-step m
    of this rank gets global micro-batch m · world_size + rank of them, which holds the same rows whoever asks.
    `state` is where the step of this batch begins: a loader made from it yields this step again, from its first
    micro-batch on, on any number of ranks. num_rows: past so many rows over all ranks every target is −1 (None: never),
    so that a sum over the first rows is one over the same rows for any number of ranks and any batch. rows_per_step:
    of all ranks, no more than their micro-steps hold (None: as many); in the rest of these every target is −1.
    Errors: UserError when state belongs to other data, tokenizer or settings.
    """
    shards = TokenizedShards(data, split, tokenizer)
    identity = {"data": fingerprint(data), "tokenizer": tokenizer.fingerprint, "split": split, "seed": seed,
                "max_seq_len": max_seq_len}
    for key, value in identity.items():
        if state is not None and state[key] != value:
            problem = f"{key} was {state[key]} when the checkpoint was saved and is {value} now"
            if key == "data":
                problem = (f"data set {data!r} is not what the checkpoint was trained on: another one, or made "
                           "again from other text; restore the text that it had, or set another --model_tag")
            raise UserError(f"cannot continue exactly: {problem}")
    planner = RowPlanner(shards, max_seq_len + 1, seed, state)
    pinned = torch.device(device).type == "cuda"
    rows_per_step = rows_per_step or device_batch_size * grad_accum_steps * world_size

    def batches() -> Iterator[tuple[Tensor, Tensor, dict]]:
        rows_before = 0
        while True:
            step_state = identity | planner.state()
            rows = [planner.next_row() for _ in range(rows_per_step)]
            for micro_step in range(grad_accum_steps):
                first = (micro_step * world_size + rank) * device_batch_size
                own = rows[first : first + device_batch_size]
                filling = rows[:1] * (device_batch_size - len(own))
                tokens = torch.from_numpy(planner.read(own + filling))
                # Copies: of a single row both would be views of the same memory.
                inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
                targets[len(own) :] = -1
                if num_rows is not None:
                    targets[max(num_rows - rows_before - first, 0) :] = -1
                if pinned:
                    inputs, targets = inputs.pin_memory(), targets.pin_memory()
                yield inputs, targets, step_state
            rows_before += len(rows)

    for inputs, targets, step_state in prefetched(batches(), ahead=2 * grad_accum_steps):
        # From pinned memory the copy runs beside whatever the device computes; from other memory it could read what
        # is already used for something else.
        yield inputs.to(device, non_blocking=pinned), targets.to(device, non_blocking=pinned), step_state


def prefetched(iterator: Iterator, ahead: int) -> Iterator:
    """The items of an endless iterator, produced up to `ahead` items early by a thread; its errors surface here."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
    items = deque(pool.submit(next, iterator) for _ in range(ahead))
    try:
        while True:
            items.append(pool.submit(next, iterator))
            yield items.popleft().result()
    finally:  # also at the interpreter's end, where cancel_futures of shutdown would fail
        for item in items:
            item.cancel()
        pool.shutdown()  # a thread in native code at the interpreter's end would abort the process


def count_tokens(data: str, split: str, tokenizer: Tokenizer) -> int:
    """Tokens of a split, <|bos|> included. Tokenizes what is not tokenized yet: meant for validation."""
    shards = TokenizedShards(data, split, tokenizer)
    return sum(len(shards.load(shard)[0]) for shard in range(len(shards.paths)))


def validation_rows(data: str, tokenizer: Tokenizer, eval_tokens: int, max_seq_len: int) -> int:
    """
    Rows that have eval_tokens targets, as far as one pass over the validation split goes: a row of max_seq_len targets
    reads one token more. At least one row.
    """
    one_pass = count_tokens(data, "val", tokenizer) // (max_seq_len + 1)
    return max(min(eval_tokens // max_seq_len, one_pass), 1)
