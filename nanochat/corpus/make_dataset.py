"""
Any source → a data set in its place: what `python -m scripts.dataset` does.

A data set of text is built aside and put in place as a whole, or not at all. Finished shards from the hub come into
their place one by one, each verified, and are there as a data set once the manifest is. Either way the manifest comes
last, a killed process leaves nothing that looks like a data set, and the same command repeated goes on.
"""
import contextlib
import hashlib
import json
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from nanochat.corpus import sources
from nanochat.dataset import OFFLINE, REMOTE, dataset_dir, load_manifest, lock_path, shard_texts
from nanochat.corpus.download import Patience, fetch_all
from nanochat.errors import UserError, did_you_mean
from nanochat.files import locked, recover_folder, write_folder_aside, write_text
from nanochat.corpus.shards import build, describe

# Finished, shuffled shard sets on the Hugging Face hub: repository and index of the last shard, which is validation.
# They are kept as they come, so that their checksums can be verified; they are not deduplicated here.
HUB = {
    "fineweb-edu": ("karpathy/fineweb-edu-100b-shuffle", 1822),
    "climbmix": ("karpathy/climbmix-400b-shuffle", 6542),
}
PATIENCE = Patience()
SOURCES = "tinyworld, python, fineweb-edu, climbmix, hf:NAME[:CONFIG], or a folder or file of your own"


def make(
    source: str,
    name: str = "",
    num_shards: int = -1,
    seed: int = 42,
    field: str = "text",
    encoding: str = "utf-8",
    shard_mb: float = 8.0,
    workers: int = 4,
    url: str = "",
) -> dict:
    """
    Make or complete a data set, print what came of it and return its manifest. The settings are those of the command,
    see dataset.py. What is there already is kept or replaced as a whole; of two processes one works, the other waits.
    """
    if num_shards < 1 and num_shards != -1 or not 0 < shard_mb <= 1000 or workers < 1:
        raise UserError(f"{num_shards=} must be -1 or at least 1, {shard_mb=} above 0 (at most 1000) and {workers=} at least 1")
    if not (source in (*OFFLINE, *REMOTE) or source.startswith("hf:")):
        if not source or not Path(source).expanduser().exists():
            raise UserError(f"no source {source!r}, and no such path; expected {SOURCES}{did_you_mean(source, (*OFFLINE, *REMOTE))}")
        source = str(Path(source).expanduser().resolve())  # absolute: it names the same data from anywhere
    try:
        "".encode(encoding)
    except LookupError:
        raise UserError(f"encoding={encoding} is unknown; expected a name such as utf-8, gb18030, utf-16 or cp1252") from None
    name = name or default_name(source)
    check_name(name, source)
    settings = {"source": source, "num_shards": num_shards, "seed": seed, "field": field, "shard_mb": shard_mb}
    try:
        with locked(lock_path(name)):
            recover_folder(dataset_dir(name))
            started = time.monotonic()
            if source in REMOTE:
                manifest = make_from_hub(name, source, num_shards, workers, url)
            else:
                manifest = make_from_text(name, settings, encoding)
    except OSError as error:  # whatever cannot be read is a UserError already: this is about the disk we write to
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(
            f"cannot make {dataset_dir(name)}: {error.strerror or error}{where}; nothing that was there is lost:"
            " free space there or set NANOCHAT_BASE_DIR to another folder"
        ) from error
    print(summary(manifest, time.monotonic() - started))
    return manifest


def make_from_text(name: str, settings: dict, encoding: str) -> dict:
    """
    Build a data set from documents, aside, and put it in place whole. What can be told to be the same is not built
    again; files of one's own may have changed, so they always are.
    """
    source, num_shards, seed = settings["source"], settings["num_shards"], settings["seed"]
    shard_bytes = max(1, int(settings["shard_mb"] * 1e6))
    enough = -1 if num_shards < 0 else int(1.1 * num_shards * shard_bytes)  # a tenth is held out at most
    tally: Counter = Counter()
    index_of: dict[int, int] = {}  # hash of a text of the embedded corpus -> its number there
    own = False
    if source == "tinyworld":
        documents = numbered(sources.tinyworld_documents(seed, enough), index_of)
        # A sample stands for the generator: when that changes, the corpus is made anew.
        sample = "".join(text for text, _ in sources.tinyworld_documents(seed, 20_000))
        settings = settings | {"sample": hashlib.sha256(sample.encode()).hexdigest()}
    elif source == "python":
        documents = sources.python_documents(tally)
        settings = settings | {"python": sys.version}
    elif source.startswith("hf:"):
        hub_name, config = split_hf(source)
        documents = sources.hf_documents(hub_name, config, settings["field"], seed, enough)
        own = Path(hub_name).exists()
    else:
        own = True
        settings = settings | {"encoding": encoding}
        documents = sources.own_documents(Path(source), settings["field"], tally, encoding)
    with contextlib.suppress(UserError):
        manifest = load_manifest(name)
        if not own and manifest.get("settings") == settings:
            print(f"already there, made with the same settings: {dataset_dir(name)}")
            return manifest
    folder = dataset_dir(name)
    for debris in folder.parent.glob(f".{name}.tmp-*"):  # of killed builds: we hold the lock, so nobody writes there
        shutil.rmtree(debris, ignore_errors=True)
    with write_folder_aside(folder) as aside:
        shards = build(aside, watched(documents), seed, shard_bytes, num_shards, tally, source)
        manifest = manifest_of(name, settings, shards, tally)
        if source == "tinyworld":  # what is held out can be generated again, to count its entropy
            manifest["val_indices"] = [index_of[hash(text)] for text in shard_texts(aside / shards[-1]["file"])]
        write_text(aside / "manifest.json", json.dumps(manifest, indent=1))
    return manifest


