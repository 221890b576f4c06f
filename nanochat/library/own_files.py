"""
Documents from a user's own files. A text (.txt .md .markdown .rst) is one document, divided at lines of <|endoftext|>
and, if it is long, at blank lines. Each line of .jsonl and .ndjson, entry of .json, row of .csv, .tsv and .parquet
is a document. All except .parquet may be compressed: .gz, .zst or .bz2.

Two rules: nothing is merged or lost silently, and every error names the file and what to do.
"""
import codecs
import contextlib
import csv
import hashlib
import io
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.library.markup import named_cells
from nanochat.runtime.errors import UserError, first_line

MAX_CHARS = 64 << 10       # a text file longer than this becomes several documents
# With fewer files than this, each is cut into smaller documents, so part of it can be held out and part trained on:
# a file may be the only one in its language.
FEW_FILES = 200
SHORT_CHARS = 2000         # then a document may be as short as this; shorter only if there is one file
SAMPLE = 1 << 20           # characters that are read at a time, and bytes for guessing the encoding
SUFFIXES = "txt|md|markdown|rst|jsonl|ndjson|json|csv|tsv|parquet"
DATA_FILE, LIBRARY_FILE = (re.compile(rf"\.({suffixes})(\.gz|\.zst|\.bz2)?$", re.IGNORECASE)
                           for suffixes in (SUFFIXES, f"{SUFFIXES}|org|html"))
EXPECTED = ".txt .md .rst .jsonl .json .csv .tsv .parquet (or .gz/.zst/.bz2 of them)"
TEXT_SUFFIXES = ("txt", "md", "markdown", "rst", "org", "html")
NOT_READ = (f"are not read (expected {EXPECTED}, for a library also .org and .html; .docx, .odt and .epub become .md "
            "by pandoc FILE -o FILE.md, .pdf becomes .txt by pdftotext FILE)")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# Data sets write these between stories. Only whole lines: a text may mention these words.
SEPARATOR = re.compile(r"^(?:<\|endoftext\|>|<\|end_of_text\|>|</s>)[ \t\r]{0,9}(?:\n|\Z)", re.MULTILINE)
LOOKAHEAD = 32             # characters; more than a separator has
NOT_ASCII = re.compile(r"[^\0-\x7f\ufffd]")
# How Windows-1252 shows letters that are frequent in Central Europe: š, ž, ł, ą, ľ, ţ, ő and ş. (It shows ő as õ, which
# is also Portuguese, but there followed by e; and ş as the º of ordinal numbers, at whose end it stands.)
CENTRAL = re.compile(r"[šžŠŽ³¹¾þ]|õ(?!e)|º(?=\w)")

Documents = Iterator[tuple[str, str]]  # text, kin: see sources.py
Records = Iterator[tuple[str, Any]]    # the place, for messages; a dict of fields or a text
Notes = defaultdict[str, list[str]]    # what to tell the user about files -> the files


class NotText(UserError):
    """A row has no text where it should. If it is its file's first row, the file has some other use."""


