"""
Documents of one's own files: texts (.txt .md .markdown .rst), each one document, divided at lines of <|endoftext|> and,
where it is long, at blank lines; and a document for each line of .jsonl and .ndjson, entry of .json, row of .csv, .tsv
and .parquet. All but .parquet may be .gz, .zst, .bz2 or .xz.
"""
import codecs
import contextlib
import csv
import io
import itertools
import json
import lzma
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.runtime.errors import UserError, first_line

PIECE = 64 << 10           # characters; a text file longer than this becomes several documents
FEW = 200                  # files; fewer of them are cut into smaller pieces,
SHORT = 2000               # characters that a piece may have even then, unless there is only one file
SAMPLE = 1 << 20           # characters that are read at a time, and bytes for a guess of the encoding
KIND = re.compile(r"\.(txt|md|markdown|rst|jsonl|ndjson|json|csv|tsv|parquet)(\.gz|\.zst|\.bz2|\.xz)?$", re.IGNORECASE)
KINDS = ".txt .md .rst .jsonl .json .csv .tsv .parquet (or .gz/.zst/.bz2/.xz of them)"
TEXTS = ("txt", "md", "markdown", "rst")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
SEVEN_BIT = ("iso2022_jp", "iso2022_jp_2", "iso2022_jp_3", "iso2022_jp_ext", "iso2022_kr", "hz")
SEPARATOR = re.compile(r"^(<\|endoftext\|>|<\|end_of_text\|>|</s>)[ \t\r]{0,9}(?:\n|\Z)", re.MULTILINE)
ESCAPED = re.compile(r'(?:^|[,;\t|])"[^"\n]*\\"[^,;\t|"\r\n]')  # impossible where quotation marks are doubled
ODD_ESCAPE = re.compile(r'(?<!\\)((?:\\\\)*)\\"')  # after an even number of backslashes a quotation ends
LOOKAHEAD = 32             # characters; more than a separator has

Documents = Iterator[tuple[str, str]]  # text, kin: see sources.py
Rows = Iterator[tuple[str, Any]]       # the place, a dict of fields or a text
Notes = defaultdict[str, list[str]]  # what there is to say about files, and which they are


class NotText(UserError):
    """A row holds no text where it should. If it is the first of its file, the file is of some other use."""


