"""Real files, real SQLite. The oracles: BM25 by its formula over words that are split here, inspect, stat."""
import functools
import gzip
import inspect
import itertools
import json
import os
import re
import sqlite3
import statistics
import time
import tomllib
import unicodedata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import REPO

from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.fresh_tools import open_library
from nanochat.inference.tools import Tools
from nanochat.library import retrieval as reader
from nanochat.library.make_library import make_library
from nanochat.library.own_files import fingerprint
from nanochat.library.passages import text_passages
from nanochat.library.retrieval import Library, Passage, library_path
from nanochat.library.words import stems
from nanochat.runtime.errors import UserError
from nanochat.tasks.lookup import passages_of

VAULT = tomllib.loads((REPO / "tests/vault.toml").read_text("utf-8"))


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


def made(folder: Path, **settings: str) -> Library:
    return Library(make_library(str(folder), **settings))


def passages(library: Library) -> list[Passage]:
    return [Passage(*row) for row in library.query("SELECT title, text, place FROM passages ORDER BY id")]


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        Library(path)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- What is in a library

@pytest.mark.parametrize("kind", VAULT)
def test_a_note_becomes_passages_each_with_heading_and_line(kind, folder):
    suffix = VAULT[kind].get("suffix", "md")
    (folder / f"note.{suffix}").write_bytes(VAULT[kind]["note"].encode())
    found = [f"{found.place} {found.title} | {found.text}".replace("\n", "↵") for found in passages(made(folder))]
    # A web page has no lines that a reader would know.
    colon = "" if suffix == "html" else ":"
    assert found == [f"notes/note.{suffix}{colon}{line}" for line in VAULT[kind]["passages"].strip("\n").split("\n")]


def test_notes_are_found_in_any_language_however_a_question_is_typed_and_what_is_private_is_not_kept(folder):
    for kind, case in VAULT.items():
        (folder / f"{kind}.{case.get('suffix', 'md')}").write_bytes(case["note"].encode())
    (folder / "doors.txt").write_text("\n\n".join(f"The door of room {n} is kept shut, thank you." for n in range(50)))
    library = made(folder)
    assert b"zanzi" not in library.path.read_bytes()
    for line in "".join(case.get("questions", "") for case in VAULT.values()).strip().split("\n"):
        question, answer = map(str.strip, line.split("|"))
        for typed in (question, unicodedata.normalize("NFD", question), unicodedata.normalize("NFKC", question),
                      question.upper()):
            found = library.search(typed)
            assert answer in found.text if answer else found is None, (typed, found)
    _, *found = library.search("neighbour Elm Street")
    assert found == ["If it is gone, ask the neighbour on Elm Street.", "notes/wrapped.md:2",
                     "The cellar key hangs behind the kitchen door. ", ""], "the sentence that answers"
    for question in ("", "?", "\0", "\ud800", "NEAR(qq zz)", '" OR "', "*", "-" * 10**6):
        assert library.search(question) is None, question


def test_every_kind_of_file_says_its_place(folder):
    (folder / "sub").mkdir()
    stories = "First story.\nIt ends.\n<|endoftext|>\n\nSecond story.\n<|endoftext|>\nThird.\n"
    (folder / "sub" / "a.txt").write_text(stories)
    (folder / "b.md.gz").write_bytes(gzip.compress(b"# Packed\n\nThis one is compressed.\n"))
    (folder / "c.jsonl").write_text(r'{"text": "Row one\nof c.\n```\nls\npwd\n```"}' + '\n{"text": "Row two of c."}\n')
    (folder / "d.csv").write_text("text\nRow one of d.\nRow two of d.\n")
    pq.write_table(pa.table({"text": ["Row one of e.", "Row two of e."]}), folder / "e.parquet")
    (folder / "ignored.py").write_text("text = 'not read'")
    (folder / ".hidden.md").write_text("not read")
    library = made(folder)
    assert [f"{passage.place.removeprefix('notes/')} {passage.title}" for passage in passages(library)] == [
        "b.md.gz:3 Packed", "c.jsonl:1 c", "c.jsonl:2 c", "d.csv:1 d", "d.csv:2 d", "e.parquet:1 e", "e.parquet:2 e",
        "sub/a.txt:1 a", "sub/a.txt:5 a", "sub/a.txt:7 a"]
    assert passages(library)[1].text == "Row one of c.\n```\nls\npwd\n```", "a row has no lines, but code has"


