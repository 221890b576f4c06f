"""Looking up: what is copied is in the question and in what was found, held-out things stay so, judges are strict."""
import re
from pathlib import Path

import pytest

from nanochat.data.conversation import Conversation
from nanochat.data.task import never_looks_up, reference
from nanochat.library.make_library import make_library
from nanochat.library.python_docs import documentation
from nanochat.library.retrieval import Library
from nanochat.runtime.errors import UserError
from nanochat.tasks import make_task
from nanochat.tasks.lookup import what_is_asked
from nanochat.tasks.python_questions import documented, split_of_name

SPECS = ("lookup", "lookup:unknown", "search", "search:unknown")
CALL = re.compile(r'(lookup|search)\("( ?)([^"]+)"\)')


def exchanges(conversation: Conversation) -> list[tuple[str, str, str, str, str]]:
    """(question, tool, what is asked for, what is found, answer) of each answer that calls a tool."""
    found = []
    messages = conversation["messages"]
    for question, answer in zip(messages[::2], messages[1::2], strict=True):
        if isinstance(answer["content"], list):
            call, output, text = (part["text"] for part in answer["content"])
            tool, blank, asked = CALL.fullmatch(call).groups()
            assert re.search(rf"(^|[^\w\s]){re.escape(asked)}" if not blank else rf" {re.escape(asked)}",
                             question["content"]), "a blank in the call, and none in the question, or the other way"
            if output == "nothing":
                assert text.removeprefix("I do not know. I found nothing about") in (f" {asked}.", f' "{asked}".')
                assert (text[-2] == '"') == (not blank)
            found.append((question["content"], tool, asked, output, text))
    return found


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("spec", SPECS)
def test_calls_and_answers_are_copies(spec: str, split: str):
    """
    A call copies one stretch of the question that begins after a blank, a quote or nothing; an answer, what is found.
    """
    task = make_task(spec, split)
    # By index: a loop over a sequence would end silently at an IndexError.
    for index in range(min(len(task), 2000)):
        for question, _, asked, found, answer in exchanges(task[index]):
            assert re.search(rf"(^|[\s\"`]){re.escape(asked)}($|[^\w])", question) and asked == asked.strip()
            if found != "nothing":
                assert found.startswith(answer)
                assert answer == found or answer.rstrip("”")[-1] in ".!?。", (found, answer)


def test_held_out_objects():
    held_out = documented("test")
    dotted = {name for name in held_out if "." in name}
    only_there = set(held_out.values()) - set(documented("train").values())
    asked_for = set()
    for spec in ("lookup", "search", "lookup:unknown"):
        for conversation in make_task(spec, "train")[:5000]:
            for question, tool, asked, found, _ in exchanges(conversation):
                if tool == "lookup":
                    assert split_of_name(asked) == "train" and not dotted & set(re.split(r"[\s?\"`()]+", question))
                assert not any(found.startswith(text) for text in only_there), found
                asked_for.add(asked)
    assert len(asked_for) > 6_000


def test_answers_are_the_documentation():
    lookups, searches = ([exchanges(conversation)[-1] for conversation in make_task(tool, "test")]
                         for tool in ("lookup", "search"))
    held_out = documented("test")
    assert sorted(asked for _, _, asked, _, _ in lookups) == sorted(held_out)
    for _, tool, asked, text, _ in lookups:
        first, rest = text[: len(held_out[asked])], text[len(held_out[asked]) :]
        assert tool == "lookup" and first == held_out[asked] and len(text) <= 300
        assert rest.strip() in " ".join(documentation()[asked].split())
    assert len(searches) > 150 and {text for *_, text, _ in searches} <= {text for *_, text, _ in lookups}


def test_judges_are_strict():
    task = make_task("lookup", "test")
    for index, conversation in enumerate(task):
        right = reference(conversation)
        for wrong in (right.lower(), right[:-1], reference(task[index - 1]), right.replace(" ", "", 1)):
            assert not task.evaluate(conversation, wrong), (right, wrong)
    two = next(conversation for conversation in task if len(conversation["right"]) > 1)
    first, both = two["right"][:2]
    second = both.removeprefix(first).strip()
    assert [task.evaluate(two, answer) for answer in (first, both, second)] == [True, True, False]

    task = make_task("lookup:unknown", "test")
    assert task.evaluate(task[0], "I do not know. I found nothing about blerp."), "a misspelled name"
    for wrong in ("I do not know.", reference(task[0])[15:]):
        assert not task.evaluate(task[0], wrong), wrong


def test_what_is_asked():
    cases = {
        "Splits a path into head and tail, and returns both.": ("split", "a path into head and tail"),
        "Return the arc cosine (measured in radians) of x.": ("return", "the arc cosine"),
        "Get the name of the file.": ("", ""),  # one word that says something is too little to search for
        "Ottoville is a village in Putnam County, Ohio.": ("", "a village in Putnam County"),
        "Abort.": ("", ""),
        "": ("", ""),
    }
    for text, expected in cases.items():
        assert what_is_asked(text) == expected, text


def test_own_library(tmp_path: Path):
    """Each passage is found by its title; what is tested is never trained on."""
    recipe = "# Recipe number {0}\n\nMixes {0} eggs with sugar and flour. Bake it for {0} minutes."
    (tmp_path / "cakes.md").write_text("\n\n".join(recipe.format(i) for i in range(250)))
    path = make_library(str(tmp_path), name="notes")
    library = Library(path)
    for tool in ("lookup", "search"):
        sides = []
        for split in ("train", "test"):
            task = make_task(f"{tool}:notes", split)
            correct = 0
            for conversation in task:
                _, called, asked, _, answer = exchanges(conversation)[-1]
                passage = getattr(library, tool)(asked)
                correct += passage is not None and task.evaluate(conversation, passage.text)
                assert called == tool and task.evaluate(conversation, answer)
            assert correct == len(task) if tool == "lookup" else correct > 0.75 * len(task)
            sides.append({conversation["right"][-1] for conversation in task})
        train, test = sides
        assert not train & test and len(train) > 200 and len(test) > 10
    with pytest.raises(UserError, match="nobody"):
        make_task("lookup:nobody", "test")


def test_warning_without_lookups():
    assert never_looks_up("json:bakery.jsonl:all, tinyworld:facts[:400]", "notes")
    assert never_looks_up("tinyworld, search[:99]*2", "notes") == never_looks_up("tinyworld", None) == ""
