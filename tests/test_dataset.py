"""Text in, shards out. The oracles are pyarrow, hashlib and sets of the texts that went in."""
import csv
import gzip
import hashlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import REPO, run_module

from nanochat.corpus import sources
from nanochat.corpus.make_dataset import ensure_dataset, make
from nanochat.data import dataset
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import locked, previous

LANGUAGES = ["Grüße aus Köln, schöne Straße.", "Привет, как дела?", "今日はいい天気ですね。", "مرحبا بالعالم",
             "नमस्ते दुनिया", "😀👩‍👩‍👧"]


@pytest.fixture(autouse=True)
def small_tinyworld(monkeypatch):
    monkeypatch.setattr(sources, "TINYWORLD_BYTES", 200_000)
    monkeypatch.setattr(sources.tinyworld, "document", lambda seed, index: f"Document {index} of world {seed}. " * 9)


@pytest.fixture
def base(base_folder):
    return base_folder


@pytest.fixture
def inputs(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def files_of(name: str) -> list[Path]:
    return sorted((dataset.base_dir() / "data" / name).glob("*.parquet"))


def rows_of(path: Path) -> list[str]:
    return pq.read_table(path)["text"].to_pylist()


def all_rows(name: str) -> list[str]:
    return [row for path in files_of(name) for row in rows_of(path)]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> None:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))


def texts(count: int, words: int = 30, tag: str = "") -> list[str]:
    return [f"text{tag} {i} " + " ".join(f"w{(i * 7 + k) % 101}" for k in range(words)) for i in range(count)]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return run_module("scripts.dataset", *arguments, env=environment)


def one_error(failed: subprocess.CompletedProcess) -> str:
    """What a command said that failed as it should, in one line."""
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1, failed.stderr
    return failed.stderr


# ---- The form on disk

def test_manifest_says_what_pyarrow_and_hashlib_find(inputs, base):
    write_jsonl(inputs / "a.jsonl", texts(5000))
    make(str(inputs), name="mine", shard_mb=0.2)
    manifest = json.loads((base / "data" / "mine" / "manifest.json").read_text())
    assert [entry["file"] for entry in manifest["shards"]] == [path.name for path in files_of("mine")]
    assert files_of("mine")[3].name == "shard_00003.parquet"
    for entry, path in zip(manifest["shards"], files_of("mine"), strict=True):
        rows = rows_of(path)
        assert entry == {
            "file": path.name, "rows": len(rows), "bytes": path.stat().st_size,
            "text_bytes": sum(len(row.encode()) for row in rows),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        metadata = pq.ParquetFile(path).metadata
        groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        assert all(rows == 1024 for rows in groups[:-1]) and groups[-1] <= 1024
        assert metadata.row_group(0).column(0).compression == "ZSTD"
    assert sorted(all_rows("mine")) == sorted(texts(5000))
    assert manifest["source"] == str(inputs) and manifest["seed"] == 42 and manifest["documents"] == 5000
    train_sizes = [entry["text_bytes"] for entry in manifest["shards"][:-1]]
    assert max(train_sizes) < 1.1 * min(train_sizes)  # no crumb of a last shard


def test_no_document_on_both_sides_though_most_are_duplicates(inputs):
    """Every text up to 40 times, in several files, in an order that would put copies into every shard."""
    distinct = texts(800)
    copies = [text for i, text in enumerate(distinct) for _ in range(1 + i % 40)]
    for part in range(3):
        write_jsonl(inputs / f"{part}.jsonl", copies[part::3])
    manifest = make(str(inputs), name="mine", shard_mb=0.01)
    *train, val = [set(rows_of(path)) for path in files_of("mine")]
    assert len(train) > 3 and val and not val & set.union(*train)
    assert Counter(all_rows("mine")) == Counter(distinct)  # each exactly once, none lost
    assert manifest["duplicates"] == len(copies) - len(distinct)


def test_one_text_repeated_a_thousand_times_does_not_eat_the_training_set(inputs):
    write_jsonl(inputs / "a.jsonl", ["the same boilerplate " * 50] * 1000 + texts(100))
    make(str(inputs), name="mine")
    assert len(rows_of(files_of("mine")[-1])) <= 20 and len(rows_of(files_of("mine")[0])) >= 81


def test_shuffle_depends_on_the_seed_and_on_nothing_else(inputs, base):
    write_jsonl(inputs / "a.jsonl", texts(3000))
    make(str(inputs), name="one", seed=1)
    make(str(inputs), name="two", seed=2)
    write_jsonl(inputs / "a.jsonl", texts(3000)[::-1])
    make(str(inputs), name="three", seed=1)
    one, two, three = all_rows("one"), all_rows("two"), all_rows("three")
    assert one == three and dataset.fingerprint("one") == dataset.fingerprint("three")
    assert one != two and sorted(one) == sorted(two) and dataset.fingerprint("one") != dataset.fingerprint("two")
    # A random order: of neighbours in the input hardly any are neighbours in the output (expected: 2 of 3000).
    number = [int(text.split()[1]) for text in one]
    assert sum(abs(a - b) == 1 for a, b in zip(number, number[1:], strict=False)) < 15
    assert abs(sum(number[:1500]) / 1500 - 1500) < 150  # mean of 1500 draws: standard deviation 16


def test_num_shards_limits_training_and_keeps_a_validation_shard(inputs):
    write_jsonl(inputs / "a.jsonl", texts(4000))
    make(str(inputs), name="all", shard_mb=0.1)
    manifest = make(str(inputs), name="two", shard_mb=0.1, num_shards=2)
    assert len(files_of("all")) > 5 and len(files_of("two")) == 3
    assert manifest["documents"] + manifest["left_out"] == 4000
    assert not set(rows_of(files_of("two")[-1])) & {row for path in files_of("two")[:-1] for row in rows_of(path)}
    make("tinyworld", num_shards=2, shard_mb=0.05)
    assert len(files_of("tinyworld")) == 3


# ---- Sources

def test_every_kind_of_file_gives_the_same_documents(inputs):
    documents = texts(20) + LANGUAGES
    for kind in ("txt", "md", "txt.gz", "md.zst", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "JSONL"):
        folder = inputs / kind
        folder.mkdir()
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents).encode()
        if kind == "parquet":
            pq.write_table(pa.table({"other": range(len(documents)), "text": documents}), folder / "a.parquet")
        elif "json" in kind.lower():
            pack = {"gz": gzip.compress, "zst": zstandard.compress}.get(kind[6:], bytes)
            (folder / f"a.{kind}").write_bytes(pack(lines))
        else:
            pack = {"gz": gzip.compress, "zst": zstandard.compress}.get(kind[4:] if "txt" in kind else kind[3:], bytes)
            for i, text in enumerate(documents):
                (folder / f"{i}.{kind}").write_bytes(pack(text.encode()))
        make(str(folder), name="mine." + kind)
        assert sorted(all_rows("mine." + kind)) == sorted(documents), kind