def test_passages_are_at_most_300_characters_cut_at_sentences_and_lose_nothing(folder):
    sentences = [f"Sentence {n} is {'very ' * (n % 40)}long." for n in range(200)]
    text = " ".join([*sentences, "x" * 1000, *["word"] * 200])
    found = [passage for _, passage, _, _ in text_passages(text, "t")]
    assert max(map(len, found)) <= 300 and "".join(found).replace(" ", "") == text.replace(" ", "")
    assert all(passage.endswith(".") for passage in found[:20])
    # As many sentences as fit: each passage with the next one's first sentence would be too long.
    for one, other in zip(found[:20], found[1:20]):
        assert len(one) + 1 + len(re.match(r".+?\.(?= |$)", other)[0]) > 300


def test_control_characters_surrogates_special_tokens_and_megabytes_on_one_line(folder):
    (folder / "a.txt").write_bytes(b"Tab\there, bell\a, escape\x1b[31m and zero\0 end here.\r\n")
    (folder / "b.jsonl").write_text(json.dumps({"text": "Half a pair \ud83d is no character."}) + "\n")
    (folder / "c.md").write_text("The token <|python_end|> and <|assistant_end|> are text.")
    long_lines = ["# " + "head " * 100_000, "[" * 100_000, " " * 1_000_000, "-" * 100_000, "<!--" * 100_000]
    (folder / "d.md").write_text("\n".join(long_lines))
    library = made(folder)
    assert library.lookup("a").text == "Tab here, bell , escape [31m and zero end here."
    assert library.search("half pair character").text == "Half a pair is no character."
    assert library.search("token python_end").text == "The token <|python_end|> and <|assistant_end|> are text."
    assert all(len(passage.text) <= 300 and len(passage.title) <= 200 for passage in passages(library))


def test_python_objects_begin_with_the_sentence_that_their_documentation_begins_with(capsys):
    library = Library(make_library("python"))
    capsys.readouterr()
    for name, thing in {"str.partition": str.partition, "functools.reduce": functools.reduce, "json.loads": json.loads,
                        "statistics.median": statistics.median}.items():
        found = library.lookup(name)
        assert found.title == name and found.place == f"help({name})"
        documented = " ".join(inspect.getdoc(thing).split())
        # reduce's begins with its signature, whose words differ between versions of Python.
        assert documented.rpartition(" -> value ")[2].startswith(found.text)
    assert library.passages > 2000
    open_library("python")
    assert capsys.readouterr().out == ""


# ---- Looking up

def test_a_title_is_found_exactly_then_without_case_then_by_its_last_part_then_misspelled(folder):
    titles = ["bytes.partition", "str.partition", "Str.Partition", "`fs.readFile(path[, options])`", "math.sqrt",
              "math.cbrt", "Getting started", "日本語", "pathlib.Path.mkdir"]
    (folder / "a.md").write_text("".join(f"# {title}\n\nThis is passage {n}.\n\n" for n, title in enumerate(titles)))
    library = made(folder)

    def number(title: str) -> int | None:
        found = library.lookup(title)
        return int(found.text.split()[-1][:-1]) if found else None

    assert [number(title) for title in titles] == list(range(len(titles)))
    for title, expected in {"STR.PARTITION": 1, "partition": 1, "readFile": 3, "fs.readfile()": 3, "Path.mkdir": 8,
                            "str.partiton": 1, "getting  Started?": 6, "geting started": 6, "fs.raedFile": 3,
                            "partitions of a str": 1, "every wine math.cbrt has": 5, "math": 4}.items():
        assert number(title) == expected, title
    # Made-up names find no others that look a little like them.
    for title in ("math.cubert", "math.sqrtn2", "json.partition", "time.mkdir", "", ".",
                  "?", "\0", "\ud800", "x" * 10**6, "'; DROP TABLE passages; --", "%", "*"):
        assert number(title) is None, title


