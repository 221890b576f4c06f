"""
Documents in, parquet shards out: shuffled, without duplicates, the last shard held out.

Every document gets a key, the hash of the seed and its text. Documents are written in the order of their keys,
and that one decision gives everything that is asked of a data set:

    shuffled          the order of hashes is a random order, drawn anew by each seed
    no duplicates     equal texts have equal keys, so they meet side by side and all but one go
    reproducible      the result depends on the texts and the seed, not on the order they were found in
    held out          validation is chosen by key as well, so no text can be on both sides
    larger than RAM   a key's first bits name a bucket on disk; only one bucket is in memory at a time

What belongs together (the pieces of one file) carries one `kin` string and is held out, or not, as a whole.
"""
import contextlib
import hashlib
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nanochat.dataset import first_line
from nanochat.errors import UserError
from nanochat.files import sha256

SCHEMA = pa.schema([("text", pa.string())])
ROW_GROUP_ROWS = 1024
ROW_GROUP_BYTES = 64 << 20   # rows are usually few hundred bytes to a few kB; this bounds a group of huge ones
BUCKETS = 64                 # a bucket must fit in memory: data may be about 64 times as large as that
SLOTS = 1 << 16               # resolution of the choice of what to hold out, in kin groups
VAL_SHARE = 0.02             # of the text, but at least VAL_BYTES where that is less than a tenth of it
VAL_BYTES = 500_000
FEW = 64                     # with fewer documents than this, one may have to be cut to have two shards
HEADER = struct.Struct("<16sHI")
LONE_SURROGATES = re.compile("[\ud800-\udfff]")


class Record(NamedTuple):
    """A document on its way: its key, the slot that decides on which side of the split it goes, its UTF-8 text."""

    key: bytes
    slot: int
    text: bytes


class ShardWriter:
    """One parquet shard being written, row group by row group."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        self.text_bytes = 0
        self._group: list[bytes] = []
        self._group_bytes = 0
        # Statistics and dictionaries of free text are only weight.
        self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd", use_dictionary=False, write_statistics=False)

    def add(self, text: bytes) -> None:
        """Append one document, UTF-8."""
        self.rows += 1
        self.text_bytes += len(text)
        self._group.append(text)
        self._group_bytes += len(text)
        if len(self._group) == ROW_GROUP_ROWS or self._group_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is left and the footer. Without it the file is not a parquet file."""
        if self._group:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        column = pa.array(self._group, type=pa.large_binary()).cast(pa.large_string()).cast(pa.string())
        self._writer.write_table(pa.table([column], schema=SCHEMA))
        self._group, self._group_bytes = [], 0


def build(
    folder: Path,
    documents: Iterable[tuple[str, str]],
    seed: int,
    shard_bytes: int,
    max_shards: int,
    tally: Counter,
    what: str,
) -> list[dict]:
    """
    Write (text, kin) documents as `shard_00000.parquet`, … into an empty folder; the last shard is validation.

    shard_bytes: text per training shard, roughly; the shards are made equally large.
    max_shards: training shards to write at most, -1 for all; the first N are the same whatever comes after.
    tally: counts documents, empty ones, duplicates, invalid and left_out ones into it.
    what: the source's name, for errors.
    Returns the manifest's entry of each shard. Raises UserError where there is too little text for two shards.
    """
    buckets = [folder / f"bucket_{i:02d}" for i in range(BUCKETS)]
    spool(buckets, documents, seed, tally, what)
    sizes = deduplicate(buckets, tally)
    if not sizes.any():
        raise UserError(f"no documents in {what}: all it holds is empty")
    planned = int(sizes.sum()) if max_shards < 0 else min(int(sizes.sum()), max_shards * shard_bytes)
    held_out = choose_held_out(sizes, planned, shard_bytes)
    if not held_out.any():
        cut_one_document(buckets, tally["documents"], validation_bytes(planned, shard_bytes), seed, sizes, what)
        held_out = np.arange(SLOTS) == np.flatnonzero(sizes)[np.argmin(sizes[sizes > 0])]
    paths = write_shards(folder, buckets, held_out, int(sizes[~held_out].sum()), shard_bytes, max_shards, tally)
    for bucket in buckets:
        bucket.unlink()
    return [describe(path) for path in paths]