def own_documents(path: Path, encoding: str, field: str) -> Documents:
    """
    (text, kin) of a file, or of all files of the EXPECTED in a folder; a summary at the end lists what was not read, or
    changed. UserError, with its place, for anything that is wrong.

    encoding: see `encoding_of`. field: where the text of a row is.
    """
    notes = Notes(list)
    files = files_below(path, notes)
    if not files:
        raise UserError(f"no documents in {path}: expected {EXPECTED}")
    documents, problem = 0, None
    for file in files:
        most = MAX_CHARS
        before = documents
        try:
            with readable(file):
                if len(files) < FEW_FILES:
                    shortest = SHORT_CHARS if len(files) > 1 else 64
                    most = min(most, max(shortest, file.stat().st_size // 8))
                for text in file_texts(file, encoding, most, notes, field):
                    documents += 1
                    yield text, text
        except NotText as error:
            # A file without any text is for some other use, such as settings.json; a bad later row is damage.
            if documents > before:
                raise
            problem = problem or error
            notes["are not read, since they hold no such text"].append(first_line(error))
    say(notes)
    if problem and not documents:
        raise problem


@contextlib.contextmanager
def readable(file: Path) -> Iterator[None]:
    """UserError if reading a file fails because it is damaged, missing or in another encoding."""
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeError, LookupError) as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from error


def own_path(source: str, expected: str) -> Path:
    """A source's path, file or folder, absolute: it names the same data from anywhere. UserError if it is missing."""
    path = Path(source).expanduser().resolve()
    if not source or not path.exists():
        raise UserError(f"no source {source!r}, and no such path; expected {expected}")
    return path


def files_below(source: Path, notes: Notes, kind: re.Pattern[str] = DATA_FILE) -> list[Path]:
    """
    The file, or all files below a folder whose names match `kind`, in a fixed order. Names that begin with a dot are
    left out. Linked files are read, linked folders are not: links may form a circle.
    """
    if source.is_file():
        return [source] if kind.search(source.name) else []
    found = []
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if any(part.startswith(".") for part in name.parts):
            continue
        if path.is_file() and kind.search(path.name):
            found.append(path)
        elif path.is_file():
            notes[NOT_READ].append(str(name))
        elif path.is_symlink() or not os.access(path, os.R_OK):
            notes["are linked folders, or cannot be opened"].append(str(name))
    return found


def fingerprint(source: str) -> str:
    """A hash of the names, sizes and times of the files that a library reads."""
    digest = hashlib.sha256()
    for file in files_below(Path(source), Notes(list), LIBRARY_FILE):
        # An editor that saves may have removed it in the meantime.
        with contextlib.suppress(FileNotFoundError):
            status = file.stat()
            digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def say(notes: dict[str, list[str]]) -> None:
    for what, names in notes.items():
        more = ", …" if len(names) > 5 else ""
        line = f"{len(names)} files {what}: {', '.join(names[:5])}{more}"
        if names:
            # Names of files are bytes, and need not be UTF-8.
            print(line.encode(errors="replace").decode())


def kind_of(path: Path) -> str:
    """The last suffix of a file of one of the EXPECTED, except a compression's suffix."""
    return LIBRARY_FILE.findall(path.name)[0][0].lower()


def file_texts(path: Path, encoding: str, most: int, notes: Notes, field: str, named: bool = False) -> Iterator[str]:
    """
    The texts of a file; a text file is cut into texts of at most `most` characters. field: where a row's text is.
    named: the rows of a .csv or .tsv without that field are texts with all columns' names.
    """
    kind = kind_of(path)
    if kind == "parquet":
        rows = parquet_rows(path, field)
    else:
        encoding = encoding_of(path, encoding, notes)
        if kind in TEXT_SUFFIXES:
            with open_text(path, encoding) as file:
                yield from cut_text(file, most)
            return
        if kind in ("csv", "tsv"):
            rows = csv_rows(path, encoding, field)
            if named:
                rows = ((place, row if field in row else named_cells(row.items())) for place, row in rows)
        else:
            rows = json_rows(path, encoding, whole=kind == "json")
    for place, row in rows:
        yield row if isinstance(row, str) else row_text(row, field, place)


def row_text(row: Any, field: str, place: str) -> str:
    """The text in a row's field; null is empty. NotText, naming the place, if there is none."""
    if not isinstance(row, dict) or field not in row:
        names = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise NotText(f"{place}: no field {field!r}; there is: {names or 'nothing'}; choose with --field=…")
    text = row[field]
    if not isinstance(text, str | None):
        raise NotText(f"{place}: field {field!r} holds {type(text).__name__}, expected a string")
    return text or ""


# ---- Bytes to text

def open_text(path: Path, encoding: str, newline: str = "\n", errors: str = "replace") -> TextIO:
    return io.TextIOWrapper(open_bytes(path), encoding, errors, newline)


def open_bytes(path: Path) -> IO[bytes]:
    """A file's bytes, decompressed as its suffix says."""
    # Opened by Python, because Arrow opens only names that are UTF-8.
    file = open(path, "rb")
    suffix = path.suffix.lower()
    if suffix in COMPRESSIONS:
        return io.BufferedReader(pa.input_stream(file, compression=COMPRESSIONS[suffix]))
    return file


def encoding_of(path: Path, encoding: str, notes: Notes) -> str:
    """
    The encoding that reads a whole file without an error: UTF-8, or else the one that the user named; UserError, with a
    guess, if neither does. A few bad bytes among valid characters beyond ASCII are damage, and noted: another encoding
    would read all of these wrongly.
    """
    named = codecs.lookup(encoding).name
    if reads(path, "utf-8"):
        # ISO 2022 and HZ write other letters with ASCII bytes alone, so these files are also UTF-8.
        if named != "utf-8" and "a".encode(named) == b"a" and reads(path, "ascii") and reads(path, named):
            return named
        return "utf-8-sig"
    with open_text(path, "utf-8") as file:
        bad = good = 0
        while text := file.read(SAMPLE):
            bad += text.count("\ufffd")
            good += len(NOT_ASCII.findall(text))
    # In EUC-JP, which resembles UTF-8 most, a third as many are good as bad.
    if 4 * bad <= good:
        notes["are damaged UTF-8, whose unreadable characters became U+FFFD"].append(f"{path} ({bad:,})")
        return "utf-8-sig"
    if reads(path, named):
        return named
    # Imported late: rarely needed.
    import charset_normalizer

    advice = "convert it to UTF-8 with iconv, whose -c leaves out what cannot be read"
    with open_bytes(path) as file:
        data = file.read(SAMPLE)
    guess = charset_normalizer.from_bytes(data).best()
    if guess:
        name, text = guess.encoding, str(guess)
        # Most Western texts are also valid, and read wrongly, in encodings of Central Europe and the Baltic.
        western = data.decode("cp1252", "replace")
        is_central = 50 * len(CENTRAL.findall(western)) > len(NOT_ASCII.findall(western))
        if not is_central and reads(path, "cp1252") and name in (
                "cp1250", "iso8859_2", "mac_latin2", "cp1257", "iso8859_13"):
            name, text = "cp1252", western
        # The words around the first bad byte show whether the guess is right; most encodings read ASCII alike.
        start = max(data.decode(named, "replace").find("\ufffd") - 20, 0)
        advice = f"perhaps --encoding={name}, which reads {text[start : start + 40]!r}; or {advice}"
    raise UserError(f"{path} is not {encoding}: {advice}")


def reads(path: Path, encoding: str) -> bool:
    """Whether a whole file is valid in an encoding."""
    with open_text(path, encoding, errors="strict") as file:
        try:
            while file.read(SAMPLE):
                pass
        except UnicodeError:
            return False
    return True


def cut_text(file: TextIO, most: int) -> Iterator[str]:
    """
    A text, divided at SEPARATOR lines, in parts of at most `most` characters. Each is cut at the last gap between
    chapters (or Python's top-level definitions) that fits, else between paragraphs, lines, words, characters.
    """
    rest = file.read(most + LOOKAHEAD)
    while rest:
        end = after = len(rest)
        separator = SEPARATOR.search(rest)
        if separator and separator.start() <= most:
            end, after = separator.span()
        elif len(rest) > most:
            end = after = most
            # No part is shorter than a quarter of `most`, so a text with few gaps does not become crumbs.
            for mark in ("\n\n\n", "\n\n", "\n\r\n", "\n", " "):
                found = rest.rfind(mark, most // 4, most)
                if found >= 0:
                    end = after = found + len(mark)
                    break
        yield rest[:end]
        rest = rest[after:] + file.read(after)


# ---- Rows of a file

def json_rows(path: Path, encoding: str, whole: bool = True) -> Records:
    """whole: the entries of a list, or a single object. Else, or if the file is neither, one row per line."""
    with open_text(path, encoding) as file:
        lines: Iterable[str] = file
        if whole:
            text = file.read()
            try:
                entries = json.loads(text)
            except ValueError:
                # Some .json files have a row per line. A compressed file cannot be read from its start again.
                lines = io.StringIO(text)
            else:
                for number, row in enumerate(entries if isinstance(entries, list) else [entries], start=1):
                    yield f"{path}, entry {number}", row
                return
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise NotText(f"{path}, line {number}: not JSON: {error}") from error
                yield f"{path}, line {number}", row


def csv_rows(path: Path, encoding: str, field: str) -> Records:
    """
    The rows, with the first line's names. Between fields of .csv is the one of , ; tab and | that finds the field among
    the names, or else most names.
    """
    # Characters of a field: texts may be longer than Python's limit of 131,072.
    csv.field_size_limit(1 << 29)
    with open_text(path, encoding, newline="") as file:
        first = file.readline()
    if first.startswith("sep="):
        raise UserError(f"{path} begins with Excel's {first.strip()!r}: remove that line")
    marks = "\t" if kind_of(path) == "tsv" else ",;\t|"
    names = {mark: next(csv.reader([first], delimiter=mark), []) for mark in marks}
    delimiter = max(marks, key=lambda mark: (field in names[mark], len(names[mark])))
    if names[delimiter].count(field) > 1:
        raise UserError(f"{path}: two columns are called {field!r}; rename one, or choose with --field=…")
    with open_text(path, encoding, newline="") as file:
        # Strict: a quotation mark within a field would otherwise merge rows.
        rows = csv.DictReader(file, delimiter=delimiter, strict=True)
        begins = 1  # line of the row that is read: an open quotation goes on to a later one
        try:
            fields = rows.fieldnames or []
            begins = rows.line_num + 1
            for row in rows:
                if None in row or None in row.values():
                    raise csv.Error(f"not as many fields as the {len(fields)} that the first line names")
                yield f"{path}, line {rows.line_num}", row
                begins = rows.line_num + 1
        except csv.Error as error:
            raise UserError(f"{path}, line {begins}: {error}; it was read with {delimiter!r} between "
                            "fields, and with quotation marks doubled in quotations") from error


def parquet_rows(path: Path, field: str) -> Records:
    if not path.stat().st_size:
        return
    # Opened by Python, as in open_bytes.
    with open(path, "rb") as file, pq.ParquetFile(file) as parquet:
        columns = parquet.schema_arrow.names
        # Reading one column is faster. If it is missing, whole rows are read, to say which columns exist.
        if field in columns:
            columns = [field]
        for batch in parquet.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                yield str(path), row
