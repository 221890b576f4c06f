"""
Documents from a user's own files. A text (.txt .md .markdown .rst) is one document, divided at lines of <|endoftext|>
and, if it is long, at blank lines. Each line of .jsonl and .ndjson, entry of .json, row of .csv, .tsv and .parquet
is a document. All except .parquet may be compressed: .gz, .zst, .bz2 or .xz.

Two rules: nothing is merged or lost silently, and every error names the file and what to do.
"""
import codecs
import contextlib
import csv
import io
import json
import lzma
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.runtime.errors import UserError, first_line

MAX_CHARS = 64 << 10       # a text file longer than this becomes several documents
# With fewer files than this, each is cut into smaller documents, so part of it can be held out and part trained on:
# a file may be the only one in its language.
FEW_FILES = 200
SHORT_CHARS = 2000         # then a document may be as short as this; shorter only if there is one file
SAMPLE = 1 << 20           # characters that are read at a time, and bytes for guessing the encoding
KIND = re.compile(r"\.(txt|md|markdown|rst|jsonl|ndjson|json|csv|tsv|parquet)(\.gz|\.zst|\.bz2|\.xz)?$", re.IGNORECASE)
KINDS = ".txt .md .rst .jsonl .json .csv .tsv .parquet (or .gz/.zst/.bz2/.xz of them)"
TEXTS = ("txt", "md", "markdown", "rst")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# What German, French, Spanish, Danish, … have beyond ASCII. Bytes of other languages, read as cp1252, are others, too.
WESTERN = "àáâäåæçèéêëíîïñóôöøùúûüßœÀÁÂÄÅÆÇÈÉÊËÍÎÏÑÓÔÖØÙÚÛÜŒ¿¡«»„“”‘’–—…€§°\xa0"
WESTERN_TEXT = re.compile(f"[\0-\x7f]*[{WESTERN}][\0-\x7f{WESTERN}]*")
SEVEN_BIT = ("iso2022", "hz")  # names of encodings whose bytes are all ASCII begin with these
# Data sets write these between stories. Only whole lines: a text may mention these words.
SEPARATOR = re.compile(r"^(<\|endoftext\|>|<\|end_of_text\|>|</s>)[ \t\r]{0,9}(?:\n|\Z)", re.MULTILINE)
LOOKAHEAD = 32             # characters; more than a separator has

Documents = Iterator[tuple[str, str]]  # text, kin: see sources.py
Rows = Iterator[tuple[str, Any]]       # the place, for messages; a dict of fields or a text
Notes = defaultdict[str, list[str]]    # what to tell the user about files -> the files


class NotText(UserError):
    """A row has no text where it should. If it is its file's first row, the file has some other use."""


