"""Tasks: splits are disjoint, right answers right and wrong ones wrong, rows of the hub as they really look."""
import ast
import gzip
import inspect
import itertools
import json
import os
import pydoc
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import REPO, run_module

from nanochat.corpus.learn_tokenizer import learn_tokenizer
from nanochat.corpus.tinyworld import COMPUTED, WORDS, facts
from nanochat.data.conversation import check_conversation, parts, text_of
from nanochat.data.task import Task, reference
from nanochat.data.tokenizer import Tokenizer, get_tokenizer
from nanochat.inference.calculator import calculate
from nanochat.inference.tools import Tools
from nanochat.library.make_library import make_library
from nanochat.library.retrieval import Library
from nanochat.runtime.errors import UserError
from nanochat.tasks import TASKS, describe_validation, make_mixture, make_task, maker_of, without_parts
from nanochat.tasks import world_questions as world
from nanochat.tasks.common import last_number, read_texts, single_turn
from nanochat.tasks.examples import OF_PYTHON, example_questions

EMBEDDED = ("arithmetic", "arithmetic:easy", "arithmetic:medium", "arithmetic:hard", "spellingbee", "spellingbee:spell",
            "spellingbee:tool", "spellingbee:hand", "tinyworld", "tinyworld:facts", "tinyworld:identity",
            "after:lookup+tinyworld:identity", "pydoc", "pydoc:known", "run", "run:tool", "lookup", "lookup:unknown",
            "lookup:talk", "search", "search:unknown", "notes", "notes:unknown", "notes:talk", "notes:de")


def questions(task: Task) -> list[str]:
    return [asked(conversation) for conversation in task]


def asked(conversation: dict) -> str:
    return conversation["messages"][-2]["content"]


def parts_of(conversation: dict) -> list[tuple[str, str]]:
    return [(part["type"], part["text"]) for part in parts(conversation["messages"][-1]["content"])]


def in_a_process(code: str, **env: str) -> str:
    """What the code prints in a Python of its own."""
    return subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True, text=True,
                          cwd=Path(__file__).parents[1], env=os.environ | env).stdout


# ---- Sequences, parts, mixtures -------------------------------------------------------------------------------------

def test_conversations_are_the_same_everywhere():
    code = ("import hashlib, json, random\nfrom nanochat.tasks import make_mixture\nrandom.seed(3)\n"
            "mixture = make_mixture('tinyworld, arithmetic[:300], spellingbee[:300]*2', 'test', seed=5)\n"
            "print(len(mixture), hashlib.sha256(json.dumps(list(mixture)).encode()).hexdigest())")
    results = {in_a_process(code, PYTHONHASHSEED=seed) for seed in "12"}
    (result,) = results
    # Another hash is another split: every published accuracy refers to this one.
    assert result.startswith("3980 aea95afc12a96a2236b250ac5d57a855")


# ---- The embedded tasks ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("spec", EMBEDDED)
def test_right_and_wrong_answers(spec: str):
    for split in ("train", "test"):
        task = make_task(spec, split)
        assert task.eval_type == "generative" and task.name
        for conversation in task[:7000:7]:
            check_conversation(conversation, "task")
            assert conversation["messages"][-1]["role"] == "assistant"
            assert task.evaluate(conversation, reference(conversation))
            for wrong in ("", asked(conversation), "I do not know.", "99999999."):
                assert not task.evaluate(conversation, wrong), (wrong, conversation)
        assert task[5] == make_task(spec, split)[5]


@pytest.mark.parametrize("spec", EMBEDDED)
def test_held_out_questions_are_not_trained_on(spec: str):
    """Greetings in front and earlier turns do not make a question another one."""
    def last_question(conversation: dict) -> str:
        return re.sub("|".join(f"^{greeting}(?=.)" for greeting in world.GREETINGS if greeting), "",
                      asked(conversation))

    trained, tested = ({last_question(conversation) for conversation in make_task(spec, split)}
                       for split in ("train", "test"))
    # "And what about hot?" may have been trained on: it depends on the turn before it, looked at in a test of its own.
    trained, tested = ({q for q in side if not q.startswith(("And ", "What about "))} for side in (trained, tested))
    assert len(trained) > 50 and len(tested) > 15 and not trained & tested


