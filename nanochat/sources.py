"""
Where text comes from. A source is an iterator of (text, kin): documents of equal `kin` are never separated by the
split between training and validation; mostly a document is its own kin.

    tinyworld            the embedded corpus, generated
    python               the standard library of the running interpreter, see python_corpus.py
    FOLDER or FILE[,…]   one's own text in any language: .txt .md .jsonl .parquet, and .gz or .zst of the first three
    hf:NAME[:CONFIG]     any text data set that the `datasets` package can load, from the hub or from a folder

(fineweb-edu and climbmix are fetched as finished shards instead, see download.py.)
"""
import io
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat import python_corpus, tinyworld
from nanochat.dataset import first_line
from nanochat.errors import UserError

TINYWORLD_BYTES = 24_000_000   # text in all: about 75,000 documents, a few seconds to make
PIECE_BYTES = 64 << 10         # a text file longer than this becomes several documents
SHUFFLE_BUFFER = 10_000        # rows of a hub data set that are mixed before num_shards cuts it off
SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
EXPECTED = "expected .txt .md .jsonl .parquet (or .gz/.zst of them)"

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
    """The sources and the reference documentation of the running interpreter's standard library."""
    return python_corpus.documents(PIECE_BYTES, tally)


# ---- Files of one's own

def own_paths(source: str) -> list[Path]:
    """The absolute path that a source names, or the several between its commas."""
    whole = Path(source).expanduser()
    parts = [whole] if whole.exists() or "," not in source else [Path(part).expanduser() for part in source.split(",")]
    return [part.resolve() for part in parts]


def own_files(source: str) -> list[Path]:
    """The usable files of a folder (recursively, nothing hidden), of a file, or of several separated by commas."""
    files: list[Path] = []
    for path in own_paths(source):
        if not path.exists():
            raise UserError(f"no such file or folder: {path}")
        usable = [file for file in ([path] if path.is_file() else walk(path)) if kind_of(file)]
        if not usable:
            raise UserError(f"no documents in {path}: {EXPECTED}")
        files += usable
    return files


def walk(folder: Path) -> Iterator[Path]:
    """All files below a folder that are not hidden, in a fixed order."""
    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def kind_of(path: Path) -> str:
    """`.txt`, `.md`, `.jsonl` or `.parquet`, whatever it is compressed with; "" for other files."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSION:
        suffixes.pop()
        return suffixes[-1] if suffixes and suffixes[-1] in SUFFIXES[:3] else ""
    return suffixes[-1] if suffixes and suffixes[-1] in SUFFIXES else ""


def own_documents(source: str, field: str, tally: Counter) -> Documents:
    """
    The documents of one's own files: a .txt or .md file is one, cut at blank lines where it is longer than
    PIECE_BYTES; so is a line of .jsonl and a row of .parquet, from its `field`.
    Bytes that are not UTF-8 become U+FFFD and are counted; anything else that is wrong is a UserError with its place.
    """
    for path in own_files(source):
        try:
            if kind_of(path) == ".parquet":
                texts = parquet_texts(path, field, tally)
            elif kind_of(path) == ".jsonl":
                texts = jsonl_texts(path, field, tally)
            else:
                texts = plain_texts(path, tally)
            yield from ((text, text) for text in texts)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or first_line(error)}") from error


def open_bytes(path: Path) -> io.BufferedReader:
    """A file's bytes, decompressed. A truncated or damaged .gz or .zst raises OSError at the place of the damage."""
    codec = COMPRESSION.get(path.suffix.lower())
    if codec is None:
        return open(path, "rb")
    return io.BufferedReader(pa.input_stream(str(path), compression=codec))


def plain_texts(path: Path, tally: Counter) -> Iterator[str]:
    """A text file, in pieces of at most PIECE_BYTES."""
    with open_bytes(path) as file:
        rest, first = b"", True
        while block := file.read(16 * PIECE_BYTES):
            rest += block.removeprefix(b"\xef\xbb\xbf") if first else block
            first = False
            while len(rest) > PIECE_BYTES:
                end = cut(rest, PIECE_BYTES)
                yield decode(rest[:end], tally)
                rest = rest[end:]
        yield decode(rest, tally)


def cut(data: bytes, most: int) -> int:
    """Where to end a piece of at most `most` bytes: at a blank line, or else a line, a space, a whole character."""
    for mark in (b"\n\n", b"\n\r\n", b"\n", b" "):
        found = data.rfind(mark, most // 4, most)
        if found >= 0:
            return found + len(mark)
    end = most
    while end > most - 4 and data[end] & 0xC0 == 0x80:  # inside a UTF-8 sequence
        end -= 1
    return end


def jsonl_texts(path: Path, field: str, tally: Counter) -> Iterator[str]:
    """The field of every line; blank lines are passed over, null is an empty document."""
    with open_bytes(path) as file:
        for number in itertools.count(1):
            place = f"{path}, line {number}"
            try:
                line = file.readline()
            except OSError as error:
                raise UserError(f"{place}: cannot be read: {error.strerror or first_line(error)}") from error
            if not line:
                return
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
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
            kind = schema.field(field).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)):
                raise UserError(f"{path}: field {field!r} holds {kind}, expected strings")
            for batch in parquet.iter_batches(batch_size=256, columns=[field]):
                column = batch.column(0)
                column = column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
                for data in column.cast(pa.large_binary()).to_pylist():  # parquet does not check that text is UTF-8
                    yield decode(data or b"", tally)
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
    """UTF-8 to text; invalid bytes are counted in the tally and become U+FFFD."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        tally["invalid_bytes"] += sum("\udc80" <= char <= "\udcff" for char in data.decode(errors="surrogateescape"))
        return data.decode(errors="replace")
