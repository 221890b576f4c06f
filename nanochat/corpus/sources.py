"""
Where text comes from. A source is an iterator of (text, kin): documents of equal `kin` are never separated by the
split between training and validation; mostly a document is its own kin.

    tinyworld            the embedded corpus, generated
    python               the standard library of the running interpreter and the reference behind its `help()`
    FOLDER or FILE       one's own text in any language: .txt .md .jsonl .json .csv .tsv .parquet, and .gz or .zst of
                         all but the last
    hf:NAME[:CONFIG]     any text data set that the `datasets` package can load, from the hub or from a folder

(fineweb-edu and climbmix are fetched as finished shards instead, see download.py.)
"""
import contextlib
import csv
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
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.corpus import tinyworld
from nanochat.corpus.encodings import decode, encoding_of, not_text, open_text, too_many
from nanochat.runtime.errors import UserError, first_line

TINYWORLD_BYTES = 24_000_000   # text in all: about 75,000 documents, a few seconds to make
PIECE = 64 << 10               # characters; a text file longer than this becomes several documents
SHUFFLE_BUFFER = 10_000        # rows of a hub data set that are mixed before num_shards cuts it off
KIND = re.compile(r"\.(txt|md|jsonl|json|csv|tsv|parquet)(\.gz|\.zst)?$", re.IGNORECASE)
KINDS = ".txt .md .jsonl .json .csv .tsv .parquet (or .gz/.zst of them)"

Documents = Iterator[tuple[str, str]]
Rows = Iterator[tuple[str, Any]]   # where in which file, and what is there: a dict of fields, or a text


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
            yield from ((piece, source) for piece in pieces(io.StringIO(source), PIECE))
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return
    yield from ((page, page) for page in topics.values())


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
    except UserError:
        raise
    except Exception as error:  # the package raises all kinds: no such set, no network, wrong config, damaged file
        raise UserError(f"hf:{name}: {type(error).__name__}: {first_line(error)}; check the name and the network "
                        "(HF_ENDPOINT=… names a mirror)") from error


# ---- Files of one's own

def own_documents(path: Path, field: str, tally: Counter, encoding: str = "utf-8") -> Documents:
    """
    The documents of a file, or of a folder's usable files: a .txt or .md file is one, cut at blank lines where it is
    longer than PIECE; so is a line of .jsonl, an entry of .json, a row of .csv, .tsv and .parquet, from its `field`.
    Text that is not UTF-8 is read in `encoding`, see `encoding_of`. What else is wrong is a UserError with its place.
    Files of another kind, those without the field and those with characters that had to be replaced are printed.
    """
    there = [path] if path.is_file() else list(files_below(path))
    files = {file: KIND.search(file.name)[1].lower() for file in there if KIND.search(file.name)}
    if not files:
        raise UserError(f"no documents in {path}: expected {KINDS}")
    if others := [str(file.relative_to(path)) for file in there if file not in files]:
        print(f"not read: {listed(others)} (expected {KINDS})")
    read_as, sizes, bad = {}, {}, {}
    for file, kind in files.items():
        if kind != "parquet":
            with errors_of(file):
                read_as[file], sizes[file], bad[file] = encoding_of(file, encoding)
    if too_many(sum(bad.values()), sum(sizes.values())):  # a few in each of many short files
        worst = max(bad, key=lambda file: bad[file] / max(1, sizes[file]))
        raise not_text(worst, encoding, sum(bad.values()), sum(sizes.values()), f" in {path}")
    if replaced := [f"{file} ({count:,})" for file, count in bad.items() if count]:
        print(f"warning: characters replaced in {listed(replaced)}")
    tally["invalid"] += sum(bad.values())
    # A single short text has to become several documents as well, or there is nothing to hold out.
    most = PIECE if len(files) > 1 else max(64, min(PIECE, sum(sizes.values()) // 8))

    def documents() -> Documents:
        skipped: list[str] = []
        found = False
        for file, kind in files.items():
            with errors_of(file):
                if kind in ("txt", "md"):
                    texts = plain_texts(file, read_as[file], most)
                elif kind == "parquet":
                    texts = field_texts(parquet_rows(file, field, tally), field)
                else:
                    rows = {"jsonl": jsonl_rows, "json": json_rows, "csv": csv_rows, "tsv": csv_rows}[kind]
                    texts = field_texts(rows(file, read_as[file]), field, skipped if kind != "jsonl" else None)
                for text in texts:
                    found = True
                    yield text, text
        if skipped and not found:
            raise UserError(f"no documents: {listed(skipped)}; choose with --field=…")
        if skipped:
            print(f"not read: {listed(skipped)}")

    return documents()


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder that are not hidden, in a fixed order."""
    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


@contextlib.contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Errors of reading a file, of one that is cut or damaged as well, as a UserError."""
    try:
        yield
    except pa.ArrowException as error:
        raise UserError(f"{path}: not a whole parquet file: {first_line(error)}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or first_line(error)}") from error


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:5]) + f" and {len(names) - 5:,} more" * (len(names) > 5)


# ---- A file's texts and rows, by its kind