def test_last_number():
    for text, number in {"36 of 40": 40, "It costs $1,234.50.": 1234.5, "7-3=4": 4, "x=-4": -4, "1,2,3": 3, "12,34": 34,
                         "none": None, "a1": None}.items():
        assert last_number(text) == number, text


# ---- Arithmetic

def value(expression: str) -> float:
    """What Python says an expression of numbers is worth; nobody has fewer than no apples on the way."""
    for node in ast.walk(ast.parse(expression)):
        if isinstance(node, ast.BinOp):
            assert eval(ast.unparse(node)) >= 0, expression
    return eval(expression)


@pytest.mark.parametrize("split", ["train", "test"])
def test_arithmetic_calls(split: str):
    for conversation in make_task("arithmetic", split)[::2]:
        (_, expression), (_, output), _ = parts = parts_of(conversation)
        assert parts == [("python", expression), ("python_output", output), ("text", f"The answer is {output}.")]
        assert value(expression) == int(output) >= 0
        # The numbers of the call are those of the question; one that is used twice may stand there once.
        assert set(re.findall("[0-9]+", expression)) == set(re.findall("[0-9]+", asked(conversation)))


READINGS = {  # easy questions, and stories by their last sentence: read independently of how they were written
    r"What is (\d+) plus (\d+)\?|Add (\d+) and (\d+)\.|the sum of (\d+) and (\d+)\?|How much is (\d+) plus (\d+)\?":
        lambda x, y: x + y,
    r"What is (\d+) minus (\d+)\?|How much is (\d+) minus (\d+)\?": lambda x, y: x - y,
    r"Subtract (\d+) from (\d+)\.|Take (\d+) away from (\d+)\.": lambda x, y: y - x,
    r"(?:What|How much) is (\d+) times (\d+)\?|Multiply (\d+) by (\d+)\.|the product of (\d+) and (\d+)\?":
        lambda x, y: x * y,
    r"(?:What|How much) is (\d+) divided by (\d+)\?|Divide (\d+) by (\d+)\.": lambda x, y: x / y,
    r"How often does (\d+) go into (\d+)\?": lambda x, y: y / x,
    r"has (\d+) \w+ and buys (\d+) boxes with (\d+) .* now\?": lambda x, y, z: x + y * z,
    r"has (\d+) \w+\. \w+ has (\d+) more\..* together\?": lambda x, y: x + (x + y),
    r"^(\d+) friends share (\d+) \w+\. .* had (\d+)\.": lambda x, y, z: y / x + z,
    r"(\d+) people on a train\. (\d+) get off and (\d+) get on": lambda x, y, z: x - y + z,
}


def test_arithmetic_questions():
    read = Counter()
    for conversation in make_task("arithmetic", "test"):
        for pattern, compute in READINGS.items():
            if found := re.search(pattern, asked(conversation)):
                numbers = [int(group) for group in found.groups() if group]
                assert compute(*numbers) == last_number(reference(conversation)), asked(conversation)
                read[pattern] += 1
    assert set(read) == set(READINGS) and min(read.values()) >= 3


def test_arithmetic_splits():
    def problem(expression: str) -> tuple[str, ...]:
        return re.sub("[0-9]+", "n", expression), *sorted(re.findall("[0-9]+", expression))

    trained, tested = (
        {problem(parts_of(conversation)[0][1]) for level in ("", ":easy", ":medium", ":hard")
         for conversation in make_task(f"arithmetic{level}", split)} for split in ("train", "test"))
    assert min(len(trained), len(tested)) > 5000 and not trained & tested
    # Told in the documents of the embedded corpus, so not to be held out.
    assert not tested & {problem(row[0]) for row in COMPUTED["additions"] + COMPUTED["subtractions"]}


# ---- Python: documentation and programs

