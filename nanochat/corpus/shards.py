"""
Documents in, parquet shards out: shuffled, without duplicates, the last shard held out.

Every document gets a key, the hash of the seed and its text. Documents are written in the order of their keys,
and this one decision gives a data set all that it needs:

    shuffled          the order of hashes is a random order, a new one for each seed
    no duplicates     equal texts have equal keys, and only the first is kept
    reproducible      the result depends on the texts and the seed, not on the order they were found in
    held out          validation is chosen by key as well, so no text can be in both splits
    larger than RAM   a key's first bits name a bucket on disk; memory holds the keys and one bucket at a time

Documents that belong together (the pieces of one file) share one `kin` string and are held out, or not, as a whole.
"""
import contextlib
import hashlib
import pickle
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nanochat.runtime.errors import UserError, first_line
from nanochat.runtime.files import sha256

BUCKETS = 64                 # a bucket must fit in memory: data may be about 64 times as large as memory
SLOTS = 1 << 16              # groups of kin; some groups are held out
VAL_SHARE = 0.02             # of the text, but at least VAL_BYTES if that is less than a tenth of the text
VAL_BYTES = 500_000


def build(
    folder: Path, documents: Iterable[tuple[str, str]], seed: int, shard_bytes: int, max_shards: int
) -> tuple[list[dict], int]:
    """
    Write (text, kin) documents as `shard_00000.parquet`, … into an empty folder; the last shard is validation.

    shard_bytes: text per training shard, roughly; the shards are made equally large.
    max_shards: most training shards to write; the first N do not depend on how many follow.
    Returns the manifest's entry of each shard, and how many duplicates were left out. Raises UserError if there is too
    little text for two shards.
    """
    buckets = [folder / f"bucket_{i:02d}" for i in range(BUCKETS)]
    sizes, duplicates = spool(buckets, documents, seed)
    total = int(sizes.sum())
    if np.count_nonzero(sizes) < 2:
        raise UserError(
            f"too little text: {total} bytes; there must be at least two different documents, one to train on and one "
            "to validate on"
        )
    held_out = choose_held_out(sizes, min(total, max_shards * shard_bytes), shard_bytes)
    paths = write_shards(folder, buckets, held_out, int(sizes[~held_out].sum()), shard_bytes, max_shards)
    for bucket in buckets:
        bucket.unlink()
    return [describe(path, sha256(path)) for path in paths], duplicates


def spool(buckets: list[Path], documents: Iterable[tuple[str, str]], seed: int) -> tuple[np.ndarray, int]:
    """First pass: write every new document into its key's bucket. Returns each slot's bytes of text, and duplicates."""
    duplicates = 0
    sizes = np.zeros(SLOTS, int)
    # About 100 bytes per document: 10 million documents take a gigabyte.
    seen: set[bytes] = set()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(bucket, "wb")) for bucket in buckets]
        for text, kin in documents:
            if not text.strip():
                continue
            # Half a surrogate pair, which JSON can contain, becomes "?".
            data = text.encode(errors="replace")
            key = content_key(seed, data)
            if key in seen:
                duplicates += 1
                continue
            seen.add(key)
            # The slot and the order of the documents come from different bits.
            kin_key = key if kin is text else content_key(seed, kin.encode(errors="replace"))
            slot = int.from_bytes(kin_key[-2:], "little")
            sizes[slot] += len(data)
            files[key[0] * BUCKETS // 256].write(pickle.dumps((key, slot, data)))
    return sizes, duplicates


def content_key(seed: int, data: bytes) -> bytes:
    """The 16-byte key of a text: its place in the shuffled order, and its identity."""
    return hashlib.blake2b(data, digest_size=16, key=str(seed).encode()).digest()


def choose_held_out(sizes: np.ndarray, total: int, shard_bytes: int) -> np.ndarray:
    """
    The slots to hold out of `total` bytes, as a mask: see VAL_SHARE; about a training shard at most. Slots are taken
    from the top down until there is enough, skipping slots that are too large; if all are, the smallest.
    """
    wanted = min(shard_bytes, max(total * VAL_SHARE, min(VAL_BYTES, total / 10)))
    held_out = np.zeros(SLOTS, bool)
    got = 0
    slots = np.flatnonzero(sizes)
    for slot in slots[::-1]:
        if got < wanted and got + sizes[slot] <= 1.5 * wanted:
            held_out[slot] = True
            got += sizes[slot]
    if not got:
        held_out[slots[sizes[slots].argmin()]] = True
    return held_out


def write_shards(folder: Path, buckets: list[Path], held_out: np.ndarray, train_bytes: int, shard_bytes: int,
                 max_shards: int) -> list[Path]:
    """Second pass: write the records, in key order, into equally large training shards and one validation shard."""
    number = max(1, round(train_bytes / shard_bytes))
    paths: list[Path] = []
    val: list[bytes] = []
    train: list[bytes] = []
    size = 0
    for slot, text in chain.from_iterable(map(read_bucket, buckets)):
        if held_out[slot]:
            val.append(text)
        elif len(paths) < min(number, max_shards):
            train.append(text)
            size += len(text)
            # The very last shard takes what rounding leaves; under a limit, the last one ends like the others.
            if size >= train_bytes / number and len(paths) < number - 1:
                paths.append(write_shard(folder, len(paths), train))
                train, size = [], 0
    for rest in filter(None, (train, val)):
        paths.append(write_shard(folder, len(paths), rest))
    return paths


def read_bucket(path: Path) -> list[tuple[int, bytes]]:
    """The (slot, text) of a bucket's documents, in the order of their keys."""
    records = []
    with open(path, "rb") as file, contextlib.suppress(EOFError):
        while True:
            records.append(pickle.load(file))
    return [(slot, text) for _, slot, text in sorted(records)]


def write_shard(folder: Path, index: int, texts: list[bytes]) -> Path:
    """One parquet shard of UTF-8 texts."""
    path = folder / f"shard_{index:05d}.parquet"
    table = pa.table({"text": pa.array(texts, pa.string())})
    # Statistics and dictionaries of free text only add bytes.
    pq.write_table(table, path, row_group_size=1024, compression="zstd", use_dictionary=False, write_statistics=False)
    return path


def describe(path: Path, checksum: str) -> dict:
    """
    A shard's manifest entry, from the whole file and its SHA-256: `file`, `rows`, `bytes`, `text_bytes`, `sha256`.
    Raises ValueError, in a few words, if it is not a parquet file with text in a `text` column.
    """
    rows = text_bytes = 0
    try:
        with pq.ParquetFile(path) as parquet:
            for batch in parquet.iter_batches(batch_size=1024, columns=["text"]):
                rows += batch.num_rows
                text_bytes += pc.sum(pc.binary_length(batch["text"])).as_py() or 0
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ValueError(f"not a whole parquet file with a column 'text': {first_line(error)}") from None
    return {"file": path.name, "rows": rows, "bytes": path.stat().st_size, "text_bytes": text_bytes,
            "sha256": checksum}
