"""
Passages to look up: one SQLite file with a full-text index (FTS5), which nanochat/library/make_library.py makes.

    library = Library(path)
    library.lookup("str.partition")        the passage with that title, or the nearest
    library.search("split text in three")  the best passage about these words

The index has stems, not words: `stems` (words.py) turns passages into stems when a library is made, and questions
here.
"""
import difflib
import math
import re
import statistics
import threading
import unicodedata
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.data.sentences import CODE, sentence_ends
from nanochat.library.words import (
    GERMAN,
    STOP_WORDS,
    begins_back,
    common_stems,
    normal_form,
    stems,
    telling_words,
    words,
)
from nanochat.runtime.errors import UserError, did_you_mean
from nanochat.runtime.files import base_dir

try:
    import sqlite3
except ImportError:  # a Python that was built without it
    sqlite3 = None

COMMAND = "python -m scripts.library --source=…"
# Passages are chosen by a question's rarest stems: frequent stems would take most of the time.
TERMS = 8
# BM25's highest-ranked passages, which are then compared closely.
CANDIDATES = 20
# A passage answers a question only if it has more than this share of the question's weight.
ENOUGH = 0.5
# The share by which a question's last telling word, mostly its subject, counts more in that comparison: it decides
# about halves.
LAST = 0.1
# A stem weighs as much if at most every second passage has it.
RARE = math.log(3)
# A word after the first may be a name, if it begins with a capital letter. A call's text begins with a blank if there
# are words before it.
NAME = re.compile(r"(?<=\s)\w+")
# What keeps a date for a program, in a note's front matter or below a heading of Org.
RECORD = re.compile(r"(?i)\s*(created|date|modified|updated|closed|deadline|scheduled)\w*: *[<[]?\d{4}-")
STOP_STEMS = frozenset(stems(" ".join(STOP_WORDS)))
# Format of the file: other formats cannot be read. It changes with the stems and the tables.
FORM = "5"
# The lowest difflib ratio for the last part of a misspelled title.
SIMILAR = 0.85
# The most work of one `lookup` or `search`, in units of WORK_UNIT steps of SQLite's virtual machine: half a second to a
# second of a core. Work, not time: a busy machine must find what an idle one finds. 300,000 passages that all have all
# of a question's words take 450 units, and 840 with the comparison of titles. A lookup that ends in a search may do it
# twice.
MOST_WORK = 1000
WORK_UNIT = 10_000
PUNCTUATION = "`*_'\"?!.,;: "  # around a title or a word
# Characters of a question that are read.
LONGEST = 256

# "partition" is str.partition, not bytearray.partition, and "Path.mkdir" is pathlib.Path.mkdir.
NAMED = """SELECT title, text, place FROM passages
WHERE last = ?1 AND (key = ?2 OR substr(key, -1 - length(?2)) = '.' || ?2)
ORDER BY key = ?2 DESC, title = ?3 DESC, length(key), id LIMIT 1"""
# Names of one module, compared by their last part: a shared "math." does not make names similar.
ALIKE = """SELECT DISTINCT last FROM passages
WHERE last BETWEEN ?1 AND ?1 || '\U0010ffff' AND key = ?2 || last AND abs(length(last) - ?3) < 3"""
# FTS5's rank is BM25 made negative: smaller is better.
RANKED = f"""SELECT one.title, one.text, one.place, about, sentence, rest, -best.score FROM
(SELECT rowid AS id, rank AS score FROM stems WHERE stems MATCH ? ORDER BY rank LIMIT {CANDIDATES}) AS best
JOIN passages AS one ON one.id = best.id JOIN stems ON stems.rowid = best.id
ORDER BY best.score"""
# One of the passages that are below a heading, or in a file, with this stem.
SUBJECT = "SELECT 1 FROM stems WHERE stems MATCH 'about : \"' || ? || '\"' LIMIT 1"


class Passage(NamedTuple):
    title: str
    text: str           # from the sentence that answers
    place: str          # where the text begins, such as "notes/wine.md:14"
    before: str = ""    # the passage's sentences before the text, which a reply's source shows
    missing: str = ""   # words of the question that neither the passage nor what it is found by has, such as "Belgrade"


class SearchFailed(UserError):
    """The library was not read to the end, so "nothing" would be wrong. The message is a sentence for the user."""