def spool(
    buckets: list[Path], documents: Iterable[tuple[str, str]], seed: int, tally: Counter, what: str
) -> None:
    """First pass: every document into the bucket that its key names."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(bucket, "wb")) for bucket in buckets]
        for text, kin in documents:
            if not text.strip():
                tally["empty"] += 1
                continue
            data = encode(text, tally)
            if len(data) >= 1 << 31:
                raise UserError(f"{what} has a document of {len(data)} bytes; a parquet column of strings takes 2 GiB")
            key = content_key(seed, data)
            slot = slot_of(key if kin is text else content_key(seed, kin.encode("utf-8", "surrogatepass")))
            append(files[key[0] * BUCKETS // 256], Record(key, slot, data))


def deduplicate(buckets: list[Path], tally: Counter) -> np.ndarray:
    """Second pass: sort each bucket by key, drop repeated keys, and return the bytes of text in each slot."""
    sizes = np.zeros(SLOTS, dtype=np.int64)
    for bucket in buckets:
        records = sorted(read_bucket(bucket))
        with open(bucket, "wb") as file:
            previous = b""
            for record in records:
                if record.key == previous:
                    tally["duplicates"] += 1
                    continue
                previous = record.key
                append(file, record)
                sizes[record.slot] += len(record.text)
                tally["documents"] += 1
    return sizes


def validation_bytes(total: int, shard_bytes: int) -> int:
    """How much text to hold out, of `total` bytes: see VAL_SHARE; never more than a training shard."""
    return max(1, min(shard_bytes, max(int(total * VAL_SHARE), min(VAL_BYTES, total // 10))))


def choose_held_out(sizes: np.ndarray, total: int, shard_bytes: int) -> np.ndarray:
    """
    The slots to hold out, as a mask: from the top down until there is enough, passing over slots so large that
    they alone would be too much. None at all where every slot is too large.
    """
    wanted = validation_bytes(total, shard_bytes)
    held_out = np.zeros(SLOTS, dtype=bool)
    got = 0
    for slot in np.flatnonzero(sizes)[::-1]:
        if got >= wanted:
            break
        if got + sizes[slot] <= min(1.5 * wanted, sizes.sum() - 1):
            held_out[slot] = True
            got += int(sizes[slot])
    return held_out


def cut_one_document(buckets: list[Path], count: int, wanted: int, seed: int, sizes: np.ndarray, what: str) -> None:
    """
    Few and large documents: cut the end of the longest one off, at a paragraph or line, to be held out.
    Rewrites the buckets and `sizes`. Where nothing can be cut, the smallest document will have to serve.
    """
    records = [record for bucket in buckets for record in read_bucket(bucket)] if count <= FEW else []
    longest = max(records, key=lambda record: (len(record.text), record.key), default=Record(b"", 0, b""))
    at = boundary_near(longest.text, wanted)
    halves = [half.strip(b"\n") for half in (longest.text[:at], longest.text[at:])]
    keys = [content_key(seed, half) for half in halves]
    known = {record.key for record in records if record is not longest}
    if at == 0 or not halves[1].strip() or keys[0] == keys[1] or known & set(keys):
        if np.count_nonzero(sizes) < 2:
            size = int(sizes.sum())
            raise UserError(
                f"too little text in {what}: {size} bytes that cannot be cut in two different parts"
                " at a paragraph or line, one to train on and one to validate on"
            )
        return
    # The two parts need different slots, and the held out one has to be the smallest: give it a slot of its own.
    taken = {record.slot for record in records}
    free = next(slot for slot in range(SLOTS) if slot not in taken)
    parts = [Record(keys[0], longest.slot, halves[0]), Record(keys[1], free, halves[1])]
    rest = [record for record in records if record is not longest]
    sizes[:] = 0
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(bucket, "wb")) for bucket in buckets]
        for record in sorted(rest + parts):
            append(files[record.key[0] * BUCKETS // 256], record)
            sizes[record.slot] += len(record.text)


def boundary_near(text: bytes, wanted: int) -> int:
    """
    Where to cut a text so that about its last `wanted` bytes come off: the end of a paragraph if one is near
    enough to leave no more than twice as much, else of a line; 0 where there is none inside.
    """
    first = len(text) - len(text.lstrip())
    nearest = 0
    for pattern in (rb"\n[ \t\r]*\n\s*", rb"\n\s*"):
        matches = (match for match in re.finditer(pattern, text) if match.start() > first)
        ends = [match.end() for match in matches if match.end() < len(text)]
        nearest = min(ends, key=lambda end: abs(len(text) - end - wanted), default=0)
        if nearest and len(text) - nearest <= 2 * wanted:
            break
    return nearest


def write_shards(
    folder: Path,
    buckets: list[Path],
    held_out: np.ndarray,
    train_bytes: int,
    shard_bytes: int,
    max_shards: int,
    tally: Counter,
) -> list[Path]:
    """Third pass: the records in the order of their keys, into equally large training shards and one of validation."""
    number = max(1, round(train_bytes / shard_bytes))
    number_to_write = number if max_shards < 0 else min(number, max_shards)
    per_shard = train_bytes / number
    val = ShardWriter(folder / "val.parquet")
    train = ShardWriter(folder / "shard_00000.parquet")
    done: list[Path] = []
    for record in (record for bucket in buckets for record in read_bucket(bucket)):
        if held_out[record.slot]:
            val.add(record.text)
        elif len(done) == number_to_write:
            tally["left_out"] += 1
        else:
            train.add(record.text)
            # The last of all takes what rounding leaves; with a limit, the last one ends like the others.
            if train.text_bytes >= per_shard and len(done) < number - 1:
                train.close()
                done.append(train.path)
                if len(done) < number_to_write:
                    train = ShardWriter(folder / f"shard_{len(done):05d}.parquet")
    if len(done) < number_to_write:
        train.close()
        done.append(train.path)
    val.close()
    last = folder / f"shard_{len(done):05d}.parquet"
    os.rename(val.path, last)
    return [*done, last]


def describe(path: Path, checksum: str | None = None) -> dict:
    """
    A shard's manifest entry, from the whole file: `file`, `rows`, `bytes`, `text_bytes`, `sha256`.
    Raises ValueError, in a few words, when it is not a parquet file with text in a `text` column.
    """
    rows = text_bytes = 0
    try:
        with pq.ParquetFile(path) as parquet:
            if "text" not in parquet.schema_arrow.names:
                raise ValueError("it has no column 'text'")
            for batch in parquet.iter_batches(batch_size=ROW_GROUP_ROWS, columns=["text"]):
                rows += batch.num_rows
                text_bytes += pc.sum(pc.binary_length(batch.column(0))).as_py() or 0
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"not a whole parquet file: {first_line(error)}") from error
    if not text_bytes:
        raise ValueError("it holds no text")
    return {
        "file": path.name,
        "rows": rows,
        "bytes": path.stat().st_size,
        "text_bytes": text_bytes,
        "sha256": checksum or sha256(path),
    }


def encode(text: str, tally: Counter) -> bytes:
    """UTF-8; half a surrogate pair (JSON can hold one) has no UTF-8 and becomes U+FFFD, counted as invalid."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        text, found = LONE_SURROGATES.subn("\ufffd", text)
        tally["invalid_bytes"] += found
        return text.encode()


def content_key(seed: int, data: bytes) -> bytes:
    """The 16-byte key of a text: its place in the shuffled order, and its identity."""
    return hashlib.blake2b(data, digest_size=16, key=str(seed).encode()).digest()


def slot_of(key: bytes) -> int:
    """The slot that decides about the split: other bits than those that order the documents."""
    return int.from_bytes(key[-2:], "little")


def append(file: BinaryIO, record: Record) -> None:
    """Add a record to an open bucket."""
    file.write(HEADER.pack(record.key, record.slot, len(record.text)))
    file.write(record.text)


def read_bucket(path: Path) -> Iterator[Record]:
    """The records of a bucket, in order."""
    with open(path, "rb") as file:
        while header := file.read(HEADER.size):
            key, slot, size = HEADER.unpack(header)
            yield Record(key, slot, file.read(size))
