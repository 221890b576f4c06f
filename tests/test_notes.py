"""Questions in other languages: each language's file is whole, and what is asked and answered can be copied."""
import re
from collections import Counter

import pytest
from conftest import make_sums

from nanochat.data.conversation import render
from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.copying import Copying, Vocabulary
from nanochat.inference.tools import REFUSALS, Tools
from nanochat.tasks import make_task
from nanochat.tasks.common import read_texts
from nanochat.tasks.notes import LANGUAGES, words_of

SLOTS = {"lookup": "nvpotdwx", "search": "nvpotdwx", "talk": "", "notes": "nvpotdw"}


@pytest.mark.parametrize("language", LANGUAGES)
def test_language(language: str):
    texts = read_texts(f"notes_{language}")
    assert texts.keys() == read_texts("notes_de").keys()
    for name, slots in SLOTS.items():
        ways = texts[name].splitlines()
        assert len(ways) == len(set(ways)) and len(ways) >= (15 if name == "notes" else 30)
        for way in ways:
            assert not re.sub(rf"\{{[{slots or '-'}]\}}", "", way).count("{"), way
            assert len(re.findall(r"^[^][]*\[[^][]+\][^][]*$", way)) == (name in ("lookup", "search")), way
    for kind in "nvpot":
        assert {split: len(words_of(language, kind, split)) > 1 for split in ("train", "test")}


def forbidden(tokenizer: Tokenizer, conversation: dict) -> bool:
    """Whether the copying forbids a token of the last answer."""
    end, start = map(tokenizer.encode_special, ("<|assistant_end|>", "<|assistant_start|>"))
    ids = list(render(tokenizer, conversation).ids)
    begin = len(ids) - ids[::-1].index(start)
    vocabulary = Vocabulary(tokenizer)
    copying = Copying(vocabulary, vocabulary.questions(ids[:begin]), {end})
    for token in ids[begin:]:
        if not copying.allows(token):
            return True
        copying.add(token)
    return False


def test_copying_allows_what_is_taught(base_folder):
    """Of notes and of Python's documentation: each call is a stretch of the question, each quotation of the passage."""
    tokenizer = make_sums(base_folder, 200, 'What is "{i}" plus {i}? ("{twice}") ' * 3, vocab_size=350)
    for spec, count in {"notes": 60, "notes:unknown": 30, "notes:talk": 12, "lookup": 60, "lookup:unknown": 30,
                        "search": 60, "search:unknown": 30}.items():
        for split in ("train", "test"):
            for conversation in make_task(spec, split)[:count]:
                assert not forbidden(tokenizer, conversation), conversation


def test_notes_are_found():
    counts = Counter()
    task = make_task("notes", "test")
    tools = Tools(task.notes)
    for conversation in task:
        question, answer = conversation["messages"][-2:]
        call, found, _ = (part["text"] for part in answer["content"])
        assert tools.find(call).text == found and task.evaluate(conversation, found)
        assert tools.find(f"search('{question['content']}')"), "more words than needed"
        counts[tools.find("lookup('Hinterreifen')")] += 1
        assert make_task("notes:unknown", "test").notes.search(call) is None
    assert counts == {None: len(task)}
    german = [REFUSALS["de"]] * 2
    unknown = make_task("notes:de:unknown", "test")
    assert [unknown[0]["messages"][-1]["content"][-1]["text"], *unknown[0]["right"]] == german
    assert not unknown.evaluate(unknown[0], REFUSALS["fr"])
