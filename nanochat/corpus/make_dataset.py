"""
Any source → a data set in its place: what `python -m scripts.dataset` does.

A data set made from text is built aside and put in place as a whole, or not at all. Finished shards from the hub are
put in place one by one, each verified, and become a data set with the manifest. Either way the manifest comes
last, a killed process leaves nothing that looks like a data set, and the same command repeated goes on.
"""
import contextlib
import json
import shutil
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from nanochat.corpus import sources
from nanochat.corpus.download import fetch_shard
from nanochat.corpus.shards import build
from nanochat.corpus.tinyworld import PROMPTS, entropy_floor
from nanochat.data.shard_reader import NAMED, REMOTE, dataset_dir, load_manifest, shard_texts
from nanochat.library.own_files import DATA_FILE, own_documents, own_path
from nanochat.runtime.errors import UserError, did_you_mean
from nanochat.runtime.files import locked, recover_folder, write_folder_aside, write_text
from nanochat.runtime.progress import progress

DOWNLOADS = 4   # files at a time
SOURCES = "tinyworld, python, fineweb-edu, climbmix, hf:NAME[:CONFIG], or a folder or file of your own"


def make(source: str, name: str = "", num_shards: int = -1, seed: int = 42, field: str = "text",
         encoding: str = "utf-8", shard_mb: float = 8.0) -> dict:
    """
    Make or complete a data set and return its manifest. The settings are the command's, see scripts/dataset.py. An
    existing data set is replaced as a whole; if there are two processes, one works and the other waits.
    """
    if source not in NAMED and not source.startswith("hf:"):
        source = str(own_path(source, f"{SOURCES}{did_you_mean(source, NAMED)}"))
    if not name:
        # The source's own, without folders and suffixes.
        path = source.split(":")[1] if source.startswith("hf:") else source
        name = DATA_FILE.sub("", Path(path).name)
    check_name(name, source)
    folder = dataset_dir(name)
    # Printed at once: reading can take minutes.
    print(f"making data set {name!r} in {folder}", flush=True)
    with locked(folder.with_name(f".{name}.lock")):
        recover_folder(folder)
        settings = {"source": source, "num_shards": num_shards}
        if source in REMOTE:
            return make_from_hub(name, settings)
        settings |= {"seed": seed, "field": field, "encoding": encoding, "shard_mb": shard_mb}
        return make_from_text(name, settings)


def make_from_text(name: str, settings: dict) -> dict:
    """Build a data set from documents, aside, and put it in place whole."""
    source = settings["source"]
    seed = settings["seed"]
    shard_bytes = int(settings["shard_mb"] * 1e6)
    max_shards = settings["num_shards"] if settings["num_shards"] > 0 else sys.maxsize
    # Bytes of text to read: at most a tenth is held out for validation.
    enough = int(1.1 * max_shards * shard_bytes)
    documents: Iterable[tuple[str, str]]
    if source == "tinyworld":
        # Kept in memory, because they are read again below.
        documents = list(sources.tinyworld_documents(seed, enough))
    elif source == "python":
        documents = sources.python_documents()
        settings["python"] = sys.version
    elif source.startswith("hf:"):
        hub_name, _, config = source.removeprefix("hf:").partition(":")
        documents = sources.hf_documents(hub_name, config, settings["field"], seed, enough)
    else:
        documents = own_documents(Path(source), settings["encoding"], settings["field"])
    with write_folder_aside(dataset_dir(name)) as aside:
        read = progress(documents, "reading", "documents")
        shards, duplicates = build(aside, read, seed, shard_bytes, max_shards)
        more: dict[str, Any] = {}
        if source == "tinyworld":
            index_of = {text: index for index, (text, _) in enumerate(documents)}
            held_out = [index_of[text] for text in shard_texts(aside / shards[-1]["file"])]
            more = {"floor": entropy_floor(seed, held_out), "prompts": list(PROMPTS)}
        return write_manifest(aside, name, settings, shards, duplicates, **more)


def make_from_hub(name: str, settings: dict) -> dict:
    """Fetch finished shards into place one by one; the manifest follows when all of them are verified."""
    repository, last = REMOTE[settings["source"]]
    number = last if settings["num_shards"] < 0 else min(settings["num_shards"], last)
    files = [f"shard_{index:05d}.parquet" for index in [*range(number), last]]
    folder = dataset_dir(name)
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        # After an error `map` starts no further file.
        fetched = pool.map(fetch_shard, repeat(repository), files, repeat(folder))
        shards = list(progress(fetched, "fetching", "shards", len(files)))
    # The hub's library keeps notes in there.
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return write_manifest(folder, name, settings, shards)


def write_manifest(folder: Path, name: str, settings: dict, shards: list[dict], duplicates: int = 0, **more) -> dict:
    """Write and return the manifest."""
    manifest = {
        "format": 1, "name": name, "source": settings["source"], "seed": settings.get("seed"),
        "documents": sum(shard["rows"] for shard in shards), "text_bytes": sum(shard["text_bytes"] for shard in shards),
        "duplicates": duplicates, "settings": settings, "shards": shards, **more,
    }
    write_text(folder / "manifest.json", json.dumps(manifest, indent=1))
    return manifest


def check_name(name: str, source: str) -> None:
    """Names must be plain folder names, and no data set may replace one from another source."""
    if not name or name.startswith(".") or set("/,*") & set(name):
        raise UserError(f"{name!r} cannot name a data set: it is the name of its folder; choose one with --name=…")
    there = name if name in NAMED else source
    with contextlib.suppress(UserError):
        # Suppressed: a damaged data set may be replaced.
        there = load_manifest(name)["source"]
    if there != source:
        raise UserError(f"data set {name!r} belongs to {there!r}; choose another name for {source!r} with --name=…, "
                        f"or delete {dataset_dir(name)}")