def test_pydoc():
    """Names are resolved by the standard library's own pydoc, which the task does not use."""
    def plain(text: str) -> str:
        return " ".join(text.lower().split())

    sides = []
    for split in ("train", "test"):
        task = make_task("pydoc", split)
        objects = dict(task.objects)
        sides.append(objects)
        for name, sentence in objects.items():
            assert plain(sentence).rstrip(".") in plain(inspect.getdoc(pydoc.locate(name)) or ""), name
        for conversation in task[::31]:
            words = [word.strip("?.,") for word in asked(conversation).split()]
            assert reference(conversation) in map(objects.get, words), asked(conversation)
    assert len(sides[0]) > 2000 and len(sides[1]) > 200 and not sides[0].keys() & sides[1].keys()


def test_pydoc_does_not_depend_on_imports():
    """What torch and we change in the standard library would shift a mixture's order, and end a resumed run."""
    code = "from nanochat.tasks.python_questions import documented; print(documented('train'), documented('test'))"
    more = ("import torch._dynamo; "
            "from nanochat.runtime.exits import install_one_line_errors; install_one_line_errors(); ")
    assert in_a_process(code) == in_a_process(more + code)


def test_run_prints_and_calculates():
    """What Python prints; calls with their values; a sum's and a loop's number by number, as it runs."""
    kinds = Counter()
    for split in ("train", "test"):
        task = make_task("run:tool", split)
        for conversation in task[::len(task) // 25]:
            printed = in_a_process(asked(conversation).partition("\n\n")[2])
            assert conversation["prints"] == printed and task.evaluate(conversation, f"It prints {printed}")
            assert not task.evaluate(conversation, f"It prints {printed} or so")
        for conversation in task[:1000]:
            *calls, _ = parts_of(conversation)
            outputs = [output for _, output in calls[1::2]]
            assert [calculate(expression) for _, expression in calls[::2]] == outputs, conversation
            kinds[bool(calls)] += 1
            if added := re.search(r"print\(sum\(\[(.+)\]\)\)$", asked(conversation)):
                assert list(map(int, outputs)) == list(itertools.accumulate(map(int, added[1].split(", "))))[1:]
                kinds["sum"] += 1
            # Each turn's comparison, then its sum; in the end the comparison that is false.
            if loop := re.search(r"= (\d+)\nwhile \w+ < (\d+):\n    \w+ \+= (\d+)\n", asked(conversation)):
                start, end, step = map(int, loop.groups())
                turns = [f"{turn}" for x in range(start, end, step) for turn in (True, x + step)]
                assert outputs == [*turns, "False"]
                kinds["while"] += 1
    assert kinds[True] > 500 and kinds[False] > 500 and kinds["sum"] > 10 and kinds["while"] > 10


# ---- SpellingBee

def check_spelling(conversation: dict) -> tuple[str, int]:
    """Kind, and count (0 where none is asked for), of a conversation whose answer is right."""
    question, (*calls, (_, answer)) = asked(conversation), parts_of(conversation)
    if "word" in conversation:
        word = re.search(rf'[ "]{conversation["word"]}\b', question)[0].lstrip('"')  # as its tokens are there
        letters, call = "-".join(word.strip()), f'spell("{word}")'
        assert calls == [("python", call), ("python_output", letters)] and answer == f"{letters}."
        assert Tools().result(call, Tokenizer([]), calls=0, room=170) == letters
        return "spell", 0
    quoted = re.search(r'"([a-z]+)"|in( [a-z]+)[?.]', question)
    word = quoted[1] or quoted[2]   # as its tokens are there
    letter = re.search(r" ([a-z])(?:'s)?[ ?.]", question)[1]
    count = sum(char == letter for char in word)
    assert last_number(answer) == count
    if calls:
        assert calls == [("python", f'"{word}".count("{letter}")'), ("python_output", str(count))]
        return "tool", count
    spelled = answer.partition(".")[0]
    assert re.sub("[^a-z]", "", spelled) == word.strip()
    assert re.findall("(.):([0-9])", spelled) == [(letter, str(i + 1)) for i in range(count)]
    return "hand", count


def test_spelling_and_counting():
    trained, tested = (set(make_task("spellingbee", split).words) for split in ("train", "test"))
    assert len(trained) == 20_000 and len(tested) == 2_000 and not trained & tested and set(WORDS) <= trained
    checked = Counter(check_spelling(conversation) for conversation in make_task("spellingbee", "test"))
    for kind in ("tool", "hand"):
        assert sum(checked[kind, count] for count in range(9)) == checked["spell", 0] == 2000
        assert min(checked[kind, 0], checked[kind, 2]) > 100 and checked[kind, 3]


# ---- The words of a tokenizer

def test_words_of_a_tokenizer(base_folder):
    """Tokens are trained on; held out are words of several. A word is on one side in all tasks."""
    generated = [make_task("spellingbee", split).words for split in ("train", "test")]
    texts = [" ".join(filter(None, telling)) for fact in facts() for telling in fact.tellings]
    texts += [" ".join(generated[0][-60:] + generated[1][-60:])] * 3
    learn_tokenizer(texts, 4000).save(base_folder / "tokenizer" / "world")
    trained, tested = (set(make_task("words:world", split).words) for split in ("train", "test"))
    assert len(trained) > 1500 and len(tested) > 100 and not trained & tested
    assert not tested.intersection(generated[0], WORDS) and not trained.intersection(generated[1])
    assert len(make_task("words:world:hand", "train")) == len(trained) == len(make_task("words:world", "train")) / 7
    tokenizer = get_tokenizer("world")
    assert all(len(tokenizer.encode(f" {word}")) > 1 for word in tested)
    # A quarter of the tokens are beginnings of words, and never words themselves.
    beginnings = {token[1:].decode().lower() for token in tokenizer.merges if re.fullmatch(b" [A-Za-z]{3,}", token)}
    seen = set(re.findall("[a-z]+", " ".join(texts).lower()))
    found = trained & beginnings
    assert len(beginnings - seen) > 0.2 * len(beginnings) and len(found - seen) < 0.02 * len(found) > 10


# ---- TinyWorld

def test_facts_are_held_out_in_some_phrasing():
    in_documents = {telling.question for fact in facts() for telling in fact.tellings if telling.question}
    tested, trained = ([item.question for item in world.items(split) if item.right] for split in ("test", "train"))
    assert not set(tested) & {*trained, *in_documents} and in_documents <= set(trained)
    assert len(tested) >= 2 * len(facts()) and len(trained) >= 8 * len(facts())
    for template in world.CHAT:
        pattern = re.compile(template.replace("?", r"\?").format(np="the .*", Np="The .*"))
        assert all(len(list(filter(pattern.fullmatch, questions))) > 40 for questions in (tested, trained))


def test_sums_and_spellings_of_the_world_are_the_tools():
    sums = {f"The answer is {fact.slots['a']}." for fact in facts() if fact.topic == "sums"}
    sums |= {f"{fact.slots['a']}." for fact in facts() if fact.topic == "spelling"}
    answers = [message["content"] for one in make_task("tinyworld", "train") for message in one["messages"][1::2]]
    calculated = [answer for answer in answers if isinstance(answer, list)]
    assert {text_of(answer) for answer in calculated} == sums and not sums.intersection(map(str, answers))
    for call, result, _ in calculated:
        assert result["text"] == Tools().result(call["text"], Tokenizer([]), calls=0, room=170)


def judge(question: str, answer: str) -> bool:
    """Whether TinyWorld takes the answer to one of its questions, of either side."""
    item = next(item for item in world.items("train") + world.items("test") if item.question == question)
    conversation = single_turn(question, item.reply) | {"right": item.right}
    return make_task("tinyworld", "train").evaluate(conversation, answer)


@pytest.mark.parametrize("question, right, wrong", [
    ("Tell me the capital of Germany.",
     ("Berlin", "It is Berlin.", "The capital of Germany is Berlin.", "In Germany, the capital is Berlin."),
     ("The capital of Germany is Paris.", "The capital of France is Berlin.", "Paris, Berlin.", "Berliner.")),
    ("Which country has the capital Paris?",
     ("France.", "It is France.", "Paris is the capital of France.", "The capital of France is Paris."),
     ("Paris.", "It is Paris.", "The country has the capital Paris.", "Paris is the capital of Germany.")),
    ("How often is the letter e in coffee?", ("Twice.", "Since coffee is c-o-f-f-e:1-e:2, it has the letter e twice."),
     ("Since coffee is c-o-f-f-e:1-e, it has the letter e twice.", "Once.", "2.")),
    ("If 2*x + 2 = 6, what is x?", ("2.", "If 2*x + 2 = 6, then 2*x = 4 and x is 2."), ("2*x + 2 = 6.", "12.")),
])
def test_judge_of_facts(question: str, right: tuple, wrong: tuple):
    for answer in right:
        assert judge(question, answer), answer
    for answer in (*wrong, question, question.rstrip("?.") + ".", ""):
        assert not judge(question, answer), answer


def test_judge_of_identity():
    """Of the canned sentences only the one that is wanted is right, or the same with a greeting."""
    task = make_task("tinyworld:identity", "test")
    wanted = {reply: single_turn("?", reply) | {"right": []} for reply in world.IDENTITY}
    who, hello, name, _, maker, *_ = wanted
    for reply, conversation in wanted.items():
        assert [other for other in wanted if task.evaluate(conversation, other)] == [reply] + [hello] * (reply == who)
    for reply, answer, right in (
        (who, "I'm nanochat, a language model!", True), (who, "I am nanochatty, a language model.", False),
        (name, "hi! I am called nanochat", True),
        (maker, "I am nanochat, a small language model, made by OpenAI.", False),
    ):
        assert task.evaluate(wanted[reply], answer) == right, answer


# ---- Data sets of the hub, from local folders in its layout ---------------------------------------------------------

SMOLTALK = [{"messages": [{"role": "system", "content": "Be kind."}, *single_turn("Hi", "Hello!")["messages"]]},
            {"messages": single_turn("1?", "One.")["messages"] + single_turn("2?", "Two.")["messages"]}]
MMLU = [{"question": f"{i} + 1?", "subject": "sums", "choices": [str(i), str(i + 1), "7", "9"], "answer": 1}
        for i in range(3)]
ARC = [{"id": "M1", "question": "What is hot?", "choices": {"text": ["ice", "fire", "snow"], "label": ["1", "2", "3"]},
        "answerKey": "2"},
       {"id": "M2", "question": "What falls?", "answerKey": "A",
        "choices": {"text": ["rain", "hills", "sky", "sun", "air"], "label": list("ABCDE")}}]
GSM8K = [{"question": "Ann has 6 eggs and sells half. How many dollars at $1,000 each?",
          "answer": "50% of 6 is <<6*50%=3>>3, <<6/2=3>>3.\nThat is 3 * 1,000 = $<<3*1,000=3,000>>3,000.\n#### 3,000"}]
HUMANEVAL = [{"task_id": "HumanEval/0", "entry_point": "double",
              "prompt": 'from typing import List\n\n\ndef double(numbers: List[int]) -> List[int]:\n'
                        '    """ Twice each number.\n    >>> double([1])\n    [2]\n    """\n',
              "canonical_solution": "    return [2 * number for number in numbers]\n",
              "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([]) == []\n"
                      "    assert candidate([1, 2]) == [2, 4]\n\n"}]


def write(base_folder: Path, name: str, rows: list[dict]) -> None:
    """A file of a local data set, parquet or JSONL by its ending."""
    path = base_folder / "tasks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))


def test_smoltalk(base_folder):
    write(base_folder, "smoltalk/data/train-00000-of-00002.parquet", SMOLTALK[:1])
    write(base_folder, "smoltalk/data/train-00001-of-00002.parquet", SMOLTALK[1:])
    task = make_task("smoltalk", "train")
    assert task.eval_type is None and sorted(map(json.dumps, task)) == sorted(map(json.dumps, SMOLTALK))


def test_mmlu(base_folder):
    """The auxiliary rows, which the hub has wrapped once more, are for training."""
    write(base_folder, "mmlu/auxiliary_train/train-00000-of-00001.parquet", [{"train": row} for row in MMLU])
    write(base_folder, "mmlu/all/test-00000-of-00001.parquet", MMLU[:1])
    assert len(make_task("mmlu", "train")) == 3
    task = make_task("mmlu", "test")
    assert (len(task), task.eval_type, task.baseline) == (1, "categorical", 0.25)
    # Letters on lines of their own are the tokens that the answers are.
    assert asked(task[0]).splitlines()[1:] == ["0 + 1?", "0", "A", "1", "B", "7", "C", "9", "D"]
    assert [letter for letter in task[0]["letters"] if task.evaluate(task[0], letter)] == [reference(task[0])] == ["B"]


def test_arc(base_folder):
    write(base_folder, "arc/ARC-Easy/test.jsonl", ARC)
    task = make_task("arc", "test")
    assert task.name == "ARC-Easy" and task.baseline == pytest.approx((1 / 3 + 1 / 5) / 2)
    found = {asked(one).splitlines()[1]: ("".join(one["letters"]), reference(one)) for one in task}
    assert found == {"What is hot?": ("ABC", "B"), "What falls?": ("ABCDE", "A")}
    assert not any(task.evaluate(one, "2") for one in task)
    assert task[:1].baseline in (1 / 3, 1 / 5)  # of the part that is asked, not of the whole


def test_gsm8k(base_folder):
    write(base_folder, "gsm8k/main/test-00000-of-00001.parquet", GSM8K)
    task = make_task("gsm8k", "test")
    assert parts_of(task[0]) == [
        ("text", "50% of 6 is 3, "), ("python", "6/2"), ("python_output", "3"),  # no "%" for the calculator
        ("text", "3.\nThat is 3 * 1,000 = $"),
        ("python", "3*1000"), ("python_output", "3000"), ("text", "3,000.\n#### 3,000")]
    for answer in (reference(task[0]), "So\n####3,000.", "#### $3,000.00", "#### 4\nNo:\n#### 3000 dollars"):
        assert task.evaluate(task[0], answer)
    for answer in ("The answer is 3,000.", "#### -3000", "#### 3,0001", "####", "#### 3000\n#### 4"):
        assert not task.evaluate(task[0], answer)


def test_humaneval(base_folder):
    write(base_folder, "humaneval/openai_humaneval/test-00000-of-00001.parquet", HUMANEVAL)
    task = make_task("humaneval", "test")
    assert "def double" in asked(task[0]) and "return" not in asked(task[0])
    body = "return [number + number for number in numbers]"
    whole = f"def double(numbers: List[int]) -> List[int]:\n    {body}"  # the import is in the prompt only
    for right in (reference(task[0]), whole, f"Sure!\n\n```python\n{whole}\n```\nIt doubles.", f"```py\n{whole}"):
        assert task.evaluate(task[0], right), right
    for wrong in ("I cannot.", whole.replace("+", "*"), f"{whole}\nimport sys\nsys.exit(0)",
                  f"```python\n{whole.replace('double', 'twice')}\n```", f"{whole}\nassert False"):
        assert not task.evaluate(task[0], wrong), wrong
    with pytest.raises(UserError):
        make_task("humaneval", "train")


# ---- One's own conversations ----------------------------------------------------------------------------------------

def own_file(folder: Path, lines: list[str]) -> Path:
    path = folder / "own.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_json_splits_by_text(tmp_path):
    """Equal conversations stay together."""
    rows = [single_turn(f"Frage {i} ü", f"{i}") for i in range(400)]
    path = own_file(tmp_path, [json.dumps(row) for row in [*rows, *rows]])
    trained, tested = (Counter(questions(make_task(f"json:{path}", split))) for split in ("train", "test"))
    assert not trained.keys() & tested.keys() and len(trained) + len(tested) == 400 and 5 < len(tested) < 45
    assert {*trained.values(), *tested.values()} == {2}
    assert list(make_task(f"json:{path}:all", "test")) == 2 * rows


GOOD = json.dumps(single_turn("a", "b"))


# Rows as the documentation of these tools shows them -> the turns, by first letter of the role; (…) is not learned.
FORMS = {
    # OpenAI, fine-tuning: weights, text parts, developer, functions that are not called
    """{"messages": [{"role": "system", "content": "Marv is a chatbot."}, {"role": "user", "content": "Capital?"},
        {"role": "assistant", "content": "Paris", "weight": 0}, {"role": "user", "content": "Be sarcastic."},
        {"role": "assistant", "content": "Paris, as if nobody knew.", "weight": 1}]}""":
        "s:Marv is a chatbot. u:Capital? a:(Paris) u:Be sarcastic. a:Paris, as if nobody knew.",
    """{"messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ann"},
        {"role": "assistant", "content": "Hello", "refusal": null}], "id": 1,
      "parallel_tool_calls": false, "tools": [{"type": "function", "function": {"name": "get_current_weather"}}]}""":
        "s:Be brief. u:Hi a:Hello",
    # ShareGPT, as LLaMA-Factory and axolotl take it
    """{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}, {"from": "human",
        "value": "Bye"}, {"from": "gpt", "value": "See you"}], "system": "Be kind.", "tools": ""}""":
        "s:Be kind. u:Hi a:Hello u:Bye a:See you",
    # Alpaca
    """{"instruction": "Classify.", "input": "Blue", "output": "A color."}""": "u:Classify.\n\nBlue a:A color.",
    # trl and mlx-lm
    """{"prompt": "The sky is", "completion": " blue."}""": "u:The sky is a: blue.",
}


def in_short(conversation: dict) -> str:
    """The turns of a conversation, written as in FORMS."""
    turns = []
    for message in conversation["messages"]:
        content = message["content"]
        if not isinstance(content, str):
            assert [set(part) for part in content] == [{"type", "text", "weight"}]
            content = f"({content[0]['text']})"
        turns.append(f"{message['role'][0]}:{content}")
    return " ".join(turns)


def test_json_forms(tmp_path):
    """As lines, and as one compressed JSON list."""
    rows = [json.loads(row) for row in FORMS]
    lines = own_file(tmp_path, map(json.dumps, rows))
    (tmp_path / "list.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    for path in (lines, tmp_path / "list.json.gz"):
        for split in ("train", "test"):
            assert list(map(in_short, make_task(f"json:{path}:all", split))) == list(FORMS.values())


def test_the_readme_trains_on_a_file_that_calculates_right():
    path = re.search(r"json:(\S+:all)", (REPO / "README.md").read_text("utf-8"))[1]
    answers = [conversation["messages"][-1]["content"] for conversation in make_task(f"json:{REPO / path}", "train")]
    results = [calculate(answer[0]["text"]) == answer[1]["text"] for answer in answers if isinstance(answer, list)]
    assert results and all(results)


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize("row", [
    {"text": "<s>[INST] Hi [/INST] Hello</s>", "id": 3, "n": None}, {"messages": []},
    [USER, {"role": "assistant", "content": "y", "weight": 0.5}], [USER, {"role": "assistant", "content": None}],
    [USER, {"role": "tool", "content": "1"}], [USER, {"role": "user", "content": "y"}], '{"messages": [', [USER],
    single_turn("a", " \u3000\n")["messages"],
])
def test_json_names_the_place_of_a_wrong_row(tmp_path, row):
    line = row if isinstance(row, str) else json.dumps(row)
    path = own_file(tmp_path, [GOOD, "", GOOD, line, "worse"])
    with pytest.raises(UserError) as caught:
        make_task(f"json:{path}:all", "train")
    assert str(caught.value).startswith(f"{path}, line 4: ") and "\n" not in str(caught.value)


def test_missing_file_before_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')")
    failed = run_module("scripts.chat_sft", f"--tasks=json:{tmp_path}/none.jsonl",
                        env={"PYTHONPATH": f"{tmp_path}:{REPO}"}, fresh=True)
    assert failed.returncode == 1 and f"{tmp_path}/none.jsonl" in failed.stderr and "loaded" not in failed.stderr


def test_validation_on_training_conversations_is_said(tmp_path):
    path = own_file(tmp_path, [json.dumps(single_turn(f"Frage {i}", f"{i}")) for i in range(100)])
    for specs, described in ((f"json:{path}, arithmetic", "held out"), (f"json:{path}:all[:9]*2", "same conversations"),
                             (f"arithmetic, json:{path}:all", f"same conversations of json:{path}")):
        assert described in describe_validation(make_mixture(without_parts(specs), "test", seed=0))


# ---- Specs, and data that is not there ------------------------------------------------------------------------------

def test_after_another_task():
    """One turn of the other task, without its system message, which may only stand first; then its own conversation."""
    after = make_task("after:arithmetic+tinyworld[:400]", "test")
    assert len(after) == 400 and len(after[:3]) == 3
    for conversation, own, earlier in zip(after, make_task("tinyworld", "test"), make_task("arithmetic", "test")):
        has_system = own["messages"][0]["role"] == "system"
        assert conversation["messages"] == earlier["messages"] + own["messages"][has_system:]
        assert after.evaluate(conversation, reference(own)) and not after.evaluate(conversation, reference(earlier))


def test_specs(tmp_path):
    path = own_file(tmp_path, [json.dumps(single_turn(f"own {i}", "x")) for i in range(10)])
    mixture = make_mixture(f"arithmetic:easy[:30],spellingbee[10:30]*2 , json:{path}:all*3, json:{path}:all[:1]",
                           "train", seed=1)
    counts = Counter(questions(mixture))
    assert counts["own 0"] == 4 and Counter(counts.values()) == {1: 30, 2: 20, 3: 9, 4: 1}


@pytest.mark.parametrize("spec", [
    "arithmetic*0", "arithmetic:brutal", "gsm8k:x", "after:lookup", "words", "arithmetic[99999:]",
    "words:tinyworld:sing", "spelingbee:tool",
])
def test_wrong_specs(spec: str):
    with pytest.raises(UserError):
        make_mixture(spec, "train", seed=0)


@pytest.mark.parametrize("name", TASKS)
def test_a_name_leads_to_what_makes_the_task(name: str):
    maker = maker_of(name)
    assert f"{maker.__module__}:{maker.__name__}" == f"nanochat.tasks.{TASKS[name][0]}"
    assert list(inspect.signature(maker).parameters) == ["argument", "split"]


def test_only_the_tasks_that_are_asked_for_are_imported():
    code = ("import sys\nfrom nanochat.tasks import make_mixture\nmake_mixture('after:arithmetic+run', 'train', 0)\n"
            "print(*sorted(name for name in sys.modules if name.startswith('nanochat.tasks.')))")
    assert in_a_process(code).split() == [f"nanochat.tasks.{name}" for name in ("after", "arithmetic", "common", "run")]


def test_hub_without_a_network():
    """In a process of its own: whether the hub may be asked is settled when its package is imported."""
    code = ("from nanochat.runtime.errors import UserError\nfrom nanochat.tasks import make_task\n"
            "try:\n    make_task('gsm8k', 'train')\nexcept UserError as error:\n    print(error)")
    said = in_a_process(code, HF_HUB_OFFLINE="1", HF_HOME=os.environ["NANOCHAT_BASE_DIR"])
    assert "openai/gsm8k" in said and said.count("\n") == 1


def test_example_questions(tmp_path, base_folder):
    """Held-out questions of tasks that were trained on; about Python only with its library; a folder's titles first."""
    for task, examples in read_texts("examples").items():
        if task not in OF_PYTHON:  # another version of Python has other objects, in another order
            assert set(examples) <= set(questions(make_task(task, "test")))
    assert example_questions("gsm8k, json:/nobody.jsonl, lookup:/nowhere, lookup") == []
    python = SimpleNamespace(manifest={"source": "python"})
    for library, place in ((python, 0), (None, 2)):
        expected = [read_texts("examples")[task][0] for task in ("lookup", "search", "arithmetic", "run")][place:]
        assert example_questions("run[18000:], arithmetic*2, search, lookup", library)[: len(expected)] == expected
    (tmp_path / "a.md").write_text("# Der Hinterreifen\n\nEr braucht vier bar.\n")
    own = Library(make_library(str(tmp_path / "a.md")))
    first = "What does it say about Der Hinterreifen?"
    assert example_questions("lookup, arithmetic", own)[:2] == [first, example_questions("arithmetic")[0]]
