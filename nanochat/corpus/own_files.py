"""
Documents of one's own files: .txt and .md, each one document, cut at blank lines where it is long; and a document for
each line of .jsonl, entry of .json, row of .csv and .parquet. All but .parquet may be .gz or .zst.
"""
import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.runtime.errors import UserError, first_line

PIECE = 64 << 10           # characters; a text file longer than this becomes several documents
SAMPLE = 1 << 20           # bytes of a file that tell its encoding
KIND = re.compile(r"\.(txt|md|jsonl|json|csv|parquet)(\.gz|\.zst)?$", re.IGNORECASE)
KINDS = ".txt .md .jsonl .json .csv .parquet (or .gz/.zst of them)"


def own_documents(path: Path, field: str, tally: Counter, encoding: str) -> Iterator[tuple[str, str]]:
    """
    (text, kin) of a file, or of all files in a folder that are of one of the KINDS; the others are printed. UserError,
    with its place, for anything that is wrong.

    encoding: of text files that are not UTF-8. Characters that cannot be read are replaced by U+FFFD, and counted.
    """
    there = list(files_below(path))
    files = [file for file in there if KIND.search(file.name)]
    others = [str(file.relative_to(path)) for file in there if not KIND.search(file.name)]
    if not files:
        raise UserError(f"no documents in {path}: expected {KINDS}")
    if others:
        print(f"{len(others)} files are not read (expected {KINDS}): {', '.join(others[:5])}")
    most = PIECE
    if len(files) == 1:  # a single short text becomes several documents as well, or nothing could be held out
        most = min(most, max(64, files[0].stat().st_size // 8))
    for file in files:
        try:
            for text in file_texts(file, field, encoding, most):
                tally["invalid"] += text.count("\ufffd")
                yield text, text
        except (OSError, csv.Error, pa.ArrowException, UnicodeError, LookupError) as error:
            raise UserError(f"cannot read {file}: {first_line(error)}") from error


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder that are not hidden, in a fixed order; a file is its own."""
    if folder.is_file():
        yield folder
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path


def file_texts(path: Path, field: str, encoding: str, most: int) -> Iterator[str]:
    kind = KIND.search(path.name)[1].lower()
    if kind == "parquet":
        rows = parquet_rows(path, field)
    else:
        encoding = encoding_of(path, encoding)
        if kind in ("txt", "md"):
            with open_text(path, encoding) as file:
                yield from pieces(file, most)
            return
        rows = {"jsonl": jsonl_rows, "json": json_rows, "csv": csv_rows}[kind](path, encoding)
    for place, row in rows:
        yield row if isinstance(row, str) else text_of(row, field, place)


def text_of(row: Any, field: str, place: str) -> str:
    """The text in a row's field; null is empty. UserError, naming the place, where there is none."""
    if not isinstance(row, dict) or field not in row:
        there = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise UserError(f"{place}: no field {field!r}; there is: {there or 'nothing'}; choose with --field=…")
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise UserError(f"{place}: field {field!r} holds {type(text).__name__}, expected a string")
    return text or ""


# ---- Bytes to text

def open_bytes(path: Path) -> io.BufferedReader:
    """A file's bytes, decompressed as its suffix says."""
    return io.BufferedReader(pa.input_stream(str(path)))


def open_text(path: Path, encoding: str, newline: str = "\n") -> TextIO:
    return io.TextIOWrapper(open_bytes(path), encoding, "replace", newline)


def encoding_of(path: Path, encoding: str) -> str:
    """UTF-8 if that can read the file, else `encoding`. UserError, with a guess, if that cannot read it either."""
    with open_bytes(path) as file:
        sample = file.read(SAMPLE)
    for candidate in ("utf-8-sig", encoding):  # -sig: without the mark that some programs begin a file with
        text = sample.decode(candidate, "replace")
        bad = text.count("\ufffd") + text.count("\0")  # UTF-16 of English reads as UTF-8 with zeros
        if bad <= 1 + len(text) // 1000:  # a little damage does not make it another encoding
            return candidate
    import charset_normalizer  # here: few need it

    guess = charset_normalizer.from_bytes(sample).best()
    advice = "convert it to UTF-8"
    if guess:
        advice = f"perhaps --encoding={guess.encoding}, which begins {str(guess)[:40]!r}"
    raise UserError(f"{path} is not {encoding}: {bad:,} of its first {len(text):,} characters cannot be read; {advice}")


def pieces(file: TextIO, most: int) -> Iterator[str]:
    """
    A text in pieces of at most `most` characters, each cut at the last gap between chapters (or Python's top-level
    definitions) that fits, else between paragraphs, lines, words, characters.
    """
    rest = file.read(most + 1)
    while len(rest) > most:
        end = most
        for mark in ("\n\n\n", "\n\n", "\n\r\n", "\n", " "):
            found = rest.rfind(mark, most // 4, most)
            if found >= 0:
                end = found + len(mark)
                break
        yield rest[:end]
        rest = rest[end:] + file.read(end)
    yield rest


# ---- Rows of a file: (place, a dict of fields or a text)

def jsonl_rows(path: Path, encoding: str) -> Iterator[tuple[str, Any]]:
    with open_text(path, encoding) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{path}, line {number}: not JSON: {error}") from error
                yield f"{path}, line {number}", row


def json_rows(path: Path, encoding: str) -> Iterator[tuple[str, Any]]:
    """The entries of a list, or a single object; some write lines as in .jsonl."""
    with open_text(path, encoding) as file:
        try:
            rows = json.load(file)
        except (ValueError, RecursionError):
            yield from jsonl_rows(path, encoding)
            return
    if not isinstance(rows, list):
        rows = [rows]
    for number, row in enumerate(rows, start=1):
        yield f"{path}, entry {number}", row


def csv_rows(path: Path, encoding: str) -> Iterator[tuple[str, Any]]:
    """The rows by the names in the first line, whose most frequent mark separates: comma, semicolon or tab."""
    csv.field_size_limit(1 << 29)  # characters; texts are longer than the 131,072 that it takes otherwise
    with open_text(path, encoding, newline="") as file:
        first = file.readline()
        delimiter = max(",;\t", key=first.count)
        rows = csv.DictReader(itertools.chain([first], file), delimiter=delimiter, strict=True)
        for row in rows:
            place = f"{path}, line {rows.line_num}"
            if None in row or None in row.values():
                raise UserError(f"{place}: not as many fields as the {len(rows.fieldnames)} that the first line names")
            yield place, row


def parquet_rows(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    with pq.ParquetFile(path) as parquet:
        columns = parquet.schema_arrow.names
        if field in columns:  # reading one column is faster; without it a row says which there are
            columns = [field]
        for batch in parquet.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                yield str(path), row
