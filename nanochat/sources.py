"""
Where text comes from. A source is an iterator of (text, kin): documents of equal `kin` are never separated by the
split between training and validation; mostly a document is its own kin.

    tinyworld            the embedded corpus, generated
    python               the standard library of the running interpreter and the reference behind its `help()`
    FOLDER or FILE       one's own text in any language: .txt .md .jsonl .parquet, and .gz or .zst of the first three
    hf:NAME[:CONFIG]     any text data set that the `datasets` package can load, from the hub or from a folder

(fineweb-edu and climbmix are fetched as finished shards instead, see download.py.)
"""
import io
import itertools
import json
import os
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat import tinyworld
from nanochat.dataset import first_line
from nanochat.errors import UserError

TINYWORLD_BYTES = 24_000_000   # text in all: about 75,000 documents, a few seconds to make
PIECE_BYTES = 64 << 10         # a text file longer than this becomes several documents
SHUFFLE_BUFFER = 10_000        # rows of a hub data set that are mixed before num_shards cuts it off
KIND = re.compile(r"\.(txt|md|jsonl|parquet)(\.gz|\.zst)?$", re.IGNORECASE)
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}

Documents = Iterator[tuple[str, str]]


def tinyworld_documents(seed: int, text_bytes: int = -1) -> Documents:
    """Documents 0, 1, … of the embedded corpus until they add up to text_bytes (-1: TINYWORLD_BYTES)."""
    left = TINYWORLD_BYTES if text_bytes < 0 else text_bytes
    for index in itertools.count():
        if left <= 0:
            return
        text = tinyworld.document(seed, index)
        left -= len(text.encode())
        yield text, text


def python_documents(tally: Counter) -> Documents:
    """The standard library's sources (all pieces of a file are kin), and the language reference by topic."""
    for path in files_below(Path(sysconfig.get_path("stdlib"))):
        if path.suffix == ".py" and not {"site-packages", "dist-packages", "pydoc_data"} & set(path.parts):
            data = path.read_bytes()
            try:
                encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
                source = data.decode(encoding)
            except (SyntaxError, UnicodeDecodeError, LookupError):  # tests of the interpreter declare nonsense
                source = decode(data, tally)
            for piece in pieces(io.BytesIO(source.encode()), PIECE_BYTES):
                yield piece.decode(), source
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return
    yield from ((page, page) for page in topics.values())


# ---- Files of one's own

