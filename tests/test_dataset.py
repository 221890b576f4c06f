"""Text in, shards out. The oracles are pyarrow, hashlib and sets of the texts that went in."""
import bz2
import csv
import gzip
import hashlib
import itertools
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import REPO, run_module

from nanochat.corpus import sources, tinyworld
from nanochat.corpus.make_dataset import ensure_dataset, make
from nanochat.data import shard_reader
from nanochat.runtime.errors import UserError

LANGUAGES = ["Grüße aus Köln, schöne Straße.", "Привет, как дела?", "今日はいい天気ですね。", "مرحبا بالعالم",
             "नमस्ते दुनिया", "😀👩‍👩‍👧"]


@pytest.fixture(autouse=True)
def small_tinyworld(monkeypatch):
    monkeypatch.setattr(sources, "TINYWORLD_BYTES", 200_000)

    def generate(seed: int, index: int) -> tinyworld.Document:
        return tinyworld.Document(f"Document {index} of world {seed}. " * 9, topic="", bits=0.0)

    monkeypatch.setattr(tinyworld, "generate", generate)


@pytest.fixture
def inputs(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def files_of(name: str) -> list[Path]:
    return sorted((shard_reader.dataset_dir(name)).glob("*.parquet"))


def rows_of(path: Path) -> list[str]:
    return pq.read_table(path)["text"].to_pylist()


def all_rows(name: str) -> list[str]:
    return [row for path in files_of(name) for row in rows_of(path)]


def made(inputs: Path, **settings) -> list[str]:
    """The sorted documents of the data set `in`, made now."""
    make(str(inputs), **settings)
    return sorted(all_rows("in"))


def check_sums(name: str) -> None:
    sums = {shard["file"]: shard["sha256"] for shard in shard_reader.load_manifest(name)["shards"]}
    assert sums == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files_of(name)}


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> None:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))


def texts(count: int, tag: str = "") -> list[str]:
    return [f"text{tag} {i} " + " ".join(f"w{(i * 7 + k) % 101}" for k in range(30)) for i in range(count)]


def refused(match: str):
    return pytest.raises(UserError, match=match)


# ---- The form on disk

def test_manifest_says_what_pyarrow_and_hashlib_find(inputs):
    write_jsonl(inputs / "a.jsonl", texts(5000))
    assert made(inputs, shard_mb=0.2) == sorted(texts(5000))
    manifest = shard_reader.load_manifest("in")
    expected = []
    for number, path in enumerate(files_of("in")):
        rows = rows_of(path)
        expected.append({
            "file": f"shard_{number:05d}.parquet", "rows": len(rows), "bytes": path.stat().st_size,
            "text_bytes": sum(len(row.encode()) for row in rows),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    assert manifest["shards"] == expected and len(expected) > 3
    assert manifest["source"] == str(inputs) and manifest["seed"] == 42 and manifest["documents"] == 5000
    train_sizes = [entry["text_bytes"] for entry in expected[:-1]]
    assert max(train_sizes) < 1.1 * min(train_sizes)  # no crumb of a last shard


def test_no_document_on_both_sides_though_most_are_duplicates(inputs):
    """Every text up to 40 times, in several files, in an order that would put copies into every shard."""
    distinct = texts(800)
    copies = [text for i, text in enumerate(distinct) for _ in range(1 + i % 40)]
    for part in range(3):
        write_jsonl(inputs / f"{part}.jsonl", copies[part::3])
    manifest = make(str(inputs), shard_mb=0.01)
    *train, val = [set(rows_of(path)) for path in files_of("in")]
    assert len(train) > 3 and val and not val & set.union(*train)
    assert Counter(all_rows("in")) == Counter(distinct)  # each exactly once, none lost
    assert manifest["duplicates"] == len(copies) - len(distinct)


def test_shuffle_depends_on_the_seed_and_on_nothing_else(inputs):
    for name, seed, order in (("one", 1, 1), ("two", 2, 1), ("three", 1, -1)):
        write_jsonl(inputs / "a.jsonl", texts(3000)[::order])
        make(str(inputs), name=name, seed=seed)
    one, two, three = map(all_rows, ("one", "two", "three"))
    assert one == three != two and sorted(one) == sorted(two)
    prints = [shard_reader.fingerprint(name) for name in ("one", "two", "three")]
    assert prints[0] == prints[2] != prints[1]
    # A random order: of neighbours in the input hardly any are neighbours in the output (expected: 2 of 3000).
    number = [int(text.split()[1]) for text in one]
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(number)) < 15


# ---- Sources

PACK = {"gz": gzip.compress, "zst": zstandard.compress, "bz2": bz2.compress, "xz": lzma.compress, "": bytes}


@pytest.mark.parametrize("kind", ["txt", "md.zst", "txt.gz", "rst.xz", "markdown.bz2", "jsonl", "jsonl.gz",
                                  "ndjson.zst", "parquet"])
def test_every_kind_of_file_gives_the_same_documents(inputs, kind):
    documents = texts(20) + LANGUAGES
    pack = PACK[kind.partition(".")[2]]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents).encode()
    if kind == "parquet":
        pq.write_table(pa.table({"other": range(len(documents)), "text": documents}), inputs / "a.parquet")
    elif "json" in kind:
        (inputs / f"a.{kind}").write_bytes(pack(lines))
    else:
        for i, text in enumerate(documents):
            (inputs / f"{i}.{kind}").write_bytes(pack(text.encode()))
    assert made(inputs) == sorted(documents)