def plain_texts(path: Path, encoding: str, most: int) -> Iterator[str]:
    """A text file, in pieces of at most `most` characters."""
    with open_text(path, encoding) as file:
        yield from pieces(file, most)


def pieces(file: TextIO, most: int) -> Iterator[str]:
    """
    A text in pieces of at most `most` characters, each cut at the last gap between chapters (or Python's top-level
    definitions) that fits, else between paragraphs, lines, words, characters.
    """
    rest = file.read(most + 1)
    while len(rest) > most:
        for mark in ("\n\n\n", "\n\n", "\n\r\n", "\n", " "):
            if (found := rest.rfind(mark, most // 4, most)) >= 0:
                break
        end = most if found < 0 else found + len(mark)
        yield rest[:end]
        rest = rest[end:] + file.read(end)
    yield rest


def jsonl_rows(path: Path, encoding: str) -> Rows:
    """The value of every line; blank lines are passed over."""
    with open_text(path, encoding) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, parse_json(line, place)


def json_rows(path: Path, encoding: str) -> Rows:
    """The entries of a list; a single object; or lines as in .jsonl, which are not loaded at once."""
    with open_text(path, encoding) as file:
        line = next(filter(str.strip, file), "")
        try:
            rows = json.loads(line)
        except (ValueError, RecursionError):  # it goes on in the next lines, or is none
            rows = parse_json(line + file.read(), str(path))
        lines = any(map(str.strip, file))
    if lines:
        yield from jsonl_rows(path, encoding)
    else:
        entries = rows if isinstance(rows, list) else [rows]
        yield from ((f"{path}, entry {number}", row) for number, row in enumerate(entries, start=1))


def parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON: {error}") from error


def csv_rows(path: Path, encoding: str) -> Rows:
    """
    The rows by the names in the first line, whose most frequent mark separates: comma, semicolon or tab.
    In a .tsv a tab does, and quotes are plain characters.
    """
    tsv = KIND.search(path.name)[1].lower() == "tsv"
    csv.field_size_limit(1 << 29)  # characters; texts are longer than the 131,072 that it takes otherwise
    with open_text(path, encoding, newline="") as file:
        first = file.readline()
        delimiter = "\t" if tsv else max(",;\t", key=first.count)
        quoting = csv.QUOTE_NONE if tsv else csv.QUOTE_MINIMAL
        rows = csv.reader(itertools.chain([first], file), delimiter=delimiter, quoting=quoting, strict=True)
        try:
            names = next(rows, [])
            for row in filter(None, rows):
                place = f"{path}, line {rows.line_num}"
                if len(row) != len(names):
                    raise UserError(f"{place}: {len(row)} fields, the first line names {len(names)}")
                yield place, dict(zip(names, row))
        except csv.Error as error:
            raise UserError(f"{path}, line {rows.line_num}: not CSV: {error}") from error


def parquet_rows(path: Path, field: str, tally: Counter) -> Rows:
    """The rows, with this field only. What is not UTF-8 is replaced and counted, and refused where it is too much."""
    characters, before = 0, tally["invalid"]
    with pq.ParquetFile(path) as parquet:
        if field not in parquet.schema_arrow.names:
            yield str(path), dict.fromkeys(parquet.schema_arrow.names)
            return
        for batch in parquet.iter_batches(batch_size=256, columns=[field]):
            try:
                column = batch.column(0).cast(pa.large_binary())  # parquet does not check that text is UTF-8
            except pa.ArrowNotImplementedError:
                kind = parquet.schema_arrow.field(field).type
                raise UserError(f"{path}: field {field!r} holds {kind}, expected strings") from None
            texts = [decode(data or b"", tally) for data in column.to_pylist()]
            characters += sum(map(len, texts))
            yield from ((str(path), {field: text}) for text in texts)
    bad = tally["invalid"] - before
    if too_many(bad, characters):
        found = f"{bad:,} of {characters:,} characters of {field!r} cannot be read"
        raise UserError(f"{path} is not utf-8: {found}; write it anew, or take it away")
    if bad:
        print(f"warning: characters replaced in {path} ({bad:,})")


def field_texts(rows: Rows, field: str, skipped: list[str] | None = None) -> Iterator[str]:
    """
    The texts of rows. skipped: where a file is noted whose first row has no such field, as one that describes the
    others; None: that is an error.
    """
    for number, (place, row) in enumerate(rows):
        if isinstance(row, str):
            yield row
        elif number == 0 and skipped is not None and not (isinstance(row, dict) and field in row):
            return skipped.append(f"{place} ({missing(field, row)})")
        else:
            yield text_of(row, field, place)


def text_of(row: Any, field: str, place: str) -> str:
    """The text in a row's field; null is empty. UserError, naming the place, where there is none."""
    if not isinstance(row, dict) or field not in row:
        raise UserError(f"{place}: {missing(field, row)}; choose with --field=…")
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise UserError(f"{place}: field {field!r} holds {type(text).__name__}, expected a string")
    return text or ""


def missing(field: str, row: Any) -> str:
    """What to say of a row without the field."""
    there = ", ".join(map(str, row)) if isinstance(row, dict) else f"a single {type(row).__name__}"
    return f"no field {field!r}; there is: {there or 'nothing'}"
