"""
Passages of a folder or of Python's documentation: `python -m scripts.library` makes them; the assistant looks them up.

A passage's title is a Python object's name, the heading above it, or else its file's; passages.py says what a passage
of a file is. nanochat/library/retrieval.py reads what this module writes.
"""
from collections.abc import Iterator
from pathlib import Path

from nanochat.data.sentences import sentence_ends
from nanochat.library.markup import markdown
from nanochat.library.own_files import (
    EXPECTED,
    LIBRARY_FILE,
    TEXT_SUFFIXES,
    Notes,
    file_texts,
    files_below,
    fingerprint,
    kind_of,
    own_path,
    say,
)
from nanochat.library.passages import CONTROL, split_paragraph, text_passages
from nanochat.library.python_docs import documentation, first_paragraph, first_sentence
from nanochat.library.retrieval import FORM, connect, key_of, last_part, library_path
from nanochat.library.words import stems, with_dates
from nanochat.runtime.errors import UserError, first_line
from nanochat.runtime.files import write_aside
from nanochat.runtime.progress import progress

# Characters of a text that are read at a time. Only logs are longer; a longer text loses the headings above a cut.
PIECE = 1 << 24
UNREAD = "could not be read, or not to the end"
SCHEMA = """
PRAGMA journal_mode = OFF; BEGIN;
CREATE TABLE manifest(key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE passages(id INTEGER PRIMARY KEY, title TEXT, text TEXT, place TEXT, key TEXT, last TEXT, context TEXT);
CREATE TABLE words(word TEXT PRIMARY KEY, passages INTEGER) WITHOUT ROWID;
CREATE VIRTUAL TABLE stems USING fts5(about, sentence, rest, tokenize='ascii');
"""
INSERT = "INSERT INTO passages VALUES (NULL, ?1, ?2, ?3, key_of(?1), last_part(key_of(?1)), ?4)"
FINISH = """
INSERT INTO stems(rowid, about, sentence, rest) SELECT
    id, stems(context), stems(first_sentence(text)),
    stems(substr(text, 1 + length(first_sentence(text)))) FROM passages;
CREATE VIRTUAL TABLE temp.vocabulary USING fts5vocab(main, stems, row);
INSERT INTO words SELECT term, doc FROM temp.vocabulary;
INSERT INTO manifest SELECT 'passages', count(*) FROM passages;
CREATE INDEX names ON passages(last, key);
"""


def make_library(source: str, name: str = "", field: str = "text", encoding: str = "utf-8",
                 quiet: bool = False) -> Path:
    """
    Make the library of a folder or file, or of "python"; print and return its path. The settings are the command's, see
    scripts/library.py. An existing library is replaced as a whole. quiet: print only what could not be read.
    """
    files = ""
    notes = Notes(list)
    if source == "python":
        passages = python_passages()
    else:
        path = own_path(source, "python, or a folder or file of your own")
        source = str(path)
        files = fingerprint(source)  # before they are read: a file that changes meanwhile is noticed
        name = name or LIBRARY_FILE.sub("", path.name)
        passages = file_passages(path, encoding, field, notes)
        if name == "python":
            raise UserError(f"library 'python' is Python's own; choose another name for {source!r} with --name=…")
    place = library_path(name or source)
    known: set[str] = set()
    functions = {
        "key_of": key_of,
        "last_part": last_part,
        "first_sentence": lambda text: text[: sentence_ends(text)[0]],
        "stems": lambda text: " ".join(stems(with_dates(text), known)),
    }
    with write_aside(place) as aside:
        database = connect(aside.as_uri())
        for function, of in functions.items():
            database.create_function(function, 1, of)
        database.executescript(SCHEMA)
        # What makes the same library again.
        manifest = {"form": FORM, "source": source, "field": field, "encoding": encoding, "files": files}
        database.executemany("INSERT INTO manifest VALUES (?, ?)", manifest.items())
        count = database.executemany(INSERT, passages if quiet else progress(passages, "reading", "passages")).rowcount
        say({UNREAD: notes[UNREAD]} if quiet else notes)
        if not count:
            raise UserError(f"nothing to read in {source}: expected text in {EXPECTED}")
        for context, text in database.execute("SELECT context, text FROM passages"):
            known.update(stems(with_dates(f"{context} {text}")))
        database.executescript(FINISH)
        database.close()
    if not quiet:
        print(f"{place}: {count:,} passages, {place.stat().st_size / 1e6:.1f} MB")
    return place


# ---- Passages

def file_passages(source: Path, encoding: str, field: str, notes: Notes) -> Iterator[tuple[str, str, str, str]]:
    """(title, text, place, context) of all files' passages; what could not be read is noted."""
    for file in files_below(source, notes, LIBRARY_FILE):
        name = CONTROL.sub("?", str(file.relative_to(source.parent)))
        stem = LIBRARY_FILE.sub("", Path(name).name)
        kind = kind_of(file)
        has_lines = kind in TEXT_SUFFIXES and kind != "html"
        before = 0  # lines before this text of the file
        try:
            for row, text in enumerate(file_texts(file, encoding, PIECE, notes, field, named=True), start=1):
                # A plain text's marks are its own: a password may have any of them.
                passages = text_passages(markdown(text, kind), stem, "\n" if has_lines else " ", kind != "txt")
                for title, passage, line, context in passages:
                    number = before + line if has_lines else row
                    yield title, passage, name if kind == "html" else f"{name}:{number}", context
                before += text.count("\n")
                # One line more: the separator between this text and the next, if that is why it ends.
                if len(text) < PIECE // 4:
                    before += 1
        # Parsers raise all kinds of errors. One damaged file must not prevent a library of the others.
        except Exception as error:
            notes[UNREAD].append(f"{name} ({first_line(error)})")


def python_passages() -> Iterator[tuple[str, str, str, str]]:
    """For each object the first paragraph of its documentation, which begins as tasks/python_questions.py quotes it."""
    for name, doc in documentation().items():
        first, _, rest = doc.partition("\n\n")
        if "->" in first and not first_sentence(first) and first_sentence(rest):
            # Older documentation begins with a signature alone.
            doc = rest
        sentence = first_sentence(doc) or ""
        text = sentence + first_paragraph(doc)[len(sentence):]
        if text:
            passage, _ = next(split_paragraph(text, 1))
            yield name, passage, f"help({name})", name
