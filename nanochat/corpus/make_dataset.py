"""
Any source → a data set in its place: what `python -m scripts.dataset` does.

A data set of text is built aside and put in place as a whole, or not at all. Finished shards from the hub come into
their place one by one, each verified, and are a data set once the manifest is there. Either way the manifest comes
last, a killed process leaves nothing that looks like a data set, and the same command repeated goes on.
"""
import contextlib
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from nanochat.corpus import sources
from nanochat.corpus.download import fetch_shard
from nanochat.corpus.shards import build
from nanochat.data.dataset import OFFLINE, REMOTE, dataset_dir, fingerprint, load_manifest, shard_texts
from nanochat.runtime.errors import UserError, did_you_mean
from nanochat.runtime.files import locked, recover_folder, write_folder_aside, write_text
from nanochat.runtime.progress import progress
from nanochat.training.records import models_trained_with

# Finished, shuffled shard sets on the Hugging Face hub: repository and index of the last shard, which is validation.
# They are kept as they come, so that their checksums can be verified; they are not deduplicated here.
HUB = {
    "fineweb-edu": ("karpathy/fineweb-edu-100b-shuffle", 1822),
    "climbmix": ("karpathy/climbmix-400b-shuffle", 6542),
}
SOURCES = "tinyworld, python, fineweb-edu, climbmix, hf:NAME[:CONFIG], or a folder or file of your own"


def make(source: str, name: str = "", num_shards: int = -1, seed: int = 42, field: str = "text",
         encoding: str = "utf-8", shard_mb: float = 8.0, workers: int = 4) -> dict:
    """
    Make or complete a data set, print what came of it and return its manifest. The settings are those of the command,
    scripts/dataset.py. What is there is kept or replaced as a whole; of two processes one works, the other waits.
    """
    if not (source in (*OFFLINE, *REMOTE) or source.startswith("hf:")):
        if not source or not Path(source).expanduser().exists():
            hint = did_you_mean(source, (*OFFLINE, *REMOTE))
            raise UserError(f"no source {source!r}, and no such path; expected {SOURCES}{hint}")
        source = str(Path(source).expanduser().resolve())  # absolute: it names the same data from anywhere
    try:
        "".encode(encoding)
    except LookupError:
        expected = "expected a name such as utf-8, gb18030, utf-16 or cp1252"
        raise UserError(f"encoding={encoding} is unknown; {expected}") from None
    name = name or default_name(source)
    check_name(name, source)
    folder, started = dataset_dir(name), time.monotonic()
    print(f"making data set {name!r} in {folder}", flush=True)  # it can take minutes
    settings = {"source": source, "num_shards": num_shards, "seed": seed, "field": field, "shard_mb": shard_mb}
    try:
        with locked(folder.with_name(f".{name}.lock")) as lock:
            recover_folder(folder)
            try:
                if source in REMOTE:
                    manifest = make_from_hub(name, source, num_shards, workers)
                else:
                    manifest = make_from_text(name, settings, encoding)
            finally:
                if not folder.exists():  # a source that failed leaves nothing
                    os.remove(lock.name)
    except OSError as error:  # whatever cannot be read is a UserError already: this is about the disk we write to
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(
            f"cannot make {folder}: {error.strerror or error}{where}; nothing that was there is lost:"
            " free space there or set NANOCHAT_BASE_DIR to another folder"
        ) from error
    val, size = manifest["shards"][-1], manifest["text_bytes"]
    print(
        f"{name}: {manifest['documents']:,} documents, {size / 1e6:,.1f} MB of text in {len(manifest['shards']) - 1}"
        f" training shards and 1 of validation ({val['rows']:,} documents, {val['text_bytes'] / 1e6:,.2f} MB);"
        f" {time.monotonic() - started:.1f} s: {folder}\n"
        f"  duplicates dropped: {manifest['duplicates']:,}; empty: {manifest['empty']:,};"
        f" left out by num_shards: {manifest['left_out']:,}; invalid UTF-8 replaced: {manifest['invalid']:,}"
    )
    return manifest