@pytest.mark.parametrize("word, found", [
    ("dateisystembelegung", "datei syste"),     # the longest known ending: "system…", not "belegung"
    ("Eingabezeile", "einga zeil"), ("arbeitsplatz", "arbei platz"),
    ("systematik", "syste"), ("datei", "datei"), ("", ""),
    ("password", "passw"),                      # too short for a compound
    ("京都天気京都天気", "京都 都天 天気 気京 京都 都天 天気 京 都 天 気 京 都 天 気")])
def test_a_compound_is_found_by_its_beginning_and_by_a_known_ending(word, found):
    known = "datei syste beleg zeil platz arten word 京都".split()
    assert stems(word, known) == found.split()


def test_people_find_what_they_ask_about_in_their_notes(tmp_path):
    """Retrieval only; the folders and questions are of tests/questions.toml."""
    answered, refused = [], []
    for name, folder in tomllib.loads((REPO / "tests/questions.toml").read_text("utf-8")).items():
        for note in folder["notes"].strip().split("=== ")[1:]:
            path, text = note.split("\n", 1)
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        library = made(tmp_path / name)
        for line in folder["questions"].strip().splitlines():
            question, right = map(str.strip, line.split("|"))
            assert folder["notes"].count(right) == 1 or not right, right
            passage = library.search(question)
            if right:
                answered.append(passage is not None and right in passage.text)
            else:
                refused.append(passage is None)
    assert len(answered + refused) == 200
    assert statistics.mean(answered) >= 0.83 and statistics.mean(refused) >= 0.9


def test_a_passage_has_the_names_and_subjects_of_a_question_and_says_which_words_it_lacks(folder):
    (folder / "trains.md").write_text("The train to Linz departs at 7:15. Marek takes it.\n\nThe station has a café.\n")
    (folder / "doctors.md").write_text("# Family doctor\n\nShe sees patients from 8 to 11.\n\n# Vet\n\nAt Mill Road.\n")
    (folder / "2026-03-04.md").write_text("Planted the quinces.")
    (folder / "garten.md").write_text("Die Himbeeren sind hinter der Tonne.\n\nWer mag Himbeeren?\n")
    library = made(folder)

    def found(question: str) -> tuple[str, str] | None:
        passage = library.search(question)
        return passage and (passage.text, passage.missing)

    assert found("When does the train depart?") == ("The train to Linz departs at 7:15. Marek takes it.", "")
    assert found("When does the night train to Linz depart?")[1] == "night"
    assert found("Where is Marek's blue train ticket for Linz?")[1] == "blue, ticket"
    assert found("When does the train to Belgrade depart?") is None
    assert found("What was done on 4 March 2026?") == ("Planted the quinces.", "")
    assert found("What was done on 4 April 2026?") is None
    assert found("When does Linz' family doctor see patients?") is None
    assert found("When does the vet see patients?") is None, "other notes are about a vet"
    assert found("When does the family doctor see patients?") == ("She sees patients from 8 to 11.", "")
    assert found("Sind die Himbeeren hinter dem Haus?") == ("Die Himbeeren sind hinter der Tonne.", "Haus")