def own_documents(path: Path, tally: Counter, encoding: str, **rows: str) -> Documents:
    """
    (text, kin) of a file, or of all files in a folder that are of one of the KINDS; what is not read, or changed, is
    printed at the end. UserError, with its place, for anything that is wrong.

    encoding: see `encoding_of`. Characters that cannot be read are replaced by U+FFFD, and counted.
    rows: field and delimiter, see `file_texts`.
    """
    notes = Notes(list)
    files = own_files(path, notes)
    if not files:
        raise UserError(f"no documents in {path}: expected {KINDS}")
    total = sum(file.stat().st_size for file in files)
    documents, problem = 0, None
    for file in files:
        most = PIECE
        if len(files) < FEW:  # a part of each can be held out then: it may be the only one in its language
            shortest = SHORT if len(files) > 1 else 64
            most = min(most, max(shortest, file.stat().st_size // 8, total // FEW))
        before = documents
        try:
            with readable(file):
                for text in file_texts(file, encoding, most, notes, **rows):
                    tally["invalid"] += text.count("\ufffd")
                    documents += 1
                    yield text, text
        except NotText as error:
            if documents > before:
                raise
            problem = problem or error
            notes["are not read, since they hold no such text"].append(first_line(error))
    say(notes)
    if problem and not documents:
        raise problem


@contextlib.contextmanager
def readable(file: Path) -> Iterator[None]:
    """UserError for what reading a file raises where it is damaged, not there or in another encoding."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException, UnicodeError, LookupError) as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from error


def own_path(source: str, expected: str) -> Path:
    """A source that is a file or a folder, absolute: it names the same data from anywhere. UserError for no such."""
    path = Path(source).expanduser().resolve()
    if not source or not path.exists():
        raise UserError(f"no source {source!r}, and no such path; expected {expected}")
    return path


def own_files(source: Path, notes: Notes) -> list[Path]:
    """The file, or the files of a folder, that are of one of the KINDS."""
    found = []
    for file in files_below(source, notes):
        if KIND.search(file.name):
            found.append(file)
        else:
            notes[f"are not read (expected {KINDS})"].append(str(file.relative_to(source)))
    return found


def files_below(folder: Path, notes: Notes) -> list[Path]:
    """
    All files below a folder that are not hidden, in a fixed order, and those of linked folders, each folder once; a
    file is its own.
    """
    if folder.is_file():
        return [folder]
    found, seen = [], set()
    cannot = notes["cannot be opened"]
    walk = os.walk(folder, followlinks=True, onerror=lambda error: cannot.append(str(error)))
    for place, folders, names in walk:
        notes["are hidden, and not read"] += [name for name in folders + names if name.startswith(".")]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for path in (Path(place, name) for name in names if not name.startswith(".")):
            if path.is_file():
                found.append(path)
            else:
                cannot.append(str(path))
    return sorted(found)


def say(notes: Notes) -> None:
    for what, names in notes.items():
        if names:
            more = ", …" if len(names) > 5 else ""
            line = f"{len(names)} files {what}: {', '.join(names[:5])}{more}"
            print(line.encode(errors="replace").decode())  # names may not be UTF-8


def file_texts(path: Path, encoding: str, most: int, notes: Notes, field: str, delimiter: str) -> Iterator[str]:
    """
    The texts of a file; those of a text file are pieces of at most `most` characters.

    field: of rows, where the text is. delimiter: of the fields of .csv and .tsv; "" finds it out.
    """
    kind = KIND.search(path.name)[1].lower()
    if kind == "parquet":
        rows = parquet_rows(path, field)
    else:
        encoding = encoding_of(path, encoding, notes)
        if kind in TEXTS:
            ends: Counter = Counter()
            with open_text(path, encoding) as file:
                yield from pieces(file, most, ends)
            for separator, count in ends.items():
                notes[f"are divided at lines of {separator}"].append(f"{path} ({count:,})")
            return
        if kind in ("csv", "tsv"):
            rows = csv_rows(path, encoding, field, delimiter or "\t" * (kind == "tsv"))
        else:
            rows = json_rows(path, encoding) if kind == "json" else jsonl_rows(path, encoding)
    for place, row in rows:
        yield row if isinstance(row, str) else text_of(row, field, place)


def text_of(row: Any, field: str, place: str) -> str:
    """The text in a row's field; null is empty. NotText, naming the place, where there is none."""
    if not isinstance(row, dict) or field not in row:
        there = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise NotText(f"{place}: no field {field!r}; there is: {there or 'nothing'}; choose with --field=…")
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise NotText(f"{place}: field {field!r} holds {type(text).__name__}, expected a string")
    return text or ""


# ---- Bytes to text

def open_bytes(path: Path) -> BinaryIO:
    """A file's bytes, decompressed as its suffix says."""
    suffix = path.suffix.lower()
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    file: BinaryIO = open(path, "rb")  # by Python: Arrow opens no name that is not UTF-8
    if suffix in COMPRESSIONS:
        file = io.BufferedReader(pa.input_stream(file, compression=COMPRESSIONS[suffix]))
    return file


def open_text(path: Path, encoding: str, newline: str = "\n", errors: str = "replace") -> TextIO:
    return io.TextIOWrapper(open_bytes(path), encoding, errors, newline)


def encoding_of(path: Path, encoding: str, notes: Notes) -> str:
    """
    What reads a whole file without an error: UTF-8, or else the encoding that the user named. ASCII with the escapes of
    a 7-bit encoding is in that one. UserError, with a guess, if it is another one. Where no other than UTF-8 is named,
    a few bad bytes among valid characters beyond ASCII are damage, and noted.
    """
    named = codecs.lookup(encoding).name
    found = scan(path, "utf-8-sig")
    if is_text(found):
        if found["escapes"] and not found["more"] and named != "ascii":
            for guess in (named, *SEVEN_BIT):
                if guess.startswith(("iso2022", "hz")) and scan(path, guess)["more"]:
                    if guess == named:
                        return guess
                    raise UserError(f"{path} is not {encoding}: it has escapes that --encoding={guess} reads; "
                                    "--encoding=ascii keeps them as they are")
        return "utf-8-sig"
    if is_text(scan(path, named)):
        return named
    found = scan(path, named, "replace")
    bad = found["bad"]
    if named == "utf-8" and is_text(found) and found["more"] >= 3 * bad:  # U+FFFD is 2 of them
        notes["are damaged UTF-8, whose unreadable characters became U+FFFD"].append(f"{path} ({bad:,})")
        return "utf-8-sig"
    import charset_normalizer  # here: few need it

    advice = "repair it, or convert it to UTF-8 with iconv, whose -c leaves out what cannot be read"
    with open_bytes(path) as file:
        guesses = charset_normalizer.from_bytes(file.read(SAMPLE))
    for guess in guesses:
        if is_text(scan(path, guess.encoding)):
            advice = f"perhaps --encoding={guess.encoding}, which begins {str(guess)[:40]!r}"
            break
    characters = found["characters"]
    raise UserError(f"{path} is not {encoding}: {bad:,} of its {characters:,} characters cannot be read; {advice}")


def scan(path: Path, encoding: str, errors: str = "strict") -> Counter:
    """
    Of a whole text file: its `characters`; how many are `bad`: replaced, or zeros, as in UTF-16 of English read as
    UTF-8, or without limit if it cannot be read; bytes that UTF-8 has `more`; whether there are `escapes`.
    """
    found: Counter = Counter()
    with open_text(path, encoding, errors=errors) as file:
        try:
            while text := file.read(SAMPLE):
                found["characters"] += len(text)
                found["bad"] += text.count("\0") + text.count("\ufffd") * (errors == "replace")
                found["more"] += len(text.encode(errors="replace")) - len(text)
                found["escapes"] += "\x1b" in text or "~{" in text
        except UnicodeError:
            return Counter(bad=sys.maxsize)
    return found


def is_text(found: Counter) -> bool:
    return found["bad"] <= 1 + found["characters"] // 1000


def pieces(file: TextIO, most: int, ends: Counter) -> Iterator[str]:
    """
    A text, divided at lines that are a SEPARATOR (counted in `ends`), in pieces of at most `most` characters, each cut
    at the last gap between chapters (or Python's top-level definitions) that fits, else between paragraphs, lines,
    words, characters.
    """
    rest = file.read(most + LOOKAHEAD)
    while rest:
        end = after = len(rest)
        separator = SEPARATOR.search(rest)
        if separator and separator.start() <= most:
            ends[separator[1]] += 1
            end, after = separator.span()
        elif len(rest) > most:
            end = after = most
            for mark in ("\n\n\n", "\n\n", "\n\r\n", "\n", " "):
                found = rest.rfind(mark, most // 4, most)
                if found >= 0:
                    end = after = found + len(mark)
                    break
        yield rest[:end]
        rest = rest[after:] + file.read(after)


# ---- Rows of a file

def jsonl_rows(path: Path, encoding: str) -> Rows:
    with open_text(path, encoding) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise NotText(f"{path}, line {number}: not JSON: {error}") from error
                yield f"{path}, line {number}", row


def json_rows(path: Path, encoding: str) -> Rows:
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


def csv_rows(path: Path, encoding: str, field: str, delimiter: str) -> Rows:
    """
    The rows by the names in the first line. delimiter: "" takes Excel's (a line `sep=;` before all others), or else the
    one of , ; tab and | that finds the field among the names, or most names.
    """
    csv.field_size_limit(1 << 29)  # characters; texts are longer than the 131,072 that it takes otherwise
    start, found = 0, {}
    with open_text(path, encoding, newline="") as file:
        first = file.readline()
        if first.lower().startswith("sep="):
            delimiter = delimiter or first[4:5]
            start = 1
        for mark in ",;\t|":
            names = next(csv.reader([first], delimiter=mark), [])
            found[mark] = (field in names, len(names))
    delimiter = {"": max(found, key=found.get), "tab": "\t"}.get(delimiter, delimiter)
    if len(delimiter) > 1 or delimiter in "\"\r\n":
        raise UserError(f"--delimiter={delimiter}: expected one character, or tab")
    style = quotation(path, encoding, delimiter)
    with open_text(path, encoding, newline="") as file:
        lines = itertools.islice(file, start, None)
        if style == "escaped":
            lines = (ODD_ESCAPE.sub(r'\1""', line) for line in lines)
        quoting: Any = csv.QUOTE_NONE if style == "plain" else csv.QUOTE_MINIMAL
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True, quoting=quoting)
        try:
            for row in rows:
                if None in row or None in row.values():
                    raise csv.Error(f"not as many fields as the {len(rows.fieldnames)} that the first line names")
                yield f"{path}, line {rows.line_num + start}", row
        except csv.Error as error:
            line = rows.reader.line_num + start
            raise UserError(f"{path}, line {line}: {error}; it was read with {delimiter!r} between fields, "
                            "--delimiter=… names another") from error


def quotation(path: Path, encoding: str, delimiter: str) -> str:
    """
    How a .csv writes quotation marks: "escaped" with a backslash in quotations; "plain", as in any text, if between
    tabs or | each line has as many fields and on one a quotation does not end; else "quoted", doubled in quotations.
    """
    style, widths = "quoted", set()
    with open_text(path, encoding, newline="") as file:
        for line in filter(str.strip, file):
            widths.add(line.count(delimiter))
            if ESCAPED.search(line):
                return "escaped"
            try:
                next(csv.reader([line], delimiter=delimiter, strict=True))
            except csv.Error:
                style = "plain"
    return style if delimiter in "\t|" and len(widths) == 1 else "quoted"


def parquet_rows(path: Path, field: str) -> Rows:
    with open(path, "rb") as file, pq.ParquetFile(file) as parquet:  # opened by Python, see open_bytes
        columns = parquet.schema_arrow.names
        if field in columns:  # reading one column is faster; without it a row says which there are
            columns = [field]
        for batch in parquet.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                yield str(path), row
