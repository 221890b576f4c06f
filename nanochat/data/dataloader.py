"""
Text → rows of tokens, the same rows on any number of ranks.

Three steps. Each shard is tokenized once, in the background, into a file of token ids beside the data (2 bytes per
token): later epochs, evaluations and restarts read it by memory map. A planner packs documents into rows; it needs
only lengths, so every rank plans all rows and no communication is needed. Each rank then copies out its own rows.
"""
import functools
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanochat.data.best_fit import WaitingItems
from nanochat.data.shard_reader import dataset_dir, fingerprint, shard_texts, split_shards
from nanochat.data.tokenizer import Tokenizer
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import locked, write_aside

BUFFER_DOCUMENTS = 512  # what best fit chooses from; more leaves fewer cuts, and makes the state larger
ENCODE_BATCH = 1024     # documents handed to the tokenizer's threads at a time
OPEN_SHARDS = 64        # token files open at a time, each a file descriptor; macOS gives a process 256

Piece = tuple[int, int, int]  # (shard, start, end): these tokens of a shard
Batches = Generator[tuple[Tensor, Tensor, dict]]  # inputs, targets, state


class TokenizedShards:
    """The shards of a split as token arrays: every document is <|bos|> and its tokens, one after the other."""

    def __init__(self, data: str, split: str, tokenizer: Tokenizer):
        self.data = data
        self.split = split
        self.tokenizer = tokenizer
        self.entries = split_shards(data, split)
        self.background = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self.load = functools.lru_cache(OPEN_SHARDS)(self.open)

    def open(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """
        (tokens,) uint16 or uint32, and (documents + 1,) offsets into them: document i is [offsets[i], offsets[i + 1]).
        """
        tokens = np.load(self.token_file(shard), mmap_mode="r")
        # No text can contain <|bos|>, so it marks where documents begin.
        return tokens, np.append(np.flatnonzero(np.asarray(tokens) == self.tokenizer.get_bos_token_id()), len(tokens))

    def token_file(self, shard: int) -> Path:
        """The shard's token file, made now unless it is there: by one process, while the others wait."""
        entry = self.entries[shard]
        folder = dataset_dir(self.data)
        path = folder / "tokens" / f"{entry['sha256'][:16]}-{self.tokenizer.fingerprint[:16]}.npy"
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                tokens = self.encode_shard(folder / entry["file"])
                with write_aside(path) as aside, open(aside, "wb") as file:
                    np.save(file, tokens)
        return path

    def encode_shard(self, path: Path) -> np.ndarray:
        dtype = np.uint16 if self.tokenizer.get_vocab_size() <= 2**16 else np.uint32
        texts = list(shard_texts(path))
        documents = []
        for start in range(0, len(texts), ENCODE_BATCH):
            for ids in self.tokenizer.encode(texts[start : start + ENCODE_BATCH], prepend="<|bos|>"):
                documents.append(np.array(ids, dtype=dtype))
        return np.concatenate(documents)


class RowPlanner:
    """
    Packs documents into rows of `row_len` tokens; a row is a list of pieces (shard, start, end), each to be read as
    <|bos|> and the tokens [start, end).

    Best fit, see best_fit.py; where none fits, the longest is cut: its head fills the row, its tail goes back as a
    document with a <|bos|> of its own. Every token is used once per epoch and every position of a row is trained.
    Documents come in an order drawn from (seed, epoch).
    """

    POSITION = ("epoch", "shard_position", "document_position", "ordinal", "epoch_tokens")
    epoch: int
    shard_position: int
    document_position: int
    ordinal: int
    epoch_tokens: int

    def __init__(self, shards: TokenizedShards, row_len: int, seed: int, state: dict | None = None):
        self.shards = shards
        self.row_len = row_len
        self.seed = seed
        # At most a small part of the corpus: documents that still wait are not seen in this epoch.
        documents = sum(entry["rows"] for entry in shards.entries)
        self.capacity = max(min(BUFFER_DOCUMENTS, documents // 32), 1)
        self.waiting = WaitingItems()
        state = state or {**dict.fromkeys(self.POSITION, 0), "buffer": []}
        for key in self.POSITION:
            setattr(self, key, state[key])
        for ordinal, shard, start, end in state["buffer"]:
            self.waiting.add(ordinal, (end - start + 1, shard, start, end))
        self.open_shard()

    def state(self) -> dict:
        """Everything the rows to come depend on, as JSON."""
        buffer = [(ordinal, *piece) for ordinal, (_, *piece) in self.waiting.items.items()]
        return {key: getattr(self, key) for key in self.POSITION} | {"buffer": buffer}

    def permutation(self, size: int, *key: int) -> np.ndarray:
        return np.random.default_rng([self.seed, self.epoch, *key]).permutation(size)

    def open_shard(self) -> None:
        order = self.permutation(len(self.shards.entries)).tolist()
        self.shard = order[self.shard_position]
        _, offsets = self.shards.load(self.shard)
        if self.shard_position + 1 < len(order):  # is tokenized meanwhile; an error shows when it is loaded
            self.shards.background.submit(self.shards.load, order[self.shard_position + 1])
        documents = self.permutation(len(offsets) - 1, self.shard)
        # Python's integers: lists are faster than arrays where one number is read at a time.
        self.starts = (offsets[:-1][documents] + 1).tolist()
        self.ends = offsets[1:][documents].tolist()

    def add_document(self) -> None:
        """Let the next document wait; they continue into further epochs without end. An empty one is passed over."""
        while self.document_position == len(self.starts):
            self.document_position = 0
            self.shard_position += 1
            if self.shard_position == len(self.shards.entries):
                if self.epoch_tokens < self.row_len:
                    where = f"data {self.shards.data!r} ({self.shards.split})"
                    raise UserError(f"{where} has {self.epoch_tokens} tokens, fewer than one row of max_seq_len + 1 = "
                                    f"{self.row_len}; add text or lower max_seq_len")
                self.epoch += 1
                self.shard_position = 0
                self.epoch_tokens = 0
            self.open_shard()
        start = self.starts[self.document_position]
        end = self.ends[self.document_position]
        self.document_position += 1
        if end > start:
            self.epoch_tokens += end - start + 1  # with its <|bos|>
            self.wait(self.shard, start, end)

    def wait(self, shard: int, start: int, end: int) -> None:
        self.waiting.add(self.ordinal, (end - start + 1, shard, start, end))
        self.ordinal += 1

    def next_row(self) -> list[Piece]:
        row: list[Piece] = []
        space = self.row_len
        while space:
            while len(self.waiting.items) < self.capacity:
                self.add_document()
            if row:
                length, shard, start, end = self.waiting.take_longest(space, or_any=True)
            else:
                length, shard, start, end = self.waiting.take_oldest()
            if length > space:
                cut = start + space - 1  # the <|bos|> takes one place
                self.wait(shard, cut, end)
                end = cut
            row.append((shard, start, end))
            space -= end - start + 1
        return row

    def read(self, rows: list[list[Piece]]) -> np.ndarray:
        """The tokens of planned rows, (rows, row_len) int64."""
        bos = self.shards.tokenizer.get_bos_token_id()
        out = np.empty((len(rows), self.row_len), dtype=np.int64)
        for line, row in zip(out, rows):
            parts = []
            for shard, start, end in row:
                tokens, _ = self.shards.load(shard)
                parts += [[bos], tokens[start:end]]
            np.concatenate(parts, out=line, casting="unsafe")
        return out


def tokenizing_distributed_data_loader(
    data: str, split: str, tokenizer: Tokenizer, *,
    device_batch_size: int, max_seq_len: int, grad_accum_steps: int = 1, rank: int = 0, world_size: int = 1,
    seed: int = 0, device: torch.device | str = "cpu", state: dict | None = None, num_rows: int | None = None,
    rows_per_step: int | None = None,
) -> Batches:
    """
    Yields (inputs, targets, state) without end: (B, T) int64 on the device, targets one position ahead.

    The rows of an optimizer step are a function of data, tokenizer, seed, rows per step and max_seq_len. Micro-step m
    of this rank takes their micro-batch m · world_size + rank.

    state: where the step of this batch begins. A loader made from it yields that step again, from its first micro-batch
        on, on any number of ranks. UserError when it belongs to other data, tokenizer or settings.
    num_rows: evaluate exactly these first rows. Later targets are −1, so a sum does not depend on ranks or batch size.
    rows_per_step: over all ranks, at most as many as their micro-steps hold (None: as many). Places without a row have
        targets of −1.
    """
    shards = TokenizedShards(data, split, tokenizer)
    identity = {"data": fingerprint(data), "tokenizer": tokenizer.fingerprint, "split": split, "seed": seed,
                "max_seq_len": max_seq_len}
    for key, value in identity.items():
        if state and state[key] != value:
            raise UserError(f"cannot continue exactly: {key} is not what the checkpoint was trained with; "
                            "restore it, or set another --model_tag")
    planner = RowPlanner(shards, max_seq_len + 1, seed, state)
    pinned = torch.device(device).type == "cuda"
    rows_per_step = rows_per_step or device_batch_size * grad_accum_steps * world_size

    def batches() -> Batches:
        rows_before = 0
        while True:
            step_state = identity | planner.state()
            rows = [planner.next_row() for _ in range(rows_per_step)]
            for micro_step in range(grad_accum_steps):
                first = (micro_step * world_size + rank) * device_batch_size
                own = rows[first : first + device_batch_size]
                filling = rows[:1] * (device_batch_size - len(own))  # any row: its targets do not count
                tokens = torch.from_numpy(planner.read(own + filling))
                inputs = tokens[:, :-1].contiguous()
                targets = tokens[:, 1:].clone()  # a view of a single row would share its memory with the inputs
                targets[len(own) :] = -1
                if num_rows is not None:
                    targets[max(num_rows - rows_before - first, 0) :] = -1
                if pinned:
                    inputs = inputs.pin_memory()
                    targets = targets.pin_memory()
                yield inputs, targets, step_state
            rows_before += len(rows)

    for inputs, targets, step_state in prefetched(batches(), ahead=2 * grad_accum_steps):
        # Only from pinned memory: another copy that is not waited for could read memory that is in use again.
        yield inputs.to(device, non_blocking=pinned), targets.to(device, non_blocking=pinned), step_state


def prefetched(iterator: Iterator, ahead: int) -> Generator:
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


def validation_rows(data: str, tokenizer: Tokenizer, eval_tokens: int, max_seq_len: int) -> int:
    """
    Rows that have eval_tokens targets, as far as one pass over the validation split goes: a row of max_seq_len targets
    reads one token more. At least one row.
    """
    tokens, _ = TokenizedShards(data, "val", tokenizer).load(0)
    one_pass = len(tokens) // (max_seq_len + 1)
    return max(min(eval_tokens // max_seq_len, one_pass), 1)
