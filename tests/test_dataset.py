"""Text in, shards out. The oracles are pyarrow, hashlib and sets of the texts that went in."""
import bz2
import csv
import gzip
import hashlib
import itertools
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from nanochat.corpus import sources
from nanochat.corpus.make_dataset import make
from nanochat.data import shard_reader
from nanochat.data.embedded import ensure_dataset
from nanochat.library.own_files import own_documents
from nanochat.runtime.errors import UserError

LANGUAGES = ["Grüße aus Köln, schöne Straße.", "Привет, как дела?", "今日はいい天気ですね。", "مرحبا بالعالم",
             "नमस्ते दुनिया", "😀👩‍👩‍👧"]


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

PACK = {"gz": gzip.compress, "zst": zstandard.compress, "bz2": bz2.compress, "": bytes}


@pytest.mark.parametrize("kind", ["txt", "md.zst", "txt.gz", "rst", "markdown.bz2", "jsonl", "jsonl.gz",
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


def test_json_and_csv_are_read(inputs):
    expected = texts(60)
    expected[4] += '\nwith "quotes", a comma; and\r\nline ends'
    expected[5] = "long " * 60_000
    mixed = [*({"text": text} for text in expected[:10]), *expected[10:20]]
    (inputs / "a.json").write_text(json.dumps(mixed, indent=1))
    write_jsonl(inputs / "b.json", expected[20:30])
    (inputs / "c.json").write_text(json.dumps({"text": expected[30]}))
    with open(inputs / "a.csv", "w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(expected[31:] + expected[4:6])])
    assert made(inputs) == sorted(expected) and shard_reader.load_manifest("in")["duplicates"] == 2


TALK = "".join(f"日本の漢字とかな、カタカナ{i}。" for i in range(20))
LATE = "".join(f"{i} " for i in range(180_000)) + " naïve café"  # after the first mebibyte


@pytest.mark.parametrize(("encoding", "text"), [
    ("gb18030", "今天天气很好，我们去公园散步。他说：你好，世界！" * 99), ("utf-16", "plain English\n" * 99),
    ("cp1251", "Привет, как дела? Сегодня хорошая погода." * 99), ("cp1252", LATE)], ids=str)
def test_another_encoding_is_refused_and_is_read_where_it_is_named(inputs, encoding, text):
    (inputs / "a.txt").write_bytes(text.encode(encoding))
    (inputs / "utf8.md").write_text(f"{LANGUAGES}")  # stays as it is
    with refused(r"a\.txt is not utf-8: ") as error:
        make(str(inputs))
    assert "\n" not in str(error.value) and not files_of("in")
    if text != LATE:
        guess = str(error.value).split("--encoding=")[1].split(",")[0]
        assert text.encode(encoding).decode(guess) == text, "a library's guess, by another name"
    assert Counter("".join(made(inputs, encoding=encoding))) == Counter(text) + Counter(f"{LANGUAGES}")


@pytest.mark.parametrize(("encoding", "text"), [
    ("cp1252", "Le garçon était à l’école où les élèves fêtent Noël : même la forêt dort, naïve sœur."),
    ("cp1252", "Déjà vu, voilà le problème des élèves, près de là."), ("cp1252", "Perché la città è più bella?"),
    ("cp1252", "Die Bücher größerer Häuser fallen über die Straße."), ("cp1252", "Børnene er på gården, de er røde."),
    ("cp1252", "As ações não são boas, mas a canção põe limões e pães à mesa."),
    ("cp1252", "El niño comió piña mañana; ¿dónde está el camión?"), ("cp1250", "Děti běží do školy, řeka je široká."),
    ("cp1250", "Książka leży na stole, a żółty kot śpi."),
    ("cp1250", "Băiatul merge la şcoală şi mănâncă pâine. Fata citeşte o carte în grădină, iar ţara e frumoasă. "),
    ("cp1250", "Az öreg hölgy egy kőből épült házban gyűjtötte a fűszereket."),
    ("cp1250", "Dječak čita knjigu, šuma je tiha.")])
@pytest.mark.parametrize("times", [1, 99])
def test_a_guess_tells_western_europe_from_central(inputs, encoding, text, times):
    """Nearly all bytes are letters in either encoding, so that a wrong guess would be learned."""
    (inputs / "a.txt").write_bytes(times * text.encode(encoding))
    with refused(f"--encoding={encoding}, which reads"):
        make(str(inputs))


def test_a_named_encoding_of_ascii_bytes_is_used_where_it_fits(inputs):
    (inputs / "a.txt").write_bytes(TALK.encode("iso-2022-jp"))
    (inputs / "log.txt").write_bytes(b"\x1b[31mred\x1b(B plain")
    assert sorted("".join(made(inputs, encoding="iso2022_jp"))) == sorted(TALK + "\x1b[31mred\x1b(B plain")
    with refused("gb9999"):
        make(str(inputs), encoding="gb9999")


def test_a_few_bad_bytes_among_valid_ones_are_replaced_and_said_whatever_encoding_is_named(inputs, capsys):
    (inputs / "a.txt").write_bytes("\n".join(texts(900) + LANGUAGES * 3).encode() + b"caf\xe9" * 10)
    (inputs / "b.jsonl").write_bytes(b'{"text": "half \\ud800 pair"}\n{"text": "whole \\ud83d\\ude00"}')
    for encoding in ("utf-8", "latin-1"):
        rows = made(inputs, encoding=encoding)
        assert {"half ? pair", "whole 😀"} <= set(rows) and LANGUAGES[0] in "".join(rows)
        assert "".join(rows).count("\ufffd") == 10 and "a.txt (10)" in capsys.readouterr().out


def test_a_byte_order_mark_and_empty_documents_are_dropped(inputs):
    lines = '\ufeff{"text": "first"}', "", '{"text": "  "}', '{"text": null}', '{"text": "second"}'
    (inputs / "a.jsonl").write_text("\n".join(lines))
    (inputs / "b.txt").write_bytes(b"\xef\xbb\xbfthird")
    (inputs / "c.parquet").touch()
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


# ---- Damage and misuse

def test_a_file_that_vanishes_while_others_are_read_is_named(inputs):
    for name in "ab":
        (inputs / f"{name}.txt").write_text(name)
    documents = own_documents(inputs, "utf-8", "text")
    assert next(documents) == ("a", "a")
    (inputs / "b.txt").unlink()
    with refused("cannot read .*b.txt: .*No such file"):
        next(documents)


PARQUET = pa.BufferOutputStream()
pq.write_table(pa.table({"number": range(9000), "body": texts(9000)}), PARQUET)


@pytest.mark.parametrize(("file", "content", "problem"), [
    ("a.csv", b"id,body\n1,x\n", "a.csv, line 2: no field 'text'; there is: id, body"),
    ("a.csv", b"id,text\n1,x\n2,Hello, she said\n", "a.csv, line 3: not as many fields"),
    ("a.csv", b'id,text\n1,x\n2,"y\nz"\n3,"Hello\n4,w\n5,v\n', "a.csv, line 5: unexpected end"),
    ("a.csv", b"text,id,text\nx,1,y\n", "a.csv: two columns are called 'text'"),
    ("a.csv", b"sep=;\r\ntext;id\r\nx;1\r\n", "a.csv begins with Excel's 'sep=;'"),
    ("a.tsv", b'text\tid\n"x" he said\t1\ny\t2\n', "a.tsv, line 2: "),
    ("a.jsonl", b'{"text": "a"}\n\n{"body": "b", "id": 1}\n', "line 3: no field 'text'; there is: body, id"),
    ("a.jsonl", b'{"text": "x"}\n{"text"', "a.jsonl, line 2: not JSON"),
    ("a.jsonl.gz", gzip.compress(os.urandom(9000).hex().encode())[:5000], "cannot read .*a.jsonl.gz"),
    ("a.parquet", PARQUET.getvalue().to_pybytes(), "a.parquet: no field 'text'; there is: number, body"),
    ("a.txt", b"same", "too little text"),
    ("a.pdf", b"%PDF", r"no documents in .*in: expected .*\.tsv \.parquet"),
], ids=lambda part: part if isinstance(part, str) else "")
def test_damaged_input_is_one_line_with_its_place_and_leaves_nothing(inputs, base_folder, file, content, problem):
    (inputs / file).write_bytes(content)
    with refused(problem) as caught:
        make(str(inputs))
    assert "\n" not in str(caught.value) and os.listdir(base_folder / "data") == [".in.lock"]


def test_what_is_not_read_is_said_by_name(inputs, capsys):
    write_jsonl(inputs / "a.jsonl", texts(9))
    (inputs / ".git").mkdir()
    for name, content in ((".git/secret.txt", "secret"), (os.fsdecode(b"caf\xe9.pdf"), "%PDF"),
                          ("settings.json", '{"theme": "dark"}'), ("tsconfig.json", '{\n  // comment\n}')):
        (inputs / name).write_text(content)
    (inputs / "gone.txt").symlink_to("nowhere.txt")
    (inputs / "circle").symlink_to(inputs)
    assert made(inputs) == texts(9)
    out = capsys.readouterr().out
    assert all(name in out for name in ("caf?.pdf", "gone.txt", "circle", "tsconfig.json", "settings.json"))
    (inputs / "a.jsonl").unlink()
    with refused("settings.json, entry 1: no field 'text'"):
        make(str(inputs))


# ---- Texts in one file

@pytest.mark.parametrize("end", ["\n<|endoftext|>\n", "\r\n</s> \r\n", "\n<|end_of_text|>\n\n"], ids=range(3))
def test_separators_between_stories_end_documents(inputs, end):
    stories = [f"Story {i}.\n\nIt says <|endoftext|> in a line, </s> too.\n{'More. ' * (i % 9)}" for i in range(400)]
    (inputs / "a.txt").write_bytes((end.join(stories) + end.rstrip()).encode())
    (inputs / "b.txt").write_text("Another one")
    assert sorted(row.strip() for row in made(inputs)) == sorted([*(story.strip() for story in stories), "Another one"])


@pytest.mark.parametrize(("name", "content"), [
    ("a.tsv", "id\ttext\n1\t{0}, or so\n2\t{1}\n"), ("a.csv", '"name, given";text\nAda;{0}\nBob;{1}\n'),
    ("a.csv", "id,a;b;c;d,text\n1,2,{0}\n1,2,{1}\n"), ("a.csv", "id|text\n1|{0}\n2|{1}\n")], ids=range(4))
def test_csv_of_other_programs_keeps_its_rows(inputs, name, content):
    pair = ["first words of one", "and those of another"]
    (inputs / name).write_text(content.format(*pair), newline="")
    rows = made(inputs)
    assert len(rows) == 2 and all(sum(part in row for row in rows) == 1 for part in pair)


def test_a_data_set_takes_the_place_of_its_own_source_only(inputs, tmp_path):
    write_jsonl(inputs / "a.jsonl", texts(50))
    for name in ("../up", ".hidden", "tinyworld"):
        with refused("--name="):
            make(str(inputs), name=name)
    make(str(inputs), name="mine")
    shutil.copytree(inputs, tmp_path / "mine")
    with refused("data set 'mine' belongs to .*"):
        make(str(tmp_path / "mine"))
    write_jsonl(inputs / "a.jsonl", texts(60))
    make(str(inputs), name="mine")  # the same folder with more in it
    assert len(all_rows("mine")) == 60


# ---- Reading

def test_an_embedded_set_that_cannot_be_made_is_an_error(base_folder, capfd):
    """As after a kill or on a full disk: the command that makes it ends with another code than 0."""
    base_folder.write_text("not a folder")
    with refused("python -m scripts.dataset --source=python failed"):
        ensure_dataset("python")
    assert str(base_folder) in capfd.readouterr().err


def test_what_is_missing_or_damaged_is_named(inputs, base_folder):
    with refused("no data set 'mine'"):
        ensure_dataset("mine")
    with refused(r"did you mean 'fineweb-edu'\?$"):
        ensure_dataset("fineweb_edu")
    assert not base_folder.exists()  # asking makes nothing
    write_jsonl(inputs / "a.jsonl", texts(300))
    make(str(inputs), name="mine")
    first = files_of("mine")[0]
    first.write_bytes(first.read_bytes()[:-100])
    with refused(r"shard_00000\.parquet is missing or"):
        shard_reader.load_manifest("mine")
    with refused(r"shard_00000\.parquet cannot be read"):
        list(shard_reader.shard_texts(first))