def make_from_hub(name: str, source: str, num_shards: int, workers: int, url: str) -> dict:
    """Fetch finished shards into place one by one; the manifest follows when all of them are verified."""
    repository, last = HUB[source]
    url = url.rstrip("/") or f"https://huggingface.co/datasets/{repository}/resolve/main"
    indices = [*range(last if num_shards < 0 else min(num_shards, last)), last]
    files = [f"shard_{index:05d}.parquet" for index in indices]
    folder = dataset_dir(name)
    entries = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # without a manifest all are looked at anew
        for entry in json.loads((folder / "manifest.json").read_text())["shards"]:
            if (folder / entry["file"]).exists() and (folder / entry["file"]).stat().st_size == entry["bytes"]:
                entries[entry["file"]] = entry
    missing = [file for file in files if file not in entries]
    if missing:
        print(f"{name}: {len(missing)} of {len(files)} shards to fetch from {url}")
    interval = 0.5 if sys.stderr.isatty() else 15.0
    with tqdm(unit="B", unit_scale=True, mininterval=interval, disable=not missing) as bar:

        def inspect(file: Path, checksum: str) -> None:
            whole = file.name.removesuffix(".part")
            entries[whole] = describe(file, checksum) | {"file": whole}
            bar.set_description(f"{sum(file in entries for file in files)} of {len(files)} shards")

        jobs = [(f"{url}/{file}", folder / file) for file in missing]
        fetch_all(jobs, inspect, workers, PATIENCE, bar)
    settings = {"source": source, "num_shards": num_shards}
    manifest = manifest_of(name, settings, [entries[file] for file in files], Counter())
    write_text(folder / "manifest.json", json.dumps(manifest, indent=1))
    return manifest


def manifest_of(name: str, settings: dict, shards: list[dict], tally: Counter) -> dict:
    """What is known of a data set, as JSON."""
    counted = {key: tally[key] for key in ("duplicates", "empty", "invalid", "left_out")}
    totals = {"documents": sum(shard["rows"] for shard in shards), "text_bytes": sum(s["text_bytes"] for s in shards)}
    fixed = {"format": 1, "name": name, "source": settings["source"], "seed": settings.get("seed")}
    return fixed | totals | counted | {"settings": settings, "shards": shards}


def summary(manifest: dict, seconds: float) -> str:
    """What a data set holds and what was dropped on the way, in two lines."""
    val, size = manifest["shards"][-1], manifest["text_bytes"]
    return (
        f"{manifest['name']}: {manifest['documents']:,} documents, {size / 1e6:,.1f} MB of text in"
        f" {len(manifest['shards']) - 1} training shards and 1 of validation ({val['rows']:,} documents,"
        f" {val['text_bytes'] / 1e6:,.2f} MB); {seconds:.1f} s: {dataset_dir(manifest['name'])}\n"
        f"  duplicates dropped: {manifest['duplicates']:,}; empty: {manifest['empty']:,};"
        f" left out by num_shards: {manifest['left_out']:,}; invalid UTF-8 replaced: {manifest['invalid']:,}"
    )


def watched(documents: sources.Documents) -> sources.Documents:
    """The same documents, with a progress bar where a person is watching."""
    with tqdm(unit="B", unit_scale=True, desc="reading", disable=None) as bar:
        for text, kin in documents:
            bar.update(len(text))
            yield text, kin


def numbered(documents: sources.Documents, index_of: dict[int, int]) -> sources.Documents:
    """The same documents; the number of each is kept under the hash of its text."""
    for index, (text, kin) in enumerate(documents):
        index_of[hash(text)] = index
        yield text, kin


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
        there = json.loads((dataset_dir(name) / "manifest.json").read_text()).get("source")
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
        from nanochat.corpus.make_dataset import make  # here: it imports what is above, and training does without it

        print(f"data set {name!r} is not there yet, making it in {dataset_dir(name)}")
        make(name)
    load_manifest(name)