def test_a_file_or_folder_names_its_data_set(inputs, monkeypatch):
    (inputs / "book.txt.gz").write_bytes(gzip.compress("\n".join(texts(1000)).encode()))
    make(f"{inputs}/book.txt.gz")
    monkeypatch.chdir(inputs.parent)
    make("in")  # a relative folder
    assert all_rows("in") == all_rows("book") and len(all_rows("in")) > 8
    assert sorted(line for row in all_rows("in") for line in row.splitlines()) == sorted(texts(1000))


def test_a_large_text_file_is_cut_at_blank_lines(inputs):
    paragraphs = texts(3000, words=40)
    (inputs / "a.txt").write_text("\n\n".join(paragraphs))
    make(str(inputs))
    rows = all_rows("in")
    assert max(len(row.encode()) for row in rows) <= sources.PIECE and len(rows) >= 6
    assert Counter(part for row in rows for part in row.strip().split("\n\n")) == Counter(paragraphs)


def test_a_text_without_any_blank_is_cut_between_characters(inputs):
    text = "".join(chr(0x4E00 + i * i // 7 % 19997) for i in range(150_000))  # three bytes each, no space in 450 kB
    (inputs / "a.txt").write_text(text)
    manifest = make(str(inputs))
    assert manifest["invalid"] == 0 and sum(map(len, all_rows("in"))) == len(text)


def test_invalid_utf8_is_counted_and_replaced(inputs):
    (inputs / "a.txt").write_bytes(b"good \xff\xfe bad\n\n" + "Zürich".encode("latin-1") + b"\n\n" + b"x" * 400)
    lines = (b'{"text": "caf\xe9"}', b'{"text": "half \\ud800 pair"}', b'{"text": "whole \\ud83d\\ude00"}')
    (inputs / "b.jsonl").write_bytes(b"\n".join(lines))
    # Arrow's own checks would not let such a column be written; other writers do not check.
    column = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"\xf0\x28"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": column}), inputs / "c.parquet")
    manifest = make(str(inputs))
    rows = all_rows("in")
    assert manifest["invalid"] == 3 + 1 + 1
    assert {"caf\ufffd", "half ? pair", "whole 😀", "\ufffd("} <= set(rows)


CHINESE = "今天天气很好，我们去公园散步。他说：你好，世界！"
ENCODED = [("gb18030", CHINESE), ("big5", "今天天氣很好，我們去公園散步。"), ("utf-16", "plain English"),
           ("utf-16-le", "without the mark"), ("cp1251", "Привет, как дела? Сегодня хорошая погода.")]


@pytest.mark.parametrize(("encoding", "line"), ENCODED)
def test_text_in_another_encoding_stops_and_is_read_in_the_one_that_is_named(inputs, base, encoding, line):
    lines = [f"{i} {line}" for i in range(3000)]
    (inputs / "utf8.md").write_text("\n\n".join(f"{CHINESE} {i}" for i in range(50)))  # stays what it is
    (inputs / "story.txt").write_bytes("\n".join(lines).encode(encoding))
    with pytest.raises(UserError) as refused:
        make(str(inputs))
    said = str(refused.value)
    assert said.startswith(f"{inputs}/story.txt is not utf-8: ") and "\n" not in said
    assert not list((base / "data").iterdir())
    guess = said.split("--encoding=")[1]  # a library's, so only what it reads is certain, not what it is called
    assert "\n".join(lines).encode(encoding).decode(guess) == "\n".join(lines)
    assert make(str(inputs), encoding=guess)["invalid"] == 0
    rows = all_rows("in")
    assert sorted(part for row in rows for part in row.split("\n") if part in set(lines)) == sorted(lines)
    assert sum(row.count(CHINESE) for row in rows) == 50 + 3000 * (encoding == "gb18030")
    with pytest.raises(UserError, match="story.txt is not ascii"):
        make(str(inputs), encoding="ascii")
    with pytest.raises(UserError, match="encoding=gb9999 is unknown"):
        make(str(inputs), encoding="gb9999")


@pytest.mark.parametrize(("encoding", "line"), [("cp1252", "Grüße aus Köln, schöne Straße."), ("gb18030", CHINESE)])
def test_damaged_utf8_is_not_read_in_the_encoding_that_is_named(inputs, capsys, encoding, line):
    lines = [f"{i} {line}" for i in range(100)]
    other = [f"{i} other {line}" for i in range(100)]
    (inputs / "a.txt").write_bytes("\n".join(lines).encode() + b"\n\xc3")
    (inputs / "b.txt").write_bytes("\n".join(other).encode(encoding))
    make(str(inputs), encoding=encoding)
    assert {part for row in all_rows("in") for part in row.split("\n")} - {""} == {*lines, *other, "\ufffd"}
    assert f"warning: characters replaced in {inputs}/a.txt (1)" in capsys.readouterr().out
    (inputs / "a.txt").write_bytes("\n".join(lines).encode() + b"\n\xc3" * 12)
    with pytest.raises(UserError, match=r"a.txt is UTF-8, but 12 of [\d,]+ characters are damaged"):
        make(str(inputs), encoding=encoding)


WESTERN = ["Les élèves travaillent très bien à l'école. Où est-ce que tu vas après le déjeuner?",
           "Não há razão para não ir à praça amanhã. A avó disse que o pão é bom.",
           "El niño comió mañana. ¿Cómo está usted? Está en el jardín con la señora Núñez.",
           "Die Mädchen möchten über die Brücke gehen, weil es schön ist. Straße und Fuß."]


@pytest.mark.parametrize("line", [*WESTERN, "Árvíztűrő tükörfúrógép. A gyerekek az iskola előtt játszanak."])
def test_western_text_is_not_taken_for_that_of_the_neighbours(inputs, line):
    """Short or long. Where two encodings may be meant, both are named, each with words that it would give."""
    encoding = "cp1252" if line in WESTERN else "cp1250"
    for lines in (1, 500):
        (inputs / "a.txt").write_bytes("\n".join(f"{i} {line}" for i in range(lines)).encode(encoding))
        with pytest.raises(UserError, match=r"a.txt is not utf-8: .* characters cannot be read; perhaps") as refused:
            make(str(inputs))
        found = re.findall(r"(\w+) \(“(.*?)”\): --encoding=\1(?:; or |$)", str(refused.value))
        assert ("cp1252", encoding) in [(found[0][0], name) for name, _ in found]
        words = dict(found)[encoding].split()
        assert len(words) >= 4 and set(words) <= set(re.findall(r"[\w¿]+", line))


def test_an_encoding_that_refuses_a_file_at_once_is_said_without_a_count(inputs):
    (inputs / "a.txt").write_bytes("\n".join(texts(20)).encode("utf-16-le"))  # without the mark
    with pytest.raises(UserError, match="a.txt cannot be read as utf-16; "):
        make(str(inputs), encoding="utf-16")


def test_jsonl_and_csv_in_another_encoding(inputs):
    lines = [json.dumps({"text": CHINESE + text}, ensure_ascii=False) for text in texts(40)]
    (inputs / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode("gbk")))
    rows = ["text", *(f'"{CHINESE}, {text}"' for text in texts(40, tag="b"))]
    (inputs / "b.csv").write_bytes("\r\n".join(rows).encode("gbk"))
    with pytest.raises(UserError, match="a.jsonl.gz is not utf-8: .*--encoding=gb18030$"):
        make(str(inputs))
    make(str(inputs), encoding="gb18030")
    expected = [CHINESE + text for text in texts(40)] + [f"{CHINESE}, {text}" for text in texts(40, tag="b")]
    assert sorted(all_rows("in")) == sorted(expected)


def test_a_few_bad_bytes_are_replaced_and_said_and_a_few_in_each_of_many_files_stop(inputs, capsys):
    (inputs / "long.txt").write_bytes(b"\n".join(text.encode() for text in texts(900)) + b"caf\xe9" * 10)
    make(str(inputs))
    assert f"warning: characters replaced in {inputs}/long.txt (10)" in capsys.readouterr().out
    for i in range(200):
        (inputs / f"{i}.txt").write_bytes(f"Le {i}e café est ici.".encode("latin-1"))
    found = rf"210 of [\d,]+ characters in {inputs} cannot be read; perhaps it is .*: --encoding="
    with pytest.raises(UserError, match=rf"{inputs}/0.txt is not utf-8: {found}"):
        make(str(inputs))
    column = pa.Array.from_buffers(pa.string(), 1, pa.array([CHINESE.encode("gbk")], pa.binary()).buffers())
    pq.write_table(pa.table({"text": column}), inputs.parent / "c.parquet")
    with pytest.raises(UserError, match="c.parquet is not utf-8: .* write it anew"):
        make(str(inputs.parent / "c.parquet"))


def test_a_short_note_may_have_one_bad_byte_but_not_one_in_eight(inputs):
    (inputs / "b.txt").write_text("another note")
    (inputs / "a.txt").write_bytes(b"caf\xe9 " + b"x" * 60)
    assert make(str(inputs))["invalid"] == 1
    (inputs / "a.txt").write_bytes(b"caf\xe9 " * 8 + b"x" * 22)
    with pytest.raises(UserError, match="8 of 62 characters cannot be read"):
        make(str(inputs))


def test_json_and_csv_are_read(inputs):
    expected = texts(70)
    expected[4] += '\nwith "quotes", a comma; and\r\nline ends'
    expected[5] = "long " * 60_000
    mixed = [*({"text": text} for text in expected[:10]), *expected[10:20]]
    (inputs / "a.json").write_text(json.dumps(mixed, indent=1))
    write_jsonl(inputs / "b.json", expected[20:30])
    (inputs / "c.json").write_text(json.dumps({"text": expected[30]}))
    for name, part, delimiter in (("a.csv", expected[31:40], ","), ("b.csv", expected[40:50], ";"),
                                  ("c.csv", expected[50:60] + expected[4:6], "\t")):
        with open(inputs / name, "w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows([["id", "text"], *enumerate(part)])
    with gzip.open(inputs / "d.csv.gz", "wt") as file:
        csv.writer(file).writerows([["text", "other"], *([text, ""] for text in expected[60:])])
    assert make(str(inputs))["duplicates"] == 2
    assert sorted(all_rows("in")) == sorted(expected)


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_quotes_in_a_tsv_are_plain_characters_and_its_mark_is_a_tab(inputs, name):
    expected = ['"Stop!', "next", 'bar"', '"Hello," he said.', "a; b; c, d"]
    for columns in (["id", "text"], ["text"], ["a, b; c, d", "text"]):
        lines = ["\t".join(columns), *("\t".join([str(i), text][-len(columns):]) for i, text in enumerate(expected))]
        content = "\r\n".join(lines).encode()
        (inputs / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        make(str(inputs))
        assert sorted(all_rows("in")) == sorted(expected), columns


def test_json_lines_in_a_json_file_are_not_loaded_at_once(inputs):
    with open(inputs / "a.json", "w") as file:
        file.writelines(json.dumps({"text": f"{i} " * 2000}) + "\n" for i in range(2000))
    size = (inputs / "a.json").stat().st_size
    tracemalloc.start()
    try:
        assert sum(1 for _ in sources.own_documents(inputs, "text", Counter())) == 2000
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()


def test_files_that_are_not_read_are_named(inputs, capsys):
    """Hidden files are passed over in silence; other kinds, and tables without the field, are named."""
    (inputs / "deep" / ".git").mkdir(parents=True)
    (inputs / "deep" / ".git" / "secret.txt").write_text("secret")
    write_jsonl(inputs / "deep" / "a.jsonl", texts(9))
    (inputs / "book.pdf").write_bytes(b"%PDF")
    (inputs / "deep" / "old.doc").write_bytes(b"")
    (inputs / "info.json").write_text('{"license": "none"}')
    sides = {
        "list.json": ("[1, 2]", "entry 1"),
        "log.json": ('{"step": 1}\n{"step": 2}\n', "line 1"),
        "metadata.csv": ("title,author\nFaust,Goethe\n", "line 2"),
        "words.tsv": ("word\nTod\n", "line 2"),
    }
    for name, (content, _) in sides.items():
        (inputs / name).write_text(content)
    make(str(inputs))
    assert sorted(all_rows("in")) == texts(9)
    said = capsys.readouterr().out
    for name, (_, why) in sides.items():
        assert f"{inputs}/{name}, {why} (no field 'text'; there is: " in said, name
    assert "not read: book.pdf, deep/old.doc (expected .txt .md .jsonl" in said
    assert f"not read: {inputs}/info.json, entry 1 (no field 'text'; there is: license), " in said
    for number in range(7):
        (inputs / f"{number}.pdf").write_bytes(b"%PDF")
    make(str(inputs))
    assert "not read: 0.pdf, 1.pdf, 2.pdf, 3.pdf, 4.pdf and 4 more (" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "content", "problem"), [
    ("a.csv", "id,body\n1,x\n", "no documents: .*a.csv, line 2 .no field 'text'; there is: id, body.; choose"),
    ("a.csv", "id,text\n1,x\n2,Hello, she said\n", "a.csv, line 3: 3 fields, the first line names 2"),
    ("a.csv", 'text,id\n"x\ny",1\nalone\n', "a.csv, line 4: 1 fields, the first line names 2"),
    ("a.csv", "text\nHello, she said\n", "a.csv, line 2: 2 fields, the first line names 1"),
    ("a.tsv", "id\ttext\n1\tx\ty\n", "a.tsv, line 2: 3 fields, the first line names 2"),
    ("a.csv", 'text\n"open\n', "a.csv, line .: not CSV: unexpected end of data"),
    ("a.json", "[1, 2]", "no documents: .*a.json, entry 1 .no field 'text'; there is: a single int"),
    ("a.json", '["x", 2]', "a.json, entry 2: no field 'text'; there is: a single int"),
    ("a.json", '[{"text": "x"}', "a.json: not JSON"),
    ("a.json", '{"text": "x"}\n{"text"', "a.json, line 2: not JSON"),
    ("a.json", '[{"text": ["x"]}]', "a.json, entry 1: field 'text' holds list"),
])
def test_json_and_csv_that_cannot_be_used_are_one_line_with_the_place(inputs, name, content, problem):
    (inputs / name).write_text(content)
    with pytest.raises(UserError, match=problem):
        make(str(inputs))


def test_a_byte_order_mark_and_empty_documents_are_dropped(inputs):
    lines = '\ufeff{"text": "first"}', "", '{"text": "  "}', '{"text": null}', '{"text": "second"}'
    (inputs / "a.jsonl").write_text("\n".join(lines))
    (inputs / "b.txt").write_bytes(b"\xef\xbb\xbfthird")
    manifest = make(str(inputs))
    assert sorted(all_rows("in")) == ["first", "second", "third"] and manifest["empty"] == 2


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
    assert 20 < len(all_rows("part")) < 150 and set(all_rows("part")) <= set(texts(500))
    with pytest.raises(UserError, match=r"no field 'text'; there is: content"):
        make(f"hf:{inputs}/books", name="other")
    with pytest.raises(UserError, match="hf:/nowhere/at/all"):
        make("hf:/nowhere/at/all", name="other")
    assert not files_of("other")


def test_huggingface_datasets_that_are_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        make("hf:some/thing")


def test_tinyworld_is_documents_from_zero_on():
    make("tinyworld", seed=7)
    rows = all_rows("tinyworld")
    assert set(rows) == {f"Document {i} of world 7. " * 9 for i in range(len(rows))}
    assert abs(sum(map(len, rows)) - 200_000) < 500


# ---- The standard library

@pytest.fixture(scope="module")
def corpus():
    return list(sources.python_documents(Counter()))


def test_python_holds_the_sources_and_the_reference(corpus):
    whole = {text for text, _ in corpus}
    assert Path(json.__file__).read_text() in whole and len(corpus) > 500
    assert any(text.startswith("Boolean operations") for text in whole)  # a page of help()
    assert max(len(text) for text in whole) <= sources.PIECE
    pieces: dict[str, str] = {}
    for text, kin in corpus:
        if text != kin:
            pieces[kin] = pieces.get(kin, "") + text
    assert len(pieces) > 20 and all(kin == joined for kin, joined in pieces.items())


def test_python_keeps_all_pieces_of_a_file_on_one_side():
    make("python")
    val = set(rows_of(files_of("python")[-1]))
    kin_of = {text: kin for text, kin in sources.python_documents(Counter())}
    train_kin = {kin_of[row] for path in files_of("python")[:-1] for row in rows_of(path)}
    val_kin = {kin_of[row] for row in val}
    assert len(val) > 5 and not val_kin & train_kin
    assert 300_000 < sum(map(len, val)) < 1_500_000
    # Copies of one text within several files: all the same, no text twice.
    assert len(all_rows("python")) == len(set(all_rows("python")))


def test_sources_of_any_encoding(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    cases = (b"# coding: latin-1\nx = '\xe9'", "é"), (b"# coding: no\nx = '\xc3\xa9'", "é"), (b"x = '\xff'", "\ufffd")
    for data, expected in cases:
        (tmp_path / "x.py").write_bytes(data)
        tally = Counter()
        assert expected in next(sources.python_documents(tally))[0]
        assert tally["invalid"] == (expected == "\ufffd")


# ---- Very little text

@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_documents_still_give_two_shards(inputs, count):
    for i in range(count):
        (inputs / f"{i}.txt").write_text(f"Title {i}\n\n" + "\n\n".join(texts(10, tag=str(i))))
    make(str(inputs))
    train, val = (rows_of(path) for path in files_of("in"))
    assert train and val and not set(train) & set(val)
    together = [part for row in train + val for part in row.strip().split("\n\n")]
    expected = [part for i in range(count) for part in [f"Title {i}", *texts(10, tag=str(i))]]
    assert sorted(together) == sorted(expected)
    assert sum(map(len, val)) <= sum(map(len, train))  # of several small documents a whole one is held out


def test_one_document_of_lines_is_cut_at_a_line(inputs):
    (inputs / "a.txt").write_text("Heading\n\n" + "\n".join(texts(20)) + "\n")
    make(str(inputs))
    train, val = (rows_of(path) for path in files_of("in"))
    lines = [line for row in train + val for line in row.splitlines() if line]
    assert len(val) == 1 and sorted(lines) == sorted(["Heading", *texts(20)])


@pytest.mark.parametrize("text", ["one line", "same\nsame\n", "same\n\nsame", "x", "\nx\n\n"])
def test_too_little_text_is_one_line(inputs, text):
    (inputs / "a.txt").write_text(text)
    (inputs / "b.txt").write_text(text)
    with pytest.raises(UserError, match="too little text in .*in: .* bytes") as caught:
        make(str(inputs))
    assert "\n" not in str(caught.value) and not files_of("in")


def test_two_single_lines_are_one_for_each_side(inputs):
    write_jsonl(inputs / "a.jsonl", ["one", "two"])
    make(str(inputs))
    assert sorted(map(rows_of, files_of("in"))) == [["one"], ["two"]]


# ---- Damage and misuse

def damaged_inputs():
    lines = [json.dumps({"text": text}) for text in texts(2000)]
    compressed = gzip.compress("\n".join(lines).encode())
    return {
        "bad.jsonl": ("\n".join([*lines[:11], '{"text": ', *lines[11:]]).encode(), r"bad\.jsonl, line 12: not JSON"),
        "list.jsonl": (b'{"text": "a"}\n[1]\n', r"list\.jsonl, line 2: no field 'text'; there is: a single list"),
        "field.jsonl": (b'{"text": "a"}\n\n{"body": "b", "id": 1}\n', r"line 3: no field 'text'; there is: body, id"),
        "type.jsonl": (b'{"text": 5}\n', r"line 1: field 'text' holds int"),
        "deep.jsonl": (b"[" * 100_000, r"line 1: not JSON"),
        "cut.jsonl.gz": (compressed[: len(compressed) // 2], r"cannot read .*cut\.jsonl\.gz"),
        "cut.txt.zst": (zstandard.compress(os.urandom(200_000).hex().encode())[:-9], r"cannot read .*cut\.txt\.zst"),
        "not.txt.gz": (b"this is no gzip", r"cannot read .*not\.txt\.gz"),
        "short.parquet": (b"PAR1 and then nothing", r"short\.parquet: not a whole parquet file"),
        "empty.parquet": (b"", r"empty\.parquet: not a whole parquet file"),
    }


@pytest.mark.parametrize("file", damaged_inputs())
def test_damaged_input_is_one_line_and_leaves_nothing(inputs, base, file):
    content, message = damaged_inputs()[file]
    (inputs / file).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        make(str(inputs))
    assert "\n" not in str(caught.value)
    assert not list((base / "data").iterdir())


def test_parquet_without_the_field_or_of_another_type_or_cut(inputs):
    path = inputs / "a.parquet"
    pq.write_table(pa.table({"number": [1, 2], "body": ["a", "b"]}), path)
    with pytest.raises(UserError, match=r"a\.parquet: no field 'text'; there is: number, body"):
        make(str(path))
    with pytest.raises(UserError, match="field 'number' holds int64"):
        make(str(path), field="number")
    pq.write_table(pa.table({"text": texts(20_000)}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="a.parquet: not a whole parquet file"):
        make(str(path))
    path.write_bytes(whole[:1000] + bytes(2000) + whole[3000:])  # footer intact, pages not
    with pytest.raises(UserError, match=r"a\.parquet"):
        make(str(path))


def test_unknown_sources_and_settings():
    cases = {
        "nope": r"no source 'nope', and no such path; expected tinyworld, python, fineweb-edu, climbmix, hf:",
        "/no/such/folder": "no such path",
        "": "no source ''",
        "hf:": "names no data set",
    }
    for source, message in cases.items():
        with pytest.raises(UserError, match=message):
            make(source)
    for setting, allowed in (("num_shards=0", "-1, 1.."), ("shard_mb=5e3", "0.001..1000"), ("workers=0", "1..")):
        failed = command(f"--{setting}")
        assert failed.returncode == 2 and f"--{setting}" in failed.stderr and f"[{allowed}]" in failed.stderr


def test_a_folder_without_usable_files(inputs):
    (inputs / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(UserError, match=r"no documents in .*in: expected .*\.tsv \.parquet \(or \.gz/\.zst of them\)$"):
        make(str(inputs))
    (inputs / "a.txt").write_text(" \n\n")
    with pytest.raises(UserError, match="too little text in .*in: 0 bytes"):
        make(str(inputs))


def test_names_cannot_leave_the_folder_or_take_the_place_of_other_data(inputs, tmp_path):
    write_jsonl(inputs / "a.jsonl", texts(50))
    for name in ("../up", "a/b", ".hidden", ".."):
        with pytest.raises(UserError, match="cannot name a data set"):
            make(str(inputs), name=name)
    with pytest.raises(UserError, match="belongs to the source of that name"):
        make(str(inputs), name="tinyworld")
    make(str(inputs), name="mine")
    before = dataset.fingerprint("mine")
    shutil.copytree(inputs, tmp_path / "mine")
    with pytest.raises(UserError, match="was made from .* choose another name"):
        make(str(tmp_path / "mine"))
    assert dataset.fingerprint("mine") == before
    write_jsonl(inputs / "a.jsonl", texts(60))
    make(str(inputs), name="mine")  # the same folder with more in it replaces what was there
    assert len(all_rows("mine")) == 60


# ---- Reading

def test_the_reading_half_of_the_library(inputs):
    write_jsonl(inputs / "a.jsonl", texts(3000))
    manifest = make(str(inputs), name="mine", shard_mb=0.1)
    assert dataset.load_manifest("mine") == manifest
    assert dataset.shard_paths("mine", "train") == files_of("mine")[:-1]
    assert dataset.shard_paths("mine", "val") == files_of("mine")[-1:]
    assert [row for split in ("train", "val") for row in dataset.iter_texts("mine", split)] == all_rows("mine")
    assert list(dataset.shard_texts(files_of("mine")[0])) == rows_of(files_of("mine")[0])
    digests = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files_of("mine"))
    assert dataset.fingerprint("mine") == hashlib.sha256(digests.encode()).hexdigest()
    dataset.verify("mine")


def test_what_is_missing_or_damaged_is_named(inputs, base):
    with pytest.raises(UserError, match=r"no data set 'python' in .*; make it: .*scripts.dataset --source=python$"):
        dataset.load_manifest("python")
    with pytest.raises(UserError, match="no data set 'mine'"):
        ensure_dataset("mine")
    for mistyped, meant in (("tinywrold", "tinyworld"), ("fineweb_edu", "fineweb-edu")):
        with pytest.raises(UserError, match=f"no data set '{mistyped}' .* did you mean '{meant}'\\?$"):
            ensure_dataset(mistyped)
        with pytest.raises(UserError, match=f"no source '{mistyped}'.* did you mean '{meant}'\\?$"):
            make(mistyped)
    assert not base.exists()  # asking makes nothing
    write_jsonl(inputs / "a.jsonl", texts(3000))
    make(str(inputs), name="mine", shard_mb=0.1)
    with pytest.raises(UserError, match=r"no data set 'minne' .* did you mean 'mine'\?$"):
        dataset.load_manifest("minne")
    first = files_of("mine")[0]
    whole, manifest = first.read_bytes(), (first.parent / "manifest.json").read_bytes()

    first.write_bytes(whole[:200] + b"?" + whole[201:])  # the same size
    dataset.load_manifest("mine")
    with pytest.raises(UserError, match=r"1 of \d+ shards .* damaged: shard_00000.parquet"):
        dataset.verify("mine")
    first.write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"shard_00000\.parquet has \d+ bytes, the manifest says \d+"):
        dataset.load_manifest("mine")
    with pytest.raises(UserError, match=r"shard_00000\.parquet cannot be read .* make the data set again"):
        list(dataset.shard_texts(first))
    first.unlink()
    with pytest.raises(UserError, match=r"shard_00000\.parquet is missing"):
        dataset.shard_paths("mine", "train")
    for content in (b"", b"{", b"[]", b'{"shards": [{}, {}]}', b'{"shards": 3}', manifest[:-50]):
        (first.parent / "manifest.json").write_bytes(content)
        with pytest.raises(UserError, match="manifest.json is damaged"):
            dataset.load_manifest("mine")
    make(str(inputs), name="mine", shard_mb=0.1)  # and the cure that was named works
    assert first.read_bytes() == whole and (first.parent / "manifest.json").read_bytes() == manifest


def test_the_command_that_repairs_names_the_encoding_and_the_field(inputs):
    lines = [json.dumps({"my text": f"{CHINESE} {text}"}, ensure_ascii=False) for text in texts(40)]
    (inputs / "my books.jsonl").write_text("\n".join(lines), encoding="gb18030")
    make(f"{inputs}/my books.jsonl", name="mine", field="my text", encoding="gb18030")
    whole = files_of("mine")[0].read_bytes()
    files_of("mine")[0].write_bytes(b"")
    with pytest.raises(UserError) as said:
        dataset.load_manifest("mine")
    _, _, module, *arguments = shlex.split(str(said.value).split("and run: ")[1])
    assert module == "scripts.dataset" and command(*arguments).returncode == 0
    assert files_of("mine")[0].read_bytes() == whole


def test_shards_that_hold_no_text_are_refused(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"body": ["a"]}), path)
    with pytest.raises(UserError, match="x.parquet has no column 'text' but body"):
        list(dataset.shard_texts(path))
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(UserError, match="x.parquet holds no documents"):
        list(dataset.shard_texts(path))
    with pytest.raises(UserError, match="gone.parquet cannot be read"):
        list(dataset.shard_texts(tmp_path / "gone.parquet"))


def test_ensure_makes_tinyworld_once(capsys):
    ensure_dataset("tinyworld")
    assert capsys.readouterr().out.startswith("making data set 'tinyworld' in ")
    stamp = files_of("tinyworld")[0].stat()
    ensure_dataset("tinyworld")
    make("tinyworld")
    assert files_of("tinyworld")[0].stat() == stamp  # neither asking nor making again touches it
    make("tinyworld", seed=3)
    assert files_of("tinyworld")[0].stat().st_ino != stamp.st_ino


# ---- The command, kills and full disks

def test_importing_prints_and_touches_nothing(tmp_path):
    code = "import sys, nanochat.corpus.make_dataset"
    code += "; assert not {'torch', 'huggingface_hub', 'datasets'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not (tmp_path / "base").exists()


def test_the_command(inputs):
    write_jsonl(inputs / "a.jsonl", texts(300) + texts(5), field="body")
    done = command(f"--source={inputs}", "--name=mine", "--field=body")
    assert done.returncode == 0, done.stderr
    assert "mine: 300 documents" in done.stdout and "duplicates dropped: 5" in done.stdout
    assert sorted(all_rows("mine")) == sorted(texts(300))
    assert "every checksum is right" in command("--name=mine", "--verify").stdout
    files_of("mine")[0].write_bytes(bytes(files_of("mine")[0].stat().st_size))
    assert "damaged: shard_00000.parquet; delete" in one_error(command("--name=mine", "--verify"))
    assert one_error(command("--source=nope")).startswith("error: no source 'nope'")


def test_a_build_killed_at_any_moment_leaves_the_old_data_or_none(inputs, base):
    """Kill a real process while it reads, and while it writes; then the same command works and clears the debris."""
    write_jsonl(inputs / "a.jsonl", texts(30_000))
    start = [sys.executable, "-m", "scripts.dataset", f"--source={inputs}", "--name=mine", "--shard_mb=0.2"]

    def kill_when(pattern: str) -> None:
        process = subprocess.Popen(start, cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 200
        while not list((base / "data").glob(pattern)) and process.poll() is None:
            assert time.monotonic() < deadline, pattern
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"finished before {pattern} was seen"

    kill_when(".mine.tmp-*/mine/bucket_00")
    assert not (base / "data" / "mine").exists() and list((base / "data").glob(".mine.tmp-*"))
    with pytest.raises(UserError, match="no data set 'mine'"):
        dataset.load_manifest("mine")
    done = subprocess.run(start, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(all_rows("mine")) == sorted(texts(30_000)) and not list((base / "data").glob(".mine.tmp-*"))

    before = dataset.fingerprint("mine")
    write_jsonl(inputs / "a.jsonl", texts(40_000))
    kill_when(".mine.tmp-*/mine/shard_00002.parquet")
    assert dataset.fingerprint("mine") == before
    dataset.verify("mine")
    make(str(inputs), name="mine")
    assert len(all_rows("mine")) == 40_000 and sorted(os.listdir(base / "data")) == [".mine.lock", "mine"]


def test_a_kill_between_the_two_renames_is_mended_by_the_command_that_makes_it(inputs, base):
    write_jsonl(inputs / "a.jsonl", texts(300))
    make(str(inputs), name="mine")
    before = dataset.fingerprint("mine")
    os.rename(base / "data" / "mine", previous(base / "data" / "mine"))  # how such a kill leaves the disk
    names = os.listdir(base / "data")
    with pytest.raises(UserError, match="no data set 'mine' .*--name=mine .the one that was there comes back first"):
        dataset.fingerprint("mine")
    assert os.listdir(base / "data") == names, "who reads repairs nothing"
    with pytest.raises(UserError, match="no such path"):
        make(str(inputs / "gone"), name="mine")
    write_jsonl(inputs / "a.jsonl", [])
    with pytest.raises(UserError):
        make(str(inputs), name="mine")
    assert dataset.fingerprint("mine") == before


def test_a_build_says_at_once_what_it_makes(inputs, base):
    """Into a pipe, and before it may begin: another process makes the same."""
    write_jsonl(inputs / "a.jsonl", texts(20))
    command = [sys.executable, "-m", "scripts.dataset", f"--source={inputs}", "--name=mine"]
    with locked(base / "data" / ".mine.lock"):
        process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
        said = select.select([process.stdout], [], [], 60)[0] and process.stdout.readline()
    assert "mine: 20 documents" in process.communicate(timeout=300)[0]
    assert said == f"making data set 'mine' in {base}/data/mine\n"


def test_two_builds_at_once_are_one(inputs):
    write_jsonl(inputs / "a.jsonl", texts(5000))
    start = [sys.executable, "-m", "scripts.dataset", f"--source={inputs}", "--name=mine"]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(start, cwd=REPO, **piped) for _ in range(2)]
    assert [(process.communicate(timeout=300)[1], process.returncode) for process in both] == [("", 0), ("", 0)]
    dataset.verify("mine")
    assert sorted(all_rows("mine")) == sorted(texts(5000))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_one_line_and_loses_nothing(inputs, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        write_jsonl(inputs / "a.jsonl", texts(1000))
        environment = {"NANOCHAT_BASE_DIR": str(small)}
        assert command(f"--source={inputs}", "--name=mine", **environment).returncode == 0
        before = {path.name: path.read_bytes() for path in (small / "data" / "mine").iterdir()}
        with open(inputs / "b.jsonl", "w") as file:
            file.writelines(json.dumps({"text": os.urandom(5000).hex()}) + "\n" for _ in range(1000))
        for path in (inputs / "b.jsonl", inputs):
            name = "mine" if path == inputs else "other"
            said = one_error(command(f"--source={path}", f"--name={name}", **environment))
            assert said.startswith(f"error: cannot make {small}/data/{name}") and "No space left on device" in said
        assert {path.name: path.read_bytes() for path in (small / "data" / "mine").iterdir()} == before
        assert sorted(os.listdir(small / "data")) == [".mine.lock", "mine"]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_disk_that_fills_while_shards_are_written(inputs, base):
    """Buckets fit and a shard does not: the limit on a file's size stands for the disk's."""
    with open(inputs / "a.jsonl", "w") as file:
        file.writelines(json.dumps({"text": os.urandom(3000).hex()}) + "\n" for _ in range(1000))
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000));"
    limit += f"sys.argv[1:] = ['--source={inputs}', '--name=mine'];"
    limit += "runpy.run_module('scripts.dataset', run_name='__main__')"
    failed = subprocess.run([sys.executable, "-c", limit], cwd=REPO, capture_output=True, text=True, timeout=300)
    assert "File too large" in one_error(failed) and not os.listdir(base / "data")


def test_a_base_folder_that_cannot_be_written(tmp_path, inputs):
    write_jsonl(inputs / "a.jsonl", texts(10))
    (tmp_path / "file").write_text("not a folder")
    said = one_error(command(f"--source={inputs}", NANOCHAT_BASE_DIR=str(tmp_path / "file")))
    assert said.startswith("error: cannot make") and "Not a directory" in said
