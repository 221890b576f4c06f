"""
Text to train on. Every source gives the same form: shuffled parquet shards with a `text` column, the last shard held
out for validation, and a manifest with their SHA-256, written last (`python -m scripts.dataset`).

A data set lies in <base folder>/data/NAME. It exists exactly if its manifest exists.
"""
import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

# Arrow's own allocator reserves 1 GiB on its first read, and RLIMIT_DATA counts that as a run's used memory.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.runtime.errors import UserError, did_you_mean, first_line
from nanochat.runtime.files import base_dir

OFFLINE = ("tinyworld", "python")        # sources that every machine has
# Finished, shuffled shard sets on the Hugging Face hub: repository and index of the last shard, which is validation.
# They are stored unchanged, so their checksums can be verified; they are not deduplicated here.
REMOTE = {
    "fineweb-edu": ("karpathy/fineweb-edu-100b-shuffle", 1822),
    "climbmix": ("karpathy/climbmix-400b-shuffle", 6542),
}
NAMED = (*OFFLINE, *REMOTE)


def dataset_dir(name: str) -> Path:
    """Where a data set lies, or would."""
    return base_dir() / "data" / name


def load_manifest(name: str) -> dict:
    """The manifest of a data set whose shards are all there. UserError, with advice, if anything is missing."""
    folder = dataset_dir(name)
    path = folder / "manifest.json"
    if not path.exists():
        there = [path.parent.name for path in folder.parent.glob("[!.]*/manifest.json")]
        # All shards of a data set of the hub are hundreds of GB.
        more = " --num_shards=8" if name in REMOTE else ""
        hint = more + did_you_mean(name, [*NAMED, *there])
        raise UserError(f"no data set {name!r} in {folder.parent}; make it: python -m scripts.dataset "
                        f"--source={name if name in NAMED else '…'} --name={name}{hint}")
    manifest = json.loads(path.read_bytes())
    for shard in manifest["shards"]:
        file = folder / shard["file"]
        # Sizes only: hashing gigabytes at every start would take minutes. Reading a damaged page raises an error.
        if not file.exists() or file.stat().st_size != shard["bytes"]:
            raise UserError(f"{file} is missing or does not have the {shard['bytes']} bytes that the manifest says; "
                            f"delete it and make the data set again, with these settings: {manifest['settings']}")
    return manifest


def split_shards(name: str, split: str) -> list[dict]:
    """The manifest's entries for a split's shards: `train` is all but the last, `val` the last."""
    shards = load_manifest(name)["shards"]
    return shards[:-1] if split == "train" else shards[-1:]


def shard_texts(path: Path) -> Iterator[str]:
    """The documents of a shard in order, one row group in memory at a time. UserError if the file is damaged."""
    try:
        with pq.ParquetFile(path) as parquet:
            for group in range(parquet.num_row_groups):
                for text in parquet.read_row_group(group, ["text"]).column(0).to_pylist():
                    # The hub's shards contain some nulls.
                    yield text or ""
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}); delete it and make the data set again "
                        "(python -m scripts.dataset --source=…)") from error


def iter_texts(name: str, split: str) -> Iterator[str]:
    """All documents of a split, in the order of the shards."""
    for shard in split_shards(name, split):
        yield from shard_texts(dataset_dir(name) / shard["file"])


def fingerprint(name: str) -> str:
    """SHA-256 over the shards' SHA-256: equal exactly if the data is equal. Resumed runs compare it."""
    sums = [shard["sha256"] for shard in load_manifest(name)["shards"]]
    return hashlib.sha256("".join(sums).encode()).hexdigest()


# ---- A run's data sets, from --data: "notes", or "climbmix*0.9, notes*0.1"

def data_shares(data: str) -> dict[str, float]:
    """
    {data set: its share of the tokens} in the order of the setting; the shares add up to 1. Weights are relative; a
    missing weight is 1. UserError for an invalid setting.
    """
    weights: dict[str, float] = {}
    for part in data.split(","):
        name, star, weight = (piece.strip() for piece in part.partition("*"))
        try:
            number = float(weight) if star else 1.0
        except ValueError:
            number = math.nan
        if not name or name in weights or not 0 < number < math.inf:
            raise UserError(f"data={data!r}: {part.strip()!r} is not expected there; expected data sets, each once, "
                            'with positive weights: "climbmix*0.9, notes*0.1"')
        weights[name] = number
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def main_data(data: str) -> str:
    """The first data set: the run uses its tokenizer and its validation split."""
    return next(iter(data_shares(data)))