def make_from_text(name: str, settings: dict, encoding: str) -> dict:
    """
    Build a data set from documents, aside, and put it in place whole. What can be told to be the same is not built
    again; files of one's own may have changed, so they always are.
    """
    source, num_shards, seed, field = (settings[key] for key in ("source", "num_shards", "seed", "field"))
    shard_bytes = max(1, int(settings["shard_mb"] * 1e6))
    enough = -1 if num_shards < 0 else int(1.1 * num_shards * shard_bytes)  # a tenth is held out at most
    tally: Counter = Counter()
    own = False
    if source == "tinyworld":
        documents = sources.tinyworld_documents(seed, enough)
        # A sample stands for the generator: when that changes, the corpus is made anew.
        sample = "".join(text for text, _ in sources.tinyworld_documents(seed, 20_000))
        settings = settings | {"sample": hashlib.sha256(sample.encode()).hexdigest()}
    elif source == "python":
        documents = sources.python_documents(tally)
        settings = settings | {"python": sys.version}
    elif source.startswith("hf:"):
        hub_name, config = split_hf(source)
        documents = sources.hf_documents(hub_name, config, field, seed, enough)
        own = Path(hub_name).exists()
    else:
        own = True
        settings = settings | {"encoding": encoding}
        documents = sources.own_documents(Path(source), field, tally, encoding)
    folder, there = dataset_dir(name), None
    with contextlib.suppress(UserError):  # not there, or not whole
        there = load_manifest(name)
    if there and not own and there.get("settings") == settings:
        print(f"already there, made with the same settings: {folder}")
        return there
    with write_folder_aside(folder) as aside:
        documents = progress(documents, "reading", "documents")
        if source == "tinyworld":
            documents = list(documents)
        shards = build(aside, documents, seed, shard_bytes, num_shards, tally, source)
        if there and there["shards"] != shards and (models := models_trained_with(fingerprint(name))):
            documents_now = sum(shard["rows"] for shard in shards)
            raise UserError(f"data set {name!r} would change (it has {there['documents']:,} documents, now there are "
                            f"{documents_now:,}), and {models} could not be resumed without it; choose another name "
                            f"with --name=…, or delete {folder}")
        more = {}
        if source == "tinyworld":  # the validation documents can be generated again, to count their entropy
            index_of = {text: index for index, (text, _) in enumerate(documents)}
            more["val_indices"] = [index_of[text] for text in shard_texts(aside / shards[-1]["file"])]
        return write_manifest(aside, name, settings, shards, tally, **more)


def make_from_hub(name: str, source: str, num_shards: int, workers: int) -> dict:
    """Fetch finished shards into place one by one; the manifest follows when all of them are verified."""
    repository, last = HUB[source]
    indices = [*range(last if num_shards < 0 else min(num_shards, last)), last]
    files = [f"shard_{index:05d}.parquet" for index in indices]
    folder = dataset_dir(name)
    entries = {}
    # Without a manifest, or when a shard of it is missing, all of them are compared with the hub again.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        listed = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["shards"]
        entries = {e["file"]: e for e in listed if (folder / e["file"]).stat().st_size == e["bytes"]}
    missing = [file for file in files if file not in entries]
    if missing:
        print(f"{name}: {len(missing)} of {len(files)} shards to fetch from {repository}")
    stop = threading.Event()
    with (
        ThreadPoolExecutor(workers) as pool,
        progress(None, "fetching", "shards", len(missing)) as bar,
    ):
        jobs = [pool.submit(fetch_shard, repository, file, folder, stop) for file in missing]
        try:
            for job in as_completed(jobs):
                entry = job.result()
                entries[entry["file"]] = entry
                bar.update()
        finally:  # after an error, or an interrupt from the keyboard, the others end as well
            stop.set()
            pool.shutdown(cancel_futures=True)
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub library's notes
    settings = {"source": source, "num_shards": num_shards}
    return write_manifest(folder, name, settings, [entries[file] for file in files], Counter())


def write_manifest(folder: Path, name: str, settings: dict, shards: list[dict], tally: Counter, **more) -> dict:
    """Write and return what is known of a data set, as JSON."""
    manifest = {
        "format": 1, "name": name, "source": settings["source"], "seed": settings.get("seed"),
        "documents": sum(shard["rows"] for shard in shards), "text_bytes": sum(shard["text_bytes"] for shard in shards),
        **{key: tally[key] for key in ("duplicates", "empty", "invalid", "left_out")},
        "settings": settings, "shards": shards, **more,
    }
    write_text(folder / "manifest.json", json.dumps(manifest, indent=1))
    return manifest


def default_name(source: str) -> str:
    """The data set's name where none was given: the source's own, without folders and suffixes."""
    if source.startswith("hf:"):
        return Path(split_hf(source)[0]).name
    if source in (*OFFLINE, *REMOTE):
        return source
    path = Path(source).expanduser().resolve()
    return path.name if path.is_dir() else sources.KIND.sub("", path.name)


def check_name(name: str, source: str) -> None:
    """Names have to be plain folder names, and nothing may take the place of data of another source."""
    if not name or name.startswith(".") or "/" in name or "\\" in name:
        raise UserError(f"{name!r} cannot name a data set: it is the name of its folder; choose one with --name=…")
    if name in (*OFFLINE, *REMOTE) and name != source:
        raise UserError(f"the name {name!r} belongs to the source of that name; choose another with --name=…")
    with contextlib.suppress(OSError, ValueError, AttributeError):  # what is not there or not readable may be replaced
        there = json.loads((dataset_dir(name) / "manifest.json").read_text(encoding="utf-8")).get("source")
        if there != source:
            raise UserError(
                f"data set {name!r} was made from {there!r}; choose another name for {source!r} with --name=…,"
                f" or delete {dataset_dir(name)}"
            )


def split_hf(source: str) -> tuple[str, str]:
    """(name, config) of hf:NAME[:CONFIG]; config may be ""."""
    name, _, config = source.removeprefix("hf:").partition(":")
    if not name:
        raise UserError(f"{source!r} names no data set; expected hf:NAME[:CONFIG]")
    return name, config


def ensure_dataset(name: str) -> None:
    """Make `tinyworld` or `python` if it is not there; any other data set has to be there, as in `load_manifest`."""
    if name in OFFLINE and not (dataset_dir(name) / "manifest.json").exists():
        make(name)
    load_manifest(name)