def own_documents(path: Path, tally: Counter, encoding: str, field: str, delimiter: str) -> Documents:
    """
    (text, kin) of a file, or of all files of the KINDS in a folder; a summary at the end lists what was not read, or
    changed. UserError, with its place, for anything that is wrong.

    encoding: see `encoding_of`. Characters that cannot be read are replaced by U+FFFD, and counted.
    field, delimiter: see `file_texts`.
    """
    notes = Notes(list)
    files = files_below(path, notes)
    if not files:
        raise UserError(f"no documents in {path}: expected {KINDS}")
    total = sum(file.stat().st_size for file in files)
    documents, problem = 0, None
    for file in files:
        most = MAX_CHARS
        if len(files) < FEW_FILES:
            shortest = SHORT_CHARS if len(files) > 1 else 64
            most = min(most, max(shortest, file.stat().st_size // 8, total // FEW_FILES))
        before = documents
        try:
            with readable(file):
                for text in file_texts(file, encoding, most, notes, field, delimiter):
                    tally["invalid"] += text.count("\ufffd")
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
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException, UnicodeError, LookupError) as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from error


def own_path(source: str, expected: str) -> Path:
    """A source's path, file or folder, absolute: it names the same data from anywhere. UserError if it is missing."""
    path = Path(source).expanduser().resolve()
    if not source or not path.exists():
        raise UserError(f"no source {source!r}, and no such path; expected {expected}")
    return path


def files_below(source: Path, notes: Notes, kind: re.Pattern[str] = KIND) -> list[Path]:
    """
    The file, or all files below a folder whose names match `kind` and are not hidden, in a fixed order. Linked folders
    are followed, each folder once.
    """
    if source.is_file():
        return [source] if kind.search(source.name) else []
    found = []
    seen = set()
    cannot = notes["cannot be opened"]
    walk = os.walk(source, followlinks=True, onerror=lambda error: cannot.append(str(error)))
    for place, folders, names in walk:
        real = os.path.realpath(place)
        # Several links may lead to one folder, and links may form a circle.
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        hidden = {name for name in folders + names if name.startswith(".")}
        notes["are hidden, and not read"] += sorted(hidden)
        folders[:] = sorted(set(folders) - hidden)
        for path in (Path(place, name) for name in sorted(names) if name not in hidden):
            if not path.is_file():
                cannot.append(str(path))
            elif kind.search(path.name):
                found.append(path)
            else:
                notes[f"are not read (expected {KINDS})"].append(str(path.relative_to(source)))
    return sorted(found)


def say(notes: Notes) -> None:
    for what, names in notes.items():
        if names:
            more = ", …" if len(names) > 5 else ""
            line = f"{len(names)} files {what}: {', '.join(names[:5])}{more}"
            # Names of files are bytes, and need not be UTF-8.
            print(line.encode(errors="replace").decode())


def kind_of(path: Path) -> str:
    """The last suffix of a file of one of the KINDS, except a compression's suffix."""
    return KIND.findall(path.name)[0][0].lower()


def file_texts(path: Path, encoding: str, most: int, notes: Notes, field: str, delimiter: str) -> Iterator[str]:
    """
    The texts of a file; a text file is cut into texts of at most `most` characters.

    field: where the text of a row is. delimiter: between the fields of .csv and .tsv; "" detects it.
    """
    kind = kind_of(path)
    if kind == "parquet":
        rows = parquet_rows(path, field)
    else:
        encoding = encoding_of(path, encoding, notes)
        if kind in TEXTS:
            separators: Counter = Counter()
            with open_text(path, encoding) as file:
                yield from cut_text(file, most, separators)
            for separator, count in separators.items():
                notes[f"are divided at lines of {separator}"].append(f"{path} ({count:,})")
            return
        if kind in ("csv", "tsv"):
            rows = csv_rows(path, encoding, field, delimiter or "\t" * (kind == "tsv"))
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
    suffix = path.suffix.lower()
    if suffix == ".xz":
        return lzma.open(path)
    # Opened by Python, because Arrow opens only names that are UTF-8.
    file = open(path, "rb")
    if suffix in COMPRESSIONS:
        return io.BufferedReader(pa.input_stream(file, compression=COMPRESSIONS[suffix]))
    return file


def encoding_of(path: Path, encoding: str, notes: Notes) -> str:
    """
    The encoding that reads a whole file without an error: UTF-8, or else the one that the user named; UserError, with a
    guess, if neither does. A few bad bytes among valid characters beyond ASCII are damage, and noted: another encoding
    would read all of these wrongly. A file of ASCII bytes is also UTF-8, so a named 7-bit encoding comes first if it
    finds more than ASCII.
    """
    named = codecs.lookup(encoding).name
    found = scan(path, "utf-8-sig")
    if is_text(found):
        if named.startswith(SEVEN_BIT) and scan(path, named)["more"]:
            return named
        if found["escapes"] and not found["more"] and named != "ascii" and not named.startswith(SEVEN_BIT):
            raise UserError(f"{path} is not {encoding}: it has escapes of Japanese, Korean or Chinese, perhaps "
                            "--encoding=iso2022_jp or iso2022_kr; --encoding=ascii keeps them as they are")
        return "utf-8-sig"
    found = scan(path, "utf-8", "replace")
    # Damage has at least as many good characters as bad ones: each U+FFFD adds 2 to `more`.
    if is_text(found) and found["more"] >= 3 * found["bad"]:
        notes["are damaged UTF-8, whose unreadable characters became U+FFFD"].append(f"{path} ({found['bad']:,})")
        return "utf-8-sig"
    if is_text(scan(path, named)):
        return named
    found = scan(path, named, "replace")
    # Imported late: rarely needed.
    import charset_normalizer

    advice = "repair it, or convert it to UTF-8 with iconv, whose -c leaves out what cannot be read"
    with open_bytes(path) as file:
        data = file.read(SAMPLE)
    start = data.decode(named, "replace").find("\ufffd")
    guesses = [guess.encoding for guess in charset_normalizer.from_bytes(data)]
    if WESTERN_TEXT.fullmatch(data.decode("cp1252", "replace")):
        guesses.insert(0, "cp1252")
    for guess in guesses:
        if is_text(scan(path, guess)):
            around = data.decode(guess, "replace")[max(start - 20, 0) :][:40]
            advice = f"perhaps --encoding={guess}, which reads {around!r}"
            break
    raise UserError(f"{path} is not {encoding}: {found['bad']:,} of its {found['characters']:,} characters "
                    f"cannot be read; {advice}")


def scan(path: Path, encoding: str, errors: str = "strict") -> Counter:
    """
    Counts in a whole text file: `characters`; `bad` ones (replaced, or zeros, as in English UTF-16 read as UTF-8;
    sys.maxsize if it cannot be read); `more` bytes than characters in UTF-8; `escapes` of ISO 2022.
    """
    found: Counter = Counter()
    with open_text(path, encoding, errors=errors) as file:
        try:
            while text := file.read(SAMPLE):
                found["characters"] += len(text)
                # Only with errors=replace: a text may itself contain U+FFFD.
                found["bad"] += text.count("\0") + text.count("\ufffd") * (errors == "replace")
                found["more"] += len(text.encode(errors="replace")) - len(text)
                # A terminal's colors have another character after the escape.
                found["escapes"] += text.count("\x1b$")
        except UnicodeError:
            return Counter(bad=sys.maxsize)
    return found


def is_text(found: Counter) -> bool:
    return found["bad"] <= 1 + found["characters"] // 1000


def cut_text(file: TextIO, most: int, separators: Counter) -> Iterator[str]:
    """
    A text, divided at SEPARATOR lines (which are counted), in parts of at most `most` characters. Each is cut at the
    last gap between chapters (or Python's top-level definitions) that fits, else between paragraphs, lines, words,
    characters.
    """
    rest = file.read(most + LOOKAHEAD)
    while rest:
        end = after = len(rest)
        separator = SEPARATOR.search(rest)
        if separator and separator.start() <= most:
            separators[separator[1]] += 1
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

def json_rows(path: Path, encoding: str, whole: bool = True) -> Rows:
    """whole: the entries of a list, or a single object. Else, or if the file is neither, one row per line."""
    with open_text(path, encoding) as file:
        lines: Iterable[str] = file
        if whole:
            text = file.read()
            try:
                entries = json.loads(text)
            except (ValueError, RecursionError):
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
                except (ValueError, RecursionError) as error:
                    raise NotText(f"{path}, line {number}: not JSON: {error}") from error
                yield f"{path}, line {number}", row


def csv_rows(path: Path, encoding: str, field: str, delimiter: str) -> Rows:
    """
    The rows, with the first line's names. delimiter: "" takes the one of , ; tab and | that finds the field among the
    names, or else most names.
    """
    # Characters of a field: texts may be longer than Python's limit of 131,072.
    csv.field_size_limit(1 << 29)

    def names(mark: str) -> list[str]:
        return next(csv.reader([first], delimiter=mark), [])

    with open_text(path, encoding, newline="") as file:
        first = file.readline()
    if first.startswith("sep="):
        raise UserError(f"{path} begins with Excel's {first.strip()!r}: remove that line; --delimiter=… says the same")
    delimiter = delimiter or max(",;\t|", key=lambda mark: (field in names(mark), len(names(mark))))
    delimiter = "\t" if delimiter == "tab" else delimiter
    if len(delimiter) > 1 or delimiter in "\"\r\n":
        raise UserError(f"--delimiter={delimiter}: expected one character, or tab")
    if names(delimiter).count(field) > 1:
        raise UserError(f"{path}: two columns are called {field!r}; rename one, or choose with --field=…")
    with open_text(path, encoding, newline="") as file:
        plain = delimiter in "\t|" and has_plain_quotation_marks(file, delimiter)
    with open_text(path, encoding, newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter, strict=True,
                              quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL)
        try:
            for row in rows:
                if None in row or None in row.values():
                    raise csv.Error(f"not as many fields as the {len(rows.fieldnames or ())} that the first line names")
                yield f"{path}, line {rows.line_num}", row
        except csv.Error as error:
            raise UserError(f"{path}, line {rows.reader.line_num}: {error}; it was read with {delimiter!r} between "
                            "fields, --delimiter=… names another, and with quotation marks doubled in quotations"
                            ) from error


def has_plain_quotation_marks(lines: Iterable[str], delimiter: str) -> bool:
    """
    Whether quotation marks mean nothing, as in many files with tabs: all lines have equally many fields, and on one of
    them a quotation does not end. Read as quotations, these marks would merge rows.
    """
    widths = set()
    unended = False
    for line in filter(str.strip, lines):
        widths.add(line.count(delimiter))
        try:
            next(csv.reader([line], delimiter=delimiter, strict=True))
        except csv.Error:
            unended = True
    return unended and len(widths) == 1


def parquet_rows(path: Path, field: str) -> Rows:
    # Opened by Python, as in open_bytes.
    with open(path, "rb") as file, pq.ParquetFile(file) as parquet:
        columns = parquet.schema_arrow.names
        # Reading one column is faster. If it is missing, whole rows are read, to say which columns exist.
        if field in columns:
            columns = [field]
        for batch in parquet.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                yield str(path), row