class Library:
    """
    A library, open for reading in any number of threads. `lookup` and `search` raise SearchFailed at a damaged page of
    the file, and after MOST_WORK. UserError, one line, if the file is not a library.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        # What a lookup or search may still do, in WORK_UNITs; threads that search at once may share it.
        self.work: float = math.inf
        if not path.is_file():
            names = [other.stem for other in path.parent.glob("*.sqlite")]
            raise UserError(f"no library {path}: make it, {COMMAND}{did_you_mean(path.stem, names)}")
        # immutable: no locks, which some network file systems lack. A library is replaced as a whole, never changed.
        self.connection = connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1")
        try:
            self.manifest = dict(self.connection.execute("SELECT key, value FROM manifest"))
            self.passages = int(self.manifest["passages"])
            if self.manifest.get("form") != FORM:
                raise ValueError("made by another version")
        except (sqlite3.Error, LookupError, ValueError) as error:
            raise UserError(f"{path} is no library, or damaged ({error}): make it again, {COMMAND}") from error
        self.is_own = self.manifest["source"] != "python"
        self.connection.set_progress_handler(self.spend, WORK_UNIT)

    def lookup(self, title: str) -> Passage | None:
        """
        The passage with this title; else with the shortest title that ends in it; else with a similarly spelled one;
        else with a name in it, such as libidn2-0 in "a libidn2-0 here"; else the best about its words.
        """
        self.work = MOST_WORK
        title = title[:LONGEST]
        passage = self.titled(title)
        if passage:
            return passage
        key = key_of(title)
        last = last_part(key)
        parent = key.removesuffix(last)
        others = self.query(ALIKE, last[:1], parent, len(last))
        for other in difflib.get_close_matches(last, [other for other, in others], 1, SIMILAR):
            passage = self.titled(parent + other)
        return passage or self.named_in(title) or self.search(title)

    def titled(self, title: str) -> Passage | None:
        """The passage with this title; else with the shortest title that ends in it."""
        key = key_of(title)
        rows = self.query(NAMED, last_part(key), key, title) if key else []
        return passage_of(*rows[0]) if rows else None

    def named_in(self, text: str) -> Passage | None:
        """The passage whose title is a word of the text that must be a name: it has a dot, a digit, …"""
        for word in text.split():
            # Marks, such as vowel signs, are parts of letters.
            is_word = all(unicodedata.category(character)[0] in "LM" for character in key_of(word))
            passage = None if is_word else self.titled(word)
            if passage:
                return passage
        return None

    def search(self, question: str) -> Passage | None:
        """
        The passage with these words as title; else the best about them; None if none has enough of them. Lines before
        the last one are its context: their words have half the weight, and a passage needs a word of the last line.
        """
        self.work = MOST_WORK
        question = question[-LONGEST:]
        telling = telling_words(question)
        named = self.titled(" ".join(telling))
        if named:
            return named
        line = question.rpartition("\n")[2]
        common = common_stems(question)
        weights = self.weights(telling, common)
        asked = weights.keys() & self.stems(telling_words(line)) - common
        if asked:
            weights = {stem: weight if stem in asked else weight / 2 for stem, weight in weights.items()}

        def weight_in(found: Iterable[str]) -> float:
            return sum(weights[stem] for stem in sorted(weights.keys() & found))

        # Between blanks: "json.partition" is one word.
        told = [(word, found) for word in line.split() if (found := self.stems(telling_words(word)))]
        # Python's passages are not asked about by subject.
        last = told[-1][1] if told and self.is_own else set()
        total = sum(weights.values()) + LAST * weight_in(last)
        rarest = sorted(weights, key=weights.get)[-TERMS:]
        # BM25 gives no weight to a stem that half of the passages have, but ranking those takes most of the time. A
        # passage that has only such stems is no answer if they have less than ENOUGH of the question's weight.
        rare = [stem for stem in rarest if weights[stem] >= RARE]
        if weight_in(rare) >= (1 - ENOUGH) * total:
            rarest = rare
        # What a passage of one's notes must have: numbers, names, and what other notes are about. "The colour of box 1"
        # is not that of box 7, a family doctor's hours are not the vet's.
        needed: set[str] = set()
        if self.is_own:
            needed = weights.keys() & self.stems(names_in(line) or names_in(question))
            needed |= {stem for stem in asked if self.query(SUBJECT, stem)}
        ranking = []
        rows = self.query(RANKED, " OR ".join(f'"{stem}"' for stem in rarest) or '""')
        for title, text, place, *columns, score in rows:
            about, sentence, rest = (set(column.split()) for column in columns)
            found = about | sentence | rest
            # BM25 alone prefers one rare word twice to all words once. An answer quotes the first sentence, so its
            # words count more; between equal matches, a shorter one is better.
            in_all = weight_in(found)
            score = in_all + 0.3 * weight_in(sentence) + 0.3 * score - 0.07 * len(columns[1].split())
            weight = in_all + LAST * weight_in(last & found)
            is_enough = weight > ENOUGH * total and (not asked or asked & found)
            if is_enough and needed <= found and (not self.is_own or says_more(text, sentence | rest, weights.keys())):
                ranking.append((score, found, about, title, text, place))
        if not ranking:
            return None
        _, found, about, title, text, place = max(ranking, key=lambda row: row[0])
        if not self.is_own:
            # Python's documentation is quoted from its first sentence, which says what the object is.
            return passage_of(title, text, place)
        # From the sentence that has most words of the question: first of its last line, where words that title and
        # headings have say less, as they belong to all sentences.
        chosen = begin = start = 0
        most = 0.0, 0.0
        for end in sentence_ends(text):
            sentence = text[start:end]
            if not begins_back(sentence):
                begin = start
            having = self.stems(words(sentence))
            weight = weight_in(having & asked) - weight_in(having & asked & about) / 2, weight_in(having)
            if weight > most:
                most, chosen = weight, begin
            start = end + text[end : end + 1].isspace()
        missing = ", ".join(word.strip(PUNCTUATION) for word, stems in told if not stems & (found | common))
        return passage_of(title, text, place, chosen, missing)

    def stems(self, words: list[str]) -> set[str]:
        return set(stems(" ".join(words), self))

    def __contains__(self, stem: object) -> bool:
        """Whether a passage has this stem."""
        return bool(self.query("SELECT 1 FROM words WHERE word = ?", stem))

    def weights(self, telling: list[str], common: frozenset[str]) -> dict[str, float]:
        """
        The inverse document frequency of a question's stems. A stem that no passage has gets the median of the others,
        because the question may be about it; if it is common, it is left out.
        """
        weights = {}
        # Sorted, so ties do not depend on the process's hash seed.
        asked = sorted(self.stems(telling))
        for stem in asked:
            for count, in self.query("SELECT passages FROM words WHERE word = ?", stem):
                weights[stem] = math.log(1 + self.passages / (1 + count))
        if not weights:
            return {}
        median = statistics.median_high(weights.values())
        return dict.fromkeys((stem for stem in asked if stem not in common), median) | weights

    def spend(self) -> bool:
        """Count a unit of work; True ends the query."""
        self.work -= 1
        return self.work < 0

    def query(self, statement: str, *values: Any) -> list[tuple]:
        """All rows. Text that no library can have, such as half of a surrogate pair, is in no row."""
        with self.lock:
            try:
                return self.connection.execute(statement, values).fetchall()
            except UnicodeError:
                return []
            except sqlite3.Error as error:
                why = "The search took too long." if self.work < 0 else "The library is damaged."
                raise SearchFailed(why) from error


def connect(address: str) -> "sqlite3.Connection":
    try:
        sqlite3.connect(":memory:").execute("CREATE VIRTUAL TABLE probe USING fts5(text)")
    except Exception as error:
        raise UserError("a library needs SQLite with FTS5, which this Python lacks; try another Python") from error
    return sqlite3.connect(address, uri=True, check_same_thread=False, isolation_level=None)


def passage_of(title: str, text: str, place: str, start: int = 0, missing: str = "") -> Passage:
    """A row of the table, from one of its sentences. Prose becomes one line; code stays in lines."""
    prose, fence, code = text.partition(CODE)
    before, text = (part.replace("\n", " ") for part in (prose[:start], prose[start:]))
    if lines := prose.count("\n", 0, start):
        file, _, line = place.rpartition(":")
        place = f"{file}:{int(line) + lines}"
    return Passage(title, text + fence + code, place, before, missing)


def says_more(text: str, found: Set[str], asked: Set[str]) -> bool:
    """
    Whether a note's passage with these stems says more than a question: it is no link, nothing that announces what is
    not there, no question, and no record of a date unless the question has the record's name.
    """
    record = RECORD.match(text)
    if text.endswith(("?", "？")) or record and asked.isdisjoint(stems(record[1])):
        return False
    return not (found - STOP_STEMS if text.endswith(":") else found) <= asked


def names_in(text: str) -> list[str]:
    """The words that are numbers or may be names. In German, whose nouns all look like names, only the numbers."""
    has_names = GERMAN.isdisjoint(words(text))
    names = NAME.findall(unicodedata.normalize("NFC", text))
    return words(" ".join(name for name in names if not name.isalpha() or name.istitle() and has_names))


def library_path(name: str) -> Path:
    return base_dir() / "library" / f"{name}.sqlite"


def key_of(title: str) -> str:
    """A title as it is compared: "`fs.readFile(path)`" -> "fs.readfile"."""
    title = normal_form(title)
    return " ".join((title.partition("(")[0] or title).strip(PUNCTUATION).split())


def last_part(key: str) -> str:
    return key.rpartition(".")[2]