def own_documents(path: Path, field: str, tally: Counter) -> Documents:
    """
    The documents of a file, or of a folder's usable files: a .txt or .md file is one, cut at blank lines where it is
    longer than PIECE_BYTES; so is a line of .jsonl and a row of .parquet, from its `field`.
    Bytes that are not UTF-8 become U+FFFD and are counted; anything else that is wrong is a UserError with its place.
    """
    files = [file for file in ([path] if path.is_file() else files_below(path)) if KIND.search(file.name)]
    if not files:
        raise UserError(f"no documents in {path}: expected .txt .md .jsonl .parquet (or .gz/.zst of them)")
    # A single short text has to become several documents as well, or there is nothing to hold out.
    most = PIECE_BYTES if len(files) > 1 else max(64, min(PIECE_BYTES, files[0].stat().st_size // 8))
    for file in files:
        try:
            kind = KIND.search(file.name)[1].lower()
            if kind == "parquet":
                texts = parquet_texts(file, field, tally)
            elif kind == "jsonl":
                texts = jsonl_texts(file, field, tally)
            else:
                texts = plain_texts(file, most, tally)
            yield from ((text, text) for text in texts)
        except OSError as error:  # of a .gz or .zst as well, where it is cut or damaged
            raise UserError(f"cannot read {file}: {error.strerror or first_line(error)}") from error


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder that are not hidden, in a fixed order."""
    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def open_bytes(path: Path) -> BinaryIO:
    """A file's bytes, decompressed."""
    codec = COMPRESSION.get(path.suffix.lower())
    return io.BufferedReader(pa.input_stream(str(path), compression=codec)) if codec else open(path, "rb")


def plain_texts(path: Path, most: int, tally: Counter) -> Iterator[str]:
    """A text file, in pieces of at most `most` bytes."""
    with open_bytes(path) as file:
        for piece in pieces(file, most):
            yield decode(piece, tally)


def pieces(file: BinaryIO, most: int) -> Iterator[bytes]:
    """
    A text in pieces of at most `most` bytes, each cut at the last gap between chapters (or Python's top-level
    definitions) that fits, else between paragraphs, lines, words, characters.
    """
    rest = file.read(most + 1)
    while len(rest) > most:
        for mark in (b"\n\n\n", b"\n\n", b"\n\r\n", b"\n", b" "):
            if (found := rest.rfind(mark, most // 4, most)) >= 0:
                end = found + len(mark)
                break
        else:
            end = next(end for end in range(most, 0, -1) if rest[end] & 0xC0 != 0x80 or end == most - 3)
        yield rest[:end]
        rest = rest[end:] + file.read(end)
    yield rest


def jsonl_texts(path: Path, field: str, tally: Counter) -> Iterator[str]:
    """The field of every line; blank lines are passed over."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(decode(line, tally))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise UserError(f"{place}: expected an object with a field {field!r}, found {type(row).__name__}")
            yield text_of(row, field, place)


def parquet_texts(path: Path, field: str, tally: Counter) -> Iterator[str]:
    """The field of every row; null is an empty document."""
    try:
        with pq.ParquetFile(path) as parquet:
            schema = parquet.schema_arrow
            if field not in schema.names:
                raise UserError(missing(str(path), field, schema.names))
            for batch in parquet.iter_batches(batch_size=256, columns=[field]):
                try:
                    column = batch.column(0).cast(pa.large_binary())  # parquet does not check that text is UTF-8
                except pa.ArrowNotImplementedError:
                    held = schema.field(field).type
                    raise UserError(f"{path}: field {field!r} holds {held}, expected strings") from None
                yield from (decode(data or b"", tally) for data in column.to_pylist())
    except pa.ArrowException as error:
        raise UserError(f"{path}: not a whole parquet file: {first_line(error)}") from error


# ---- The `datasets` package

def hf_documents(name: str, config: str, field: str, seed: int, text_bytes: int) -> Documents:
    """
    The rows of a Hugging Face data set's train split (or of its only one), streamed; name may be a local folder.
    text_bytes: stop after that much text, -1 for all of it. What is taken is mixed by a bounded shuffle buffer.
    """
    try:
        import datasets
    except ImportError:
        raise UserError("hf: sources need the `datasets` package: pip install datasets") from None
    left = text_bytes
    try:
        splits = datasets.load_dataset(name, config or None, streaming=True)
        stream = splits["train" if "train" in splits else next(iter(splits))]
        for number, row in enumerate(stream.shuffle(seed=seed % 2**32, buffer_size=SHUFFLE_BUFFER)):
            text = text_of(row, field, f"hf:{name}, row {number}")
            left -= len(text)  # characters: near enough, and it must not cost an encoding
            yield text, text
            if text_bytes >= 0 and left <= 0:
                return
    except (UserError, GeneratorExit):
        raise
    except Exception as error:  # the package raises all kinds: no such set, no network, wrong config, damaged file
        raise UserError(f"hf:{name}: {type(error).__name__}: {first_line(error)}") from error


# ---- Shared

def text_of(row: dict, field: str, place: str) -> str:
    """The text in a row's field; null is empty. UserError, naming the place, where there is none."""
    if field not in row:
        raise UserError(missing(place, field, row))
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise UserError(f"{place}: field {field!r} holds {type(text).__name__}, expected a string")
    return text or ""


def missing(place: str, field: str, there: Iterable[str]) -> str:
    """What to say of a field that is not there."""
    names = ", ".join(map(str, there))
    return f"{place}: no field {field!r}; there is: {names or 'nothing'} (choose with --field=…)"


def decode(data: bytes, tally: Counter) -> str:
    """UTF-8 to text without a byte order mark; what is invalid becomes U+FFFD, and these are counted."""
    text = data.decode(errors="replace").removeprefix("\ufeff")
    tally["invalid"] += text.count("\ufffd")
    return text
