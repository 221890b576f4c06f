"""Questions in other languages: each language's file is whole, and what is asked and answered can be copied."""
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from conftest import make_sums

from nanochat.corpus.make_library import make_library
from nanochat.data.conversation import render
from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.copying import Copying, Vocabulary
from nanochat.inference.retrieval import Library
from nanochat.inference.tools import REFUSALS, Tools
from nanochat.tasks import example_questions, make_task, notes

SLOTS = {"lookup": "nvpotdwx", "search": "nvpotdwx", "talk": "", "notes": "nvpotdw"}
REPO = Path(__file__).parents[1]


@pytest.mark.parametrize("language", notes.LANGUAGES)
def test_a_language_has_all_that_is_needed(language: str):
    texts = notes.texts_of(language)
    assert texts.keys() == notes.texts_of("de").keys()
    for name, slots in SLOTS.items():
        ways = texts[name].splitlines()
        assert len(ways) == len(set(ways)) and len(ways) >= (15 if name == "notes" else 30)
        for way in ways:
            assert not re.sub(rf"\{{[{slots or '-'}]\}}", "", way).count("{"), way
            assert len(re.findall(r"^[^][]*\[[^][]+\][^][]*$", way)) == (name in ("lookup", "search")), way
    for kind in "nvpot":
        assert {split: len(notes.words_of(language, kind, split)) > 1 for split in ("train", "test")}
    assert "{n}" in texts["about"] and len(texts["greetings"]) > 3


def test_every_language_is_installed():
    settings = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    data = settings["package-data"]["nanochat.tasks"]
    assert [f"notes_{language}.toml" for language in notes.LANGUAGES] == [n for n in data if n.startswith("notes_")]
    assert set(data) == {file.name for file in (REPO / "nanochat/tasks").glob("*.toml")}


def forbidden(tokenizer: Tokenizer, conversation: dict) -> bool:
    """Whether the copying forbids a token of the last answer."""
    end, start = map(tokenizer.encode_special, ("<|assistant_end|>", "<|assistant_start|>"))
    ids = list(render(tokenizer, conversation).ids)
    begin = len(ids) - ids[::-1].index(start)
    copying = Copying(Vocabulary(tokenizer), ids[:begin], [end])
    for token in ids[begin:]:
        if not copying.allows(token):
            return True
        copying.add(token)
    return False


def test_the_copying_allows_what_is_taught(base_folder):
    """Also names of tokens in a row, eight of which ended in a blank."""
    tokenizer = make_sums(base_folder, 200, 'What is "{i}" plus {i}? ("{twice}") ' * 3, vocab_size=350)
    for spec, count in {"notes": 60, "notes:unknown": 30, "notes:talk": 12, "tokens:sums": 200}.items():
        for split in ("train", "test"):
            for conversation in make_task(spec, split)[:count]:
                assert not forbidden(tokenizer, conversation), conversation


def test_notes_of_the_test_split_are_found_and_others_are_not():
    counts = Counter()
    task = make_task("notes", "test")
    tools = Tools(task.library)
    for conversation in task:
        question, answer = conversation["messages"][-2:]
        call, found, _ = (part["text"] for part in answer["content"])
        assert tools.find(call).text == found and task.evaluate(conversation, found)
        assert tools.find(f"search('{question['content']}')"), "more words than needed"
        counts[tools.find("lookup('Hinterreifen')")] += 1
        assert make_task("notes:unknown", "test").library.search(call) is None
    assert counts == {None: len(task)}
    german = [REFUSALS["de"]] * 2
    unknown = make_task("notes:de:unknown", "test")
    assert [unknown[0]["messages"][-1]["content"][-1]["text"], *unknown[0]["right"]] == german
    assert not unknown.evaluate(unknown[0], REFUSALS["fr"])


def test_examples_are_of_the_folder_in_its_language(tmp_path: Path, base_folder):
    """Titles of a library that was made of the user's own files come first."""
    texts = {"en": "The spare key hangs in the hall. The rear tyre needs four bar.",
             "de": "Der Schlüssel hängt im Flur. Der Hinterreifen braucht vier bar.",
             "ja": "鍵は玄関にあります。タイヤの空気圧は四バールです。"}
    asked = {}
    for language, text in texts.items():
        (tmp_path / f"{language}.md").write_text(f"# Notiz 7\n\n{text}\n", encoding="utf-8")
        library = Library(make_library(str(tmp_path / f"{language}.md")))
        asked[language] = example_questions("lookup, notes[:9], arithmetic", library=library)
        assert len(asked[language]) == 4 and asked[language][1:] == example_questions("arithmetic")[:3]
    assert [questions[0] for questions in asked.values()] == [
        "What do my notes say about Notiz 7?", "Was steht in meinen Notizen über Notiz 7?",
        "メモにNotiz 7について何と書いてありますか？"]
    assert example_questions("arithmetic", library=library) == example_questions("arithmetic")


@pytest.mark.parametrize("language", notes.LANGUAGES)
def test_examples_are_in_the_language_of_most_notes(tmp_path: Path, base_folder, language):
    """One note in five in another language changes nothing; four in five decide."""
    english = ["The boiler is in the cellar, next to the washing machine.", "The bins go out on Tuesday evening.",
               "The lock's code is 3917; the spare key hangs beside the bikes.", "Sow the beans in the middle of May."]
    other = {
        "de": ["Der Schlüssel zum Keller hängt hinter der Küchentür.", "Am Dienstag kommt die Müllabfuhr.",
               "Internet: Der Router steht im Flur, das Kennwort klebt darunter.", "Garten: Tomaten ab Mitte Mai."],
        "es": ["La llave del sótano está detrás de la puerta.", "La basura se recoge los martes por la tarde.",
               "El rúter está en el pasillo.", "Los tomates se plantan a mediados de mayo."],
        "fr": ["La clé de la cave est derrière la porte de la cuisine.", "Les poubelles sortent le mardi soir.",
               "Le routeur est dans le couloir.", "Les tomates se plantent à la mi-mai."],
        "ja": ["地下室の鍵は台所のドアの後ろに掛けてあります。", "ごみは火曜日の夕方に出します。",
               "ルーターは廊下にあります。", "トマトは五月の中ごろに植えます。"],
        "ru": ["Ключ от подвала висит за кухонной дверью.", "Мусор забирают во вторник вечером.",
               "Роутер стоит в коридоре, пароль наклеен снизу.", "Помидоры сажают в середине мая."],
        "zh": ["地下室的钥匙挂在厨房门后面。", "垃圾在星期二晚上扔。",
               "路由器在走廊里，密码贴在下面。", "西红柿在五月中旬种。"],
    }[language]
    for texts, about in (([*english, other[2]], "What do my notes say about {n}?"),
                         ([*other, english[0]], notes.texts_of(language)["about"])):
        whole = "".join(f"# N{n}\n\n{text}\n\n" for n, text in enumerate(texts))
        (tmp_path / "a.md").write_text(whole, encoding="utf-8")
        first, *_ = example_questions("lookup, notes[:9]", library=Library(make_library(str(tmp_path / "a.md"))))
        assert first in [about.format(n=f"N{n}") for n in range(len(texts))]