def test_a_file_or_folder_names_its_data_set(inputs, monkeypatch):
    (inputs / "book.txt.gz").write_bytes(gzip.compress("\n".join(texts(1000)).encode()))
    make(f"{inputs}/book.txt.gz")
    monkeypatch.chdir(inputs.parent)
    make("in")  # a relative folder
    assert all_rows("in") == all_rows("book") and len(all_rows("in")) > 8
    assert sorted(line for row in all_rows("in") for line in row.splitlines()) == sorted(texts(1000))


def test_json_and_csv_are_read(inputs):
    expected = texts(70)
    expected[4] += '\nwith "quotes", a comma; and\r\nline ends'
    expected[5] = "long " * 60_000
    mixed = [*({"text": text} for text in expected[:10]), *expected[10:20]]
    (inputs / "a.json").write_text(json.dumps(mixed, indent=1))
    write_jsonl(inputs / "b.json", expected[20:30])
    (inputs / "b.json").write_bytes(gzip.compress((inputs / "b.json").read_bytes()))
    (inputs / "b.json").rename(inputs / "b.json.gz")
    (inputs / "c.json").write_text(json.dumps({"text": expected[30]}))
    for name, part, delimiter in (
        ("a.csv", expected[31:40], ","), ("b.csv", expected[40:50], ";"),
        ("c.csv", expected[50:60] + expected[4:6], "\t"),
    ):
        with open(inputs / name, "w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows([["id", "text"], *enumerate(part)])
    with gzip.open(inputs / "d.csv.gz", "wt") as file:
        csv.writer(file).writerows([["text", "other"], *([text, ""] for text in expected[60:])])
    assert made(inputs) == sorted(expected) and shard_reader.load_manifest("in")["duplicates"] == 2


def numbered(line: str) -> str:
    return "".join(f"{i} {line}\n" for i in range(3000))


TALK = "".join(f"日本の漢字とかな、カタカナ{i}。" for i in range(20))
DUTCH = numbered("Wie weg is, is gezien.") + "Één reünie"
LATE = "".join(f"{i} " for i in range(180_000)) + " naïve café"  # after the first mebibyte


@pytest.mark.parametrize(("encoding", "text", "guessed"), [
    ("gb18030", numbered("今天天气很好，我们去公园散步。他说：你好，世界！"), True),
    ("utf-16", numbered("plain English"), True),
    ("cp1251", numbered("Привет, как дела? Сегодня хорошая погода."), True), ("latin-1", DUTCH, False),
    ("iso-2022-jp", f"plain ASCII\n{TALK}", False), ("iso2022_kr", "한국어 문장\n", False), ("euc_jp", TALK, False),
    ("cp1252", LATE, False)], ids=range(8))
def test_another_encoding_is_refused_and_is_read_where_it_is_named(inputs, encoding, text, guessed):
    """Latin-1 that is nearly ASCII, 7-bit encodings that are valid UTF-8, and letters after the first mebibyte."""
    data = text.encode(encoding)
    (inputs / "a.txt").write_bytes(data)
    (inputs / "utf8.md").write_text(f"{LANGUAGES}")  # stays as it is
    (inputs / "log.txt").write_bytes(b"\x1b[31mred\x1b(B plain, a~b, x =~{2}\n" * 20)  # and so does this
    with refused(r"a\.txt is not utf-8: .*(--encoding=|repair it)") as error:
        make(str(inputs))
    assert "\n" not in str(error.value) and not files_of("in")
    if guessed:
        guess = str(error.value).split("--encoding=")[1].split(",")[0]
        assert data.decode(guess) == text, "a library's guess, by another name"
    rows = made(inputs, encoding=encoding)
    assert shard_reader.load_manifest("in")["invalid"] == 0 and f"{LANGUAGES}" in rows
    assert "\x1b[31mred" in "".join(rows)
    (inputs / "log.txt").unlink()
    assert Counter("".join(made(inputs, encoding=encoding))) == Counter(data.decode(encoding)) + Counter(f"{LANGUAGES}")


@pytest.mark.parametrize("text, encoding, words", [
    ("Die Haftpflichtversicherung kostet 84 Euro im Jahr. Der Termin ist im März, sagt sie.", "cp1252", "im März"),
    ("Un long début sans accent, ou presque. Le café est fermé à Noël ; où est la clé ?", "cp1252", "long début"),
    ("Zażółć gęślą jaźń, proszę pana. Dziękuję bardzo za wszystko.", "cp1250", "Zażółć"),
    ("Příliš žluťoučký kůň úpěl ďábelské ódy.", "cp1250", "Příliš"), ("Привет, как дела?" * 9, "cp1251", "Привет")])
def test_the_hint_quotes_the_words_that_another_encoding_would_change(inputs, text, encoding, words):
    """Not the beginning, which every encoding reads alike: then nobody could see whether the guess is right."""
    (inputs / "a.txt").write_bytes(text.encode(encoding))
    with refused(rf"a\.txt is not utf-8: .*--encoding={encoding}, .*{words}"):
        make(str(inputs))


def test_names_of_encodings_that_are_none_and_ascii_that_stays(inputs):
    (inputs / "a.txt").write_bytes(TALK.encode("iso-2022-jp"))
    assert "\x1b$B" in "".join(made(inputs, encoding="ascii"))
    with refused("cannot read .*a.txt: unknown encoding: gb9999"):
        make(str(inputs), encoding="gb9999")


def test_a_few_bad_bytes_among_valid_ones_are_replaced_and_counted_whatever_encoding_is_named(inputs, capsys):
    damaged = "\n".join(texts(900) + LANGUAGES * 3).encode() + b"caf\xe9" * 10
    (inputs / "a.txt").write_bytes(damaged)
    (inputs / "b.jsonl").write_bytes(b'{"text": "half \\ud800 pair"}\n{"text": "whole \\ud83d\\ude00"}')
    assert make(str(inputs))["invalid"] == 10
    assert "1 files are damaged UTF-8, whose unreadable characters became U+FFFD: " in capsys.readouterr().out
    assert {"half ? pair", "whole 😀"} <= set(all_rows("in"))
    assert LANGUAGES[0] in "".join(made(inputs, encoding="latin-1")), "not read wrongly for ten bytes"
    assert shard_reader.load_manifest("in")["invalid"] == 10 and "damaged UTF-8" in capsys.readouterr().out
    (inputs / "a.txt").write_bytes(DUTCH.encode("latin-1"))
    with refused("a.txt is not cp932: [0-9,]+ of its [0-9,]+ characters cannot be read; "):
        make(str(inputs), encoding="cp932")


def test_a_byte_order_mark_and_empty_documents_are_dropped(inputs):
    lines = '\ufeff{"text": "first"}', "", '{"text": "  "}', '{"text": null}', '{"text": "second"}'
    (inputs / "a.jsonl").write_text("\n".join(lines))
    (inputs / "b.txt").write_bytes(b"\xef\xbb\xbfthird")
    assert made(inputs) == ["first", "second", "third"]


def test_huggingface_datasets_of_a_local_folder(inputs, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(inputs.parent / "hf"))
    hf = pytest.importorskip("datasets")
    monkeypatch.setattr(hf.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)  # seconds, each time it shuffles
    (inputs / "books").mkdir()
    pq.write_table(pa.table({"content": texts(500)}), inputs / "books" / "a.parquet")
    make(f"hf:{inputs}/books", field="content")
    assert sorted(all_rows("books")) == sorted(texts(500))
    make(f"hf:{inputs}/books", field="content", name="part", num_shards=1, shard_mb=0.01)
    assert 20 < len(all_rows("part")) < 150
    with refused(r"no field 'text'; there is: content"):
        make(f"hf:{inputs}/books", name="other")
    assert not files_of("other")


def test_python_holds_the_sources_and_the_reference_and_keeps_a_file_on_one_side():
    make("python")
    documents = list(sources.python_documents())
    whole = {text for text, _ in documents}
    assert Path(json.__file__).read_text() in whole and len(documents) > 500
    assert any(text.startswith("Boolean operations") for text in whole)  # a page of help()
    kin_of = dict(documents)
    *train, val = [{kin_of[row] for row in rows_of(path)} for path in files_of("python")]
    assert len(val) > 5 and not val & set.union(*train)


# ---- Very little text

@pytest.mark.parametrize("count", [1, 3])
def test_few_documents_still_give_two_shards(inputs, count):
    for i in range(count):
        (inputs / f"{i}.txt").write_text("\n\n".join([f"Title {i}", *texts(10, str(i))]))
    make(str(inputs))
    train, val = (rows_of(path) for path in files_of("in"))
    assert train and val and not set(train) & set(val)
    together = [part for row in train + val for part in row.strip().split("\n\n")]
    expected = [part for i in range(count) for part in [f"Title {i}", *texts(10, str(i))]]
    assert sorted(together) == sorted(expected)
    assert sum(map(len, val)) <= sum(map(len, train))  # of several small documents a whole one is held out


def test_too_little_text_is_one_line(inputs):
    (inputs / "a.txt").write_text("same\n\nsame")
    with refused("too little text in .*in: .* bytes") as caught:
        make(str(inputs))
    assert "\n" not in str(caught.value) and not files_of("in")


# ---- Damage and misuse

PARQUET = pa.BufferOutputStream()
pq.write_table(pa.table({"number": range(9000), "body": texts(9000)}), PARQUET)
PARQUET = PARQUET.getvalue().to_pybytes()


@pytest.mark.parametrize(("file", "content", "problem"), [
    ("a.csv", b"id,body\n1,x\n", "a.csv, line 2: no field 'text'; there is: id, body; choose with --field"),
    ("a.csv", b"id,text\n1,x\n2,Hello, she said\n", "a.csv, line 3: not as many fields as the 2 that the first"),
    ("a.csv", b'text,id\n"x",1\n"y" z,2\n', "a.csv, line 3: ',' expected after .* --delimiter=… names"),
    ("a.csv", b'text,id\n"He said \\"x\\", C:",1\n"y",2\n', "a.csv, line 2: ',' expected .* doubled in quotations"),
    ("a.csv", b"text,id,text\nx,1,y\n", "a.csv: two columns are called 'text'"),
    ("a.csv", b"sep=;\r\ntext;id\r\nx;1\r\n", "a.csv begins with Excel's 'sep=;': remove that line; --delimiter="),
    ("a.txt.xz", lzma.compress(os.urandom(9000).hex().encode())[:5000], "cannot read .*a.txt.xz"),
    ("a.json", b"[1, 2]", "a.json, entry 1: no field 'text'; there is: int"),
    ("a.json", b'{"text": "x"}\n{"text"', "a.json, line 2: not JSON"),
    ("a.jsonl", b'{"text": "a"}\n\n{"body": "b", "id": 1}\n', "line 3: no field 'text'; there is: body, id"),
    ("a.jsonl.gz", gzip.compress(os.urandom(9000).hex().encode())[:5000], "cannot read .*a.jsonl.gz"),
    ("a.parquet", PARQUET, "a.parquet: no field 'text'; there is: number, body"),
    ("a.pdf", b"%PDF", r"no documents in .*in: expected .*\.tsv \.parquet \(or \.gz/.* of them\)$"),
], ids=lambda part: part if isinstance(part, str) else "")
def test_damaged_input_is_one_line_with_its_place_and_leaves_nothing(inputs, base_folder, file, content, problem):
    (inputs / file).write_bytes(content)
    with refused(problem) as caught:
        make(str(inputs))
    assert "\n" not in str(caught.value) and os.listdir(base_folder / "data") == [".in.lock"]


def test_damaged_pages_of_a_parquet_file(inputs):
    (inputs / "a.parquet").write_bytes(PARQUET[:-9000] + bytes(2000) + PARQUET[-7000:])  # the footer is whole
    with refused(r"cannot read .*a\.parquet: "):
        make(str(inputs), field="body")


def test_what_is_not_read_is_said_with_a_count_and_a_name(inputs, capsys):
    (inputs / "deep" / ".git").mkdir(parents=True)
    write_jsonl(inputs / "deep" / "a.jsonl", texts(9))
    for name, content in (
        ("deep/.git/secret.txt", "secret"), ("book.pdf", "%PDF"), (os.fsdecode(b"caf\xe9.pdf"), "%PDF"),
        ("settings.json", '{"theme": "dark"}'), ("tsconfig.json", '{\n  // with comments\n  "strict": true}'),
        ("list.csv", "name,size\na,1\n"),
    ):
        (inputs / name).write_text(content)
    (inputs / "gone.txt").symlink_to("nowhere.txt")
    assert made(inputs) == texts(9)
    out = capsys.readouterr().out
    for line in (
        "2 files are not read (expected .txt .md .rst .jsonl", "book.pdf, caf?.pdf",
        "1 files are hidden, and not read: .git\n", f"1 files cannot be opened: {inputs}/gone.txt\n",
        "3 files are not read, since they hold no such text: ", "tsconfig.json, line 1: not JSON",
        "settings.json, entry 1: no field 'text'; there is: theme",
        "list.csv, line 2: no field 'text'; there is: name, size",
    ):
        assert line in out
    (inputs / "deep" / "a.jsonl").unlink()
    with refused("list.csv, line 2: no field 'text'"):
        make(str(inputs))
    with refused("--delimiter=comma: expected one character, or tab"):
        make(str(inputs), delimiter="comma")


def test_linked_folders_are_read_once_and_names_need_not_be_utf8(inputs, tmp_path):
    store = tmp_path / "store"
    (store / "sub").mkdir(parents=True)
    distinct = texts(5)
    for i, folder in enumerate([inputs, store, store / "sub"]):
        (folder / os.fsdecode(b"caf\xe9 %d.txt" % i)).write_text(distinct[i])
    pq.write_table(pa.table({"text": distinct[3:]}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").rename(inputs / os.fsdecode(b"\xe9.parquet"))
    for i, target in enumerate([store, store, store / "sub", inputs]):  # two ways to one folder, and a circle
        (inputs / f"link{i}").symlink_to(target)
    (store / "back").symlink_to(inputs)
    assert made(inputs) == distinct and shard_reader.load_manifest("in")["duplicates"] == 0


# ---- Texts in one file

@pytest.mark.parametrize(("end", "longest"), [
    ("\n<|endoftext|>\n", 1), ("\r\n</s> \r\n", 1), ("\n<|end_of_text|>\n\n", 9000)])
def test_separators_between_stories_end_documents(inputs, capsys, end, longest):
    stories = [f"Story {i}.\n\nIt says <|endoftext|> in a line, </s> too.\n"
               + "".join(f"And {i} {k} more.\n" for k in range(longest if i % 99 == 98 else i % 9)) for i in range(400)]
    (inputs / "a.txt").write_bytes((end.join(stories) + end.rstrip()).encode())
    (inputs / "b.txt").write_text("Another one")
    rows = [row.strip() for row in made(inputs)]
    assert Counter("\n".join(rows).split()) == Counter("".join(stories).split()) + Counter("Another one".split())
    if longest == 1:
        assert sorted(rows) == sorted([*(story.strip() for story in stories), "Another one"])
    else:  # long ones are cut besides
        assert len(rows) > 401 and not any(row.count("Story") > 1 for row in rows)
    assert f"1 files are divided at lines of {end.strip()}: {inputs}/a.txt (400)\n" in capsys.readouterr().out


def test_of_a_few_texts_in_different_languages_none_is_held_out_whole(inputs):
    alphabets = [[chr(start + i) for i in range(20)] for start in range(0x4e00, 0x4e00 + 25 * 20, 20)]
    for number, letters in enumerate(alphabets):
        paragraphs = ["".join(letters[(i * k) % 20] for k in range(60)) for i in range(1, 60)]
        (inputs / f"{number}.txt").write_text("\n\n".join(paragraphs))
    make(str(inputs))
    train, val = ("".join(rows_of(path)) for path in files_of("in"))
    assert all(set(letters) & set(train) for letters in alphabets), "some are validated on and never trained on"
    assert len(val) > 0.05 * len(train)


# ---- CSV as people have it

@pytest.mark.parametrize(("name", "content", "settings"), [
    ("a.tsv", "id\ttext\n1\t{0}\n2\t{1}\n", {}),
    ("a.csv", 'text\tlabel\n"{0}\t1\n{1}"\t0\n', {}),
    ("a.csv", 'text\tlabel\n"{0}" he said\t1\n{1}\t0\n', {}),
    ("a.csv", '"name, given, family";text\nAda;{0}\nBob;{1}\n', {}),
    ("a.csv", "id,a;b;c;d,text\n1,2,{0}\n1,2,{1}\n", {}),
    ("a.csv", "id|text\n1|{0}\n2|{1}\n", {}),
    ("a.csv", "id:text\n1:{0}\n2:{1}\n", {"delimiter": ":"}),
    ("a.csv", "text\tid,no\n{0}\t1\n{1}\t2\n", {"delimiter": "tab"}),
], ids=range(8))
def test_csv_of_other_programs_keeps_its_rows(inputs, name, content, settings):
    """The oracle is the text that was written, whose marks may not join two rows."""
    pair = ["first words of one", "and those of another"]
    (inputs / name).write_text(content.format(*pair), newline="")
    rows = made(inputs, **settings)
    assert len(rows) == 2 and all(sum(part in row for row in rows) == 1 for part in pair)
    assert not any("\n" in row or "\t" in row for row in rows)


def test_unknown_sources():
    for source in ("nope", ""):
        with refused(f"no source '{source}', and no such path; expected tinyworld, python, "):
            make(source)


def test_names_cannot_leave_the_folder_or_take_the_place_of_other_data(inputs, tmp_path):
    write_jsonl(inputs / "a.jsonl", texts(50))
    for name in ("../up", ".hidden"):
        with refused("cannot name a data set"):
            make(str(inputs), name=name)
    with refused("data set 'tinyworld' belongs to 'tinyworld'; choose another name"):
        make(str(inputs), name="tinyworld")
    make(str(inputs), name="mine")
    shutil.copytree(inputs, tmp_path / "mine")
    with refused("data set 'mine' belongs to .*; choose another name"):
        make(str(tmp_path / "mine"))
    assert len(all_rows("mine")) == 50
    write_jsonl(inputs / "a.jsonl", texts(60))
    make(str(inputs), name="mine")  # the same folder with more in it replaces what was there
    assert len(all_rows("mine")) == 60


# ---- Reading

def test_what_is_missing_or_damaged_is_named(inputs, base_folder):
    with refused(r"no data set 'python' in .*; make it: .* --source=python --name=python$"):
        shard_reader.load_manifest("python")
    with refused("no data set 'mine'"):
        ensure_dataset("mine")
    with refused(r"no .* 'fineweb_edu'.* did you mean 'fineweb-edu'\?$"):
        ensure_dataset("fineweb_edu")
    assert not base_folder.exists()  # asking makes nothing
    write_jsonl(inputs / "a.jsonl", texts(3000))
    make(str(inputs), name="mine", shard_mb=0.1)
    first = files_of("mine")[0]
    whole, manifest = first.read_bytes(), (first.parent / "manifest.json").read_bytes()

    first.write_bytes(whole[:-100])
    with refused(r"shard_00000\.parquet is missing or does not have the \d+ bytes that the manifest"):
        shard_reader.load_manifest("mine")
    with refused(r"shard_00000\.parquet cannot be read .* make the data set again"):
        list(shard_reader.shard_texts(first))
    (first.parent / "manifest.json").write_bytes(manifest[:-50])
    with refused("manifest.json is damaged"):
        shard_reader.load_manifest("mine")
    make(str(inputs), name="mine", shard_mb=0.1)  # and the cure that was named works
    assert first.read_bytes() == whole and (first.parent / "manifest.json").read_bytes() == manifest


# ---- The command, kills and full disks

def test_the_command(inputs):
    write_jsonl(inputs / "a.jsonl", texts(300) + texts(5), field="body")
    done = run_module("scripts.dataset", f"--source={inputs}", "--name=mine", "--field=body")
    assert done.returncode == 0, done.stderr
    assert "mine: 300 documents" in done.stdout and "duplicates: 5" in done.stdout
    assert sorted(all_rows("mine")) == sorted(texts(300))
    failed = run_module("scripts.dataset", "--source=nope")
    assert failed.returncode == 1 and re.fullmatch("error: no source 'nope'.*\n", failed.stderr)


def test_a_build_killed_at_any_moment_leaves_the_old_data_or_none(inputs, base_folder):
    """Kill a real process while it reads, and while it writes; then the same command works and clears the debris."""
    write_jsonl(inputs / "a.jsonl", texts(30_000))
    start = [sys.executable, "-m", "scripts.dataset", f"--source={inputs}", "--name=mine", "--shard_mb=0.2"]

    def kill_when(pattern: str) -> None:
        process = subprocess.Popen(start, cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 200
        while not list((base_folder / "data").glob(pattern)) and process.poll() is None:
            assert time.monotonic() < deadline, pattern
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"finished before {pattern} was seen"

    kill_when(".mine.tmp-*/mine/bucket_00")
    assert not (base_folder / "data" / "mine").exists() and list((base_folder / "data").glob(".mine.tmp-*"))
    with refused("no data set 'mine'"):
        shard_reader.load_manifest("mine")
    done = subprocess.run(start, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(all_rows("mine")) == sorted(texts(30_000)) and not list((base_folder / "data").glob(".mine.tmp-*"))

    before = shard_reader.fingerprint("mine")
    write_jsonl(inputs / "a.jsonl", texts(40_000))
    kill_when(".mine.tmp-*/mine/shard_00002.parquet")
    assert shard_reader.fingerprint("mine") == before
    check_sums("mine")
    make(str(inputs), name="mine")
    assert len(all_rows("mine")) == 40_000 and sorted(os.listdir(base_folder / "data")) == [".mine.lock", "mine"]


def test_two_builds_at_once_are_one(inputs):
    write_jsonl(inputs / "a.jsonl", texts(5000))
    start = [sys.executable, "-m", "scripts.dataset", f"--source={inputs}", "--name=mine"]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(start, cwd=REPO, **piped) for _ in range(2)]
    assert [(process.communicate(timeout=300)[1], process.returncode) for process in both] == [("", 0), ("", 0)]
    check_sums("mine")
    assert sorted(all_rows("mine")) == sorted(texts(5000))