def test_the_readme_shows_what_its_notes_answer():
    """Searches and results as they are printed there, and one of the German note."""
    library = made(REPO / "docs/notes")
    shown = re.findall(r'search\(" (.+)"\) = (.+?)\]', (REPO / "README.md").read_text("utf-8"))
    assert len(shown) == 2
    for words, result in shown:
        found = library.search(words)
        assert result == (f"{found.text} ({found.place})" if found else "nothing")
    assert "Mitte Mai" in library.search("Tomaten ins Beet").text


# ---- Making one

def test_a_changed_file_is_read_again_as_before(folder, capsys):
    """Same field and encoding, silently; after an error, which is said once, the library stays."""
    note = folder / "a.csv"
    note.write_bytes(b"body\nGr\xfcn.\n")
    path = made(folder, field="body", encoding="latin-1").path
    tools = open_library("notes")
    note.write_bytes(b"body\nR\xf6tlich.\n")
    capsys.readouterr()
    tools.refresh()
    assert capsys.readouterr() == ("", "")
    note.unlink()
    for _ in range(2):
        tools.refresh()
    assert capsys.readouterr().err.count("nothing to read") == 1
    assert tools.library.lookup("a").text == Library(path).lookup("a").text == "R\xf6tlich."


def test_any_change_of_a_file_is_seen(folder):
    note = folder / "a.md"
    note.write_text("First.")
    states = [made(folder).manifest["files"]]
    (folder / "a.png").write_text("not read")
    assert fingerprint(str(folder)) == states[0]
    for change in (lambda: os.utime(note, (9, 9)), lambda: (folder / "b.md").touch(), note.unlink):
        change()
        states.append(fingerprint(str(folder)))
    assert len(set(states)) == 4


def test_a_bad_file_is_named_and_the_others_are_read(folder, capsys):
    with pytest.raises(UserError, match="nothing to read"):
        make_library(str(folder))
    (folder / "bad.json").write_text("{")
    (folder / "other.jsonl").write_text('{"title": "no text"}\n')
    (folder / "bad.parquet").write_bytes(b"PAR1 no")
    (folder / "good.md").write_text("The only sentence.")
    assert made(folder).passages == 1
    out = capsys.readouterr().out
    assert all(name in out for name in ("bad.json", "other.jsonl", "bad.parquet"))


# ---- Opening one

def test_no_library_and_a_damaged_one_are_one_line_each(folder, tmp_path):
    (folder / "a.md").write_text("\n\n".join(f"Sentence number {n} is here." for n in range(500)))
    whole = make_library(str(folder)).read_bytes()
    path = tmp_path / "x.sqlite"
    assert "no library" in refused(path) and "did you mean 'notes'?" in refused(library_path("notess"))
    for damaged in (b"", b"no SQLite", whole[:1000], whole[:len(whole) // 2]):
        path.write_bytes(damaged)
        assert "damaged" in refused(path)
    path.write_bytes(whole)
    with sqlite3.connect(path) as older:
        older.execute("UPDATE manifest SET value = '1' WHERE key = 'form'")
    assert "another version" in refused(path)


def test_a_search_is_bounded_in_work_not_in_time_and_says_that_it_was_cut_off(folder, monkeypatch):
    """
    20,000 passages that all have two of the words: found however slow the machine is, and with little work if a third
    word is rare. A question that needs more work is not answered with "nothing".
    """
    (folder / "a.txt").write_text("\n\n".join(f"The code of box {n} is {n}{n}." for n in range(20_000)))
    library = made(folder)
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    assert library.search("code box") and library.lookup("code box")
    monkeypatch.setattr(reader, "MOST_WORK", 2)
    assert library.search("What is the code of box 17034?").text == "The code of box 17034 is 1703417034."
    tools = Tools(library)
    assert "too long" in tools.result("search('code box')", Tokenizer([]), calls=0, room=100)
    assert tools.result("search('pears')", Tokenizer([]), calls=0, room=100) == "nothing"
    assert tools.asked(["code box"]) == ("code box", True), "its result says so"
    assert len(passages_of("search", "notes", "train")) > 15_000, "training reads all, however long it takes"
