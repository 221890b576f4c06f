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

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat.corpus.learn_tokenizer import learn_tokenizer
from nanochat.corpus.tinyworld import COMPUTED, WORDS, facts
from nanochat.data.conversation import check_conversation
from nanochat.data.task import Task, reference
from nanochat.data.tokenizer import Tokenizer, get_tokenizer
from nanochat.inference.calculator import calculate
from nanochat.inference.tools import Tools
from nanochat.runtime.errors import UserError
from nanochat.tasks import Mixture, describe_validation, example_questions, make_mixture, make_task, without_parts
from nanochat.tasks import world_questions as world
from nanochat.tasks.common import last_number, single_turn, split_of
from nanochat.tasks.gsm8k import answer_parts

EMBEDDED = ("arithmetic", "arithmetic:easy", "arithmetic:medium", "arithmetic:hard", "spellingbee", "spellingbee:spell",
            "spellingbee:tool", "spellingbee:hand", "tinyworld", "tinyworld:facts", "tinyworld:identity",
            "after:lookup+tinyworld:identity", "pydoc", "pydoc:known", "run", "run:tool", "lookup", "lookup:unknown",
            "lookup:talk", "search", "search:unknown")


class Numbers(Task):
    """Conversation i of `name` asks for i."""
    eval_type = "generative"

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count

    def __len__(self) -> int:
        return self.count

    def conversation(self, index: int) -> dict:
        return single_turn(f"{self.name}{index}", f"{index}")

    def evaluate(self, conversation: dict, answer: str) -> bool:
        return answer == reference(conversation)


def questions(task: Task) -> list[str]:
    return [asked(conversation) for conversation in task]


def asked(conversation: dict) -> str:
    return conversation["messages"][-2]["content"]


def parts_of(conversation: dict) -> list[tuple[str, str]]:
    return [(part["type"], part["text"]) for part in conversation["messages"][-1]["content"]]


def in_a_process(code: str, **env: str) -> str:
    """What the code prints in a Python of its own."""
    return subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True, text=True,
                          cwd=Path(__file__).parents[1], env=os.environ | env).stdout


# ---- Sequences, parts, mixtures -------------------------------------------------------------------------------------

def test_indices_and_slices_are_those_of_a_list():
    task, whole = Numbers("a", 10), [f"a{i}" for i in range(10)]
    for part in (slice(2, 5), slice(-3, None), slice(None, None, -4), slice(8, 99)):
        assert questions(task[part]) == whole[part] and questions(task[1:][part]) == whole[1:][part]
    assert asked(task[-1]) == "a9"
    with pytest.raises(IndexError):
        task[:3][3]


def test_a_mixture_has_every_conversation_of_every_pass_once_and_an_order_of_its_seed():
    tasks = [Numbers("a", 50), Numbers("b", 7), Numbers("none", 0), Numbers("b", 7)]
    one_after_the_other = [f"a{i}" for i in range(50)] + 2 * [f"b{i}" for i in range(7)]
    orders = [questions(Mixture(tasks, seed)) for seed in (0, 0, 1, -1)]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3, "seeds n and -n coincide"
    assert all(Counter(order) == Counter(one_after_the_other) for order in orders)
    assert Mixture(tasks, 0).eval_type is None


def test_nothing_depends_on_hash_randomisation_or_on_who_drew_before():
    code = ("import hashlib, json, random\nfrom nanochat.tasks import make_mixture\nrandom.seed(3)\n"
            "mixture = make_mixture('tinyworld, arithmetic[:300], spellingbee[:300]*2', 'test', seed=5)\n"
            "print(len(mixture), hashlib.sha256(json.dumps(list(mixture)).encode()).hexdigest())")
    results = {in_a_process(code, PYTHONHASHSEED=seed) for seed in "12"}
    (result,) = results
    # Another hash is another split: every published accuracy refers to this one.
    assert result.startswith("3980 db2eec072265547a69da58d2372015d")


def test_importing_loads_no_optional_package():
    code = "import sys, nanochat.tasks; print(sorted({'datasets', 'torch'} & set(sys.modules)))"
    assert in_a_process(code) == "[]\n"


# ---- The embedded tasks ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("spec", EMBEDDED)
def test_embedded_conversations_are_whole_and_their_own_answers_right(spec: str):
    for split in ("train", "test"):
        task = make_task(spec, split)
        assert task.eval_type == "generative" and task.name
        for conversation in task[:7000:7]:
            check_conversation(conversation)
            assert conversation["messages"][-1]["role"] == "assistant"
            assert task.evaluate(conversation, reference(conversation))
            for wrong in ("", asked(conversation), "I do not know.", "99999999."):
                assert not task.evaluate(conversation, wrong), (wrong, conversation)
        assert task[5] == make_task(spec, split)[5]


@pytest.mark.parametrize("spec", EMBEDDED)
def test_what_is_asked_in_the_test_split_is_never_trained_on(spec: str):
    """Greetings in front and earlier turns do not make a question another one."""
    def last_question(conversation: dict) -> str:
        return re.sub("|".join(f"^{greeting}(?=.)" for greeting in world.GREETINGS if greeting), "",
                      asked(conversation))

    trained, tested = ({last_question(conversation) for conversation in make_task(spec, split)}
                       for split in ("train", "test"))
    # "And what about hot?" may have been trained on: it depends on the turn before it, looked at in a test of its own.
    trained, tested = ({q for q in side if not q.startswith(("And ", "What about "))} for side in (trained, tested))
    assert len(trained) > 50 and len(tested) > 15 and not trained & tested


def test_evaluating_finds_the_last_number():
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


@pytest.mark.parametrize("level", ["easy", "medium", "hard"])
def test_arithmetic_calls_the_tool_with_what_was_asked_and_says_what_it_answers(level: str):
    for split in ("train", "test"):
        for conversation in make_task(f"arithmetic:{level}", split)[::5]:
            (_, expression), (_, output), (_, text) = parts = parts_of(conversation)
            assert [kind for kind, _ in parts] == ["python", "python_output", "text"]
            assert value(expression) == int(output) >= 0 and text == f"The answer is {output}."
            # The numbers of the call are those of the question; one that is used twice may stand there once.
            assert set(re.findall("[0-9]+", expression)) == set(re.findall("[0-9]+", asked(conversation)))


READINGS = {  # an easy question, read independently of how it was written
    r"What is (\d+) plus (\d+)\?|Add (\d+) and (\d+)\.|the sum of (\d+) and (\d+)\?|How much is (\d+) plus (\d+)\?":
        lambda x, y: x + y,
    r"What is (\d+) minus (\d+)\?|How much is (\d+) minus (\d+)\?": lambda x, y: x - y,
    r"Subtract (\d+) from (\d+)\.|Take (\d+) away from (\d+)\.": lambda x, y: y - x,
    r"(?:What|How much) is (\d+) times (\d+)\?|Multiply (\d+) by (\d+)\.|the product of (\d+) and (\d+)\?":
        lambda x, y: x * y,
    r"(?:What|How much) is (\d+) divided by (\d+)\?|Divide (\d+) by (\d+)\.": lambda x, y: x / y,
    r"How often does (\d+) go into (\d+)\?": lambda x, y: y / x,
}
STORIES = {  # and stories, by their last sentence and their numbers in order
    r"has (\d+) \w+ and buys (\d+) boxes with (\d+) .* now\?": lambda x, y, z: x + y * z,
    r"has (\d+) (\w+)\. (\w+) has (\d+) more\..* together\?": lambda x, _, __, y: x + (x + y),
    r"^(\d+) friends share (\d+) \w+\. .* had (\d+)\.": lambda x, y, z: y / x + z,
    r"(\d+) people on a train\. (\d+) get off and (\d+) get on": lambda x, y, z: x - y + z,
}


def test_arithmetic_questions_mean_what_is_computed():
    read = Counter()
    for readings, level in ((READINGS, "easy"), (STORIES, "hard")):
        for conversation in make_task(f"arithmetic:{level}", "test"):
            for pattern, compute in readings.items():
                if found := re.search(pattern, asked(conversation)):
                    numbers = [int(group) if group.isdigit() else group for group in found.groups() if group]
                    assert compute(*numbers) == last_number(reference(conversation)), asked(conversation)
                    read[pattern] += 1
    assert set(read) == {*READINGS, *STORIES} and min(read.values()) >= 10


def test_arithmetic_holds_out_an_expression_on_every_level_and_in_every_order_of_its_numbers():
    def problem(expression: str) -> tuple[str, tuple[int, ...]]:
        return re.sub("[0-9]+", "n", expression), tuple(sorted(map(int, re.findall("[0-9]+", expression))))

    sides = {"train": set(), "test": set()}
    for spec in ("arithmetic", "arithmetic:easy", "arithmetic:medium", "arithmetic:hard"):
        for split, expressions in sides.items():
            expressions |= {problem(parts_of(conversation)[0][1]) for conversation in make_task(spec, split)}
    assert min(map(len, sides.values())) > 5000 and not sides["train"] & sides["test"]
    # Told in the documents of the embedded corpus, so not to be held out.
    told = {problem(row[0]) for row in COMPUTED["additions"] + COMPUTED["subtractions"]}
    assert not told & sides["test"]


# ---- Python: documentation and programs

def test_pydoc_says_what_the_documentation_says_about_that_object():
    """Names are resolved by the standard library's own pydoc, which the task does not use."""
    def plain(text: str) -> str:
        return " ".join(text.lower().split())

    answers = {}
    for spec, split in (("pydoc", "train"), ("pydoc", "test"), ("pydoc:known", "test")):
        task = make_task(spec, split)
        answers[spec, split] = dict(task.objects)
        for name, sentence in task.objects:
            assert plain(sentence).rstrip(".") in plain(inspect.getdoc(pydoc.locate(name)) or ""), name
        for conversation in task[::31]:
            named = {word.strip("?.,") for word in asked(conversation).split()} & dict(task.objects).keys()
            assert reference(conversation) in {dict(task.objects)[name] for name in named}, asked(conversation)
    trained, held_out, known = answers.values()
    assert len(trained) > 2000 and len(held_out) > 200 and known == trained and not trained.keys() & held_out.keys()
    both = trained | held_out
    assert both["dict.pop"] == "Remove specified key and return the corresponding value."  # which follows "-> v, "


def test_what_pydoc_knows_does_not_depend_on_what_else_is_imported():
    """What torch and we change in the standard library would shift a mixture's order, and end a resumed run."""
    code = ("from nanochat.tasks.python_questions import documented; "
            "print([documented(split) for split in ('train', 'test')])")
    more = ("import torch._dynamo; "
            "from nanochat.runtime.exits import install_one_line_errors; install_one_line_errors(); ")
    assert in_a_process(code) == in_a_process(more + code)


def test_what_a_program_prints_is_what_python_prints_and_the_calls_are_what_it_calculates():
    called = Counter()
    for split in ("train", "test"):
        task = make_task("run:tool", split)
        for conversation in task[::len(task) // 25]:
            printed = in_a_process(asked(conversation).partition("\n\n")[2])
            assert conversation["prints"] == printed and task.evaluate(conversation, f"It prints {printed}")
            assert not task.evaluate(conversation, f"It prints {printed} or so")
        for conversation in task[:1000]:
            source = asked(conversation).partition("\n\n")[2]
            content = conversation["messages"][-1]["content"]
            calls = parts_of(conversation)[:-1] if isinstance(content, list) else []
            outputs = [output for kind, output in calls if kind == "python_output"]
            expressions = [expression for kind, expression in calls if kind == "python"]
            assert list(map(calculate, expressions)) == outputs, conversation
            loop = re.fullmatch(r"(\w+) = 0\nfor (\w+) in \[(.+)\]:\n    \1 \+= \2\nprint\(\1\)", source)
            if loop:  # a sum is calculated number by number
                assert list(map(int, outputs)) == list(itertools.accumulate(map(int, loop[3].split(", "))))
            called[bool(calls), bool(loop)] += 1
    assert called[True, True] > 10 and called[True, False] > 500 and called[False, False] > 500


# ---- SpellingBee

def test_spellingbee_sides_share_no_word_and_test_none_that_the_corpus_spells():
    trained, tested = (set(make_task("spellingbee", split).words) for split in ("train", "test"))
    assert len(trained) == 20_000 and len(tested) == 2_000 and not trained & tested
    assert set(WORDS) <= trained
    assert all(re.fullmatch("[a-z]{3,8}", word) for word in trained | tested)
    used = Counter()
    for conversation in make_task("spellingbee", "test"):
        used.update(set(re.findall("[a-z]{3,8}", asked(conversation))) & tested)
    assert set(used) == tested and min(used.values()) >= 3  # every word in each of three kinds


def check_spelling(conversation: dict) -> tuple[str, int]:
    """Kind, and count (0 where none is asked for), of a conversation whose answer is right."""
    question, answer = asked(conversation), conversation["messages"][-1]["content"]
    if "word" in conversation:
        word = re.search(rf'[ "]{conversation["word"]}\b', question)[0].lstrip('"')  # as its tokens are there
        letters = "-".join(word.strip())
        call = f'spell("{word}")'
        assert parts_of(conversation) == [("python", call), ("python_output", letters), ("text", f"{letters}.")]
        assert Tools().result(call, Tokenizer([]), calls=0) == letters
        return "spell", 0
    word = re.search('"([a-z]+)"', question)[1]
    letter = re.search(r" ([a-z])(?:'s)?[ ?.]", question.replace(" a re", ""))[1]
    count = sum(char == letter for char in word)
    assert last_number(reference(conversation)) == count
    if isinstance(answer, list):
        assert parts_of(conversation)[:2] == [("python", f'"{word}".count("{letter}")'), ("python_output", str(count))]
        return "tool", count
    spelled = answer.partition(".")[0]
    assert re.sub("[^a-z]", "", spelled) == word
    assert re.findall("(.):([0-9])", spelled) == [(letter, str(i + 1)) for i in range(count)]
    return "hand", count


def test_spellingbee_spells_and_counts_right():
    checked = [check_spelling(conversation) for conversation in make_task("spellingbee", "test")]
    kinds = Counter(kind for kind, _ in checked)
    counts = Counter(count for kind, count in checked if kind != "spell")
    assert kinds == {"spell": 2000, "tool": 2000, "hand": 2000} and min(counts[0], counts[2]) > 200 and counts[3]


# ---- The words of a tokenizer

def learn_world(folder: Path, more: list[str]) -> Counter:
    """Give the data set `world` a tokenizer that was learned from all facts, and from more words. Counts its words."""
    texts = [" ".join(filter(None, telling)) for fact in facts() for telling in fact.tellings]
    texts += [" ".join(more)] * 3
    learn_tokenizer(texts, 4000).save(folder / "tokenizer" / "world")
    return Counter(re.findall("[a-z]+", " ".join(texts).lower()))


def test_words_are_tokens_and_words_of_several_and_a_word_is_on_one_side_in_all_tasks(base_folder):
    generated = {split: list(make_task("spellingbee", split).words[-60:]) for split in ("train", "test")}
    seen = learn_world(base_folder, generated["train"] + generated["test"])
    trained, tested = (set(make_task("words:world", split).words) for split in ("train", "test"))
    assert len(trained) > 1500 and len(tested) > 100 and not trained & tested
    assert all(split_of(word) == "test" for word in tested) and not set(WORDS) & tested
    for split, other in (("train", tested), ("test", trained)):
        assert not other.intersection(make_task("spellingbee", split).words)
    tokenizer = get_tokenizer("world")
    assert all(len(tokenizer.encode(f" {word}")) > 1 for word in tested), "none of those held out is a token"
    # Without the rule about longer tokens a quarter are fragments: the beginnings of words, and never words themselves.
    tokens = [token.decode() for token in tokenizer.merges if re.fullmatch(b" [A-Za-z]{3,}", token)]
    beginnings = {token[1:].lower() for token in tokens}
    found = trained & beginnings
    assert len(beginnings - set(seen)) > 0.2 * len(beginnings) and len(found - set(seen)) < 0.02 * len(found)
    assert len(found) > 500 and len(found.intersection(generated["train"])) > 30


# ---- TinyWorld

def test_every_fact_is_held_out_in_some_phrasing_that_is_trained_with_other_facts():
    in_documents = {telling.question for fact in facts() for telling in fact.tellings if telling.question}
    tested, trained = ([item for item in world.items(split) if item.right] for split in ("test", "train"))
    assert not {item.question for item in tested} & {item.question for item in trained}
    assert not {item.question for item in tested} & in_documents
    assert in_documents <= {item.question for item in trained}
    # Each fact is recognised by its bare answer, its own in the world: how often it is asked for on either side.
    assert len(tested) >= 2 * len(facts()) and len(trained) >= 8 * len(facts())
    for template in world.CHAT:
        pattern = re.compile(re.escape(template).replace(r"\{np\}", "the .*").replace(r"\{Np\}", "The .*"))
        assert all(sum(bool(pattern.fullmatch(item.question)) for item in items) > 40 for items in (tested, trained))


def test_second_questions_are_held_out_with_what_they_refer_to():
    def pair(conversation: dict) -> tuple[str, str]:
        return asked(conversation), reference(conversation)

    sides = []
    for split in ("train", "test"):
        task = make_task("tinyworld", split)
        two = [c for c in task if len([m for m in c["messages"] if m["role"] == "user"]) == 2]
        assert len(two) == world.TWO_TURNS[split]
        sides.append({pair(c) for c in two if asked(c).startswith(("And ", "What about "))})
    assert min(map(len, sides)) > 80 and not sides[0] & sides[1]


def judge(question: str, answer: str) -> bool:
    """Whether TinyWorld takes the answer to one of its questions, of either side."""
    item = next(item for split in ("train", "test") for item in world.items(split) if item.question == question)
    task = make_task("tinyworld", "train")
    return task.evaluate(single_turn(item.question, item.reply) | {"right": sorted(item.right)}, answer)


@pytest.mark.parametrize("question, right, wrong", [
    ("Tell me the capital of Germany.",
     ("Berlin", "It is Berlin.", "The capital of Germany is Berlin.", "In Germany, the capital is Berlin."),
     ("The capital of Germany is Paris.", "The capital of France is Berlin.", "Paris, Berlin.", "Berliner.")),
    ("Which country has the capital Paris?",
     ("France.", "It is France.", "Paris is the capital of France.", "The capital of France is Paris."),
     ("Paris.", "It is Paris.", "The country has the capital Paris.", "Paris is the capital of Germany.")),
    ("If 2*x + 2 = 6, what is x?", ("2.", "If 2*x + 2 = 6, then 2*x = 4 and x is 2."), ("2*x + 2 = 6.", "12.")),
])
def test_tinyworld_takes_the_fact_and_nothing_near_it(question: str, right: tuple, wrong: tuple):
    for answer in right:
        assert judge(question, answer), answer
    for answer in (*wrong, question, question.rstrip("?.") + ".", ""):
        assert not judge(question, answer), answer


def test_the_model_says_who_it_is():
    task = make_task("tinyworld:identity", "test")
    for conversation in make_task("tinyworld:identity", "train"):
        assert "nanochat" in reference(conversation) and task.evaluate(conversation, reference(conversation))
    of = {reply: single_turn("?", reply) | {"right": []} for reply in world.IDENTITY}
    who, hello, name, _, maker, *_ = of
    # of the canned sentences only the one that was asked for, or with a greeting
    for question, conversation in of.items():
        expected = [who, hello] if question == who else [question]
        assert [reply for reply in of if task.evaluate(conversation, reply)] == expected
    for asked_for, answer, right in (
        (who, "I'm nanochat, a language model!", True), (who, "I am nanochat.", False),
        (who, "I am nanochatty, a language model.", False), (name, "hi! I am called nanochat", True),
        (maker, "I am nanochat, a small language model, made by OpenAI.", False),
    ):
        assert task.evaluate(of[asked_for], answer) == right, answer


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
          "answer": "She sells 6 / 2 = <<6/2=3>>3 eggs.\nThat is 3 * 1,000 = $<<3*1,000=3,000>>3,000.\n#### 3,000"}]
HUMANEVAL = [{"task_id": "HumanEval/0", "entry_point": "double",
              "prompt": 'from typing import List\n\n\ndef double(numbers: List[int]) -> List[int]:\n'
                        '    """ Twice each number.\n    >>> double([1])\n    [2]\n    """\n',
              "canonical_solution": "    return [2 * number for number in numbers]\n",
              "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([]) == []\n"
                      "    assert candidate([1, 2]) == [2, 4]\n\n"}]


def write(base_folder: Path, name: str, rows: list[dict]) -> Path:
    """A file of a local data set, parquet or JSONL by its ending."""
    path = base_folder / "tasks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_smoltalk_from_several_files_keeps_roles_and_texts(base_folder):
    write(base_folder, "smoltalk/data/train-00000-of-00002.parquet", SMOLTALK[:1])
    write(base_folder, "smoltalk/data/train-00001-of-00002.parquet", SMOLTALK[1:])
    task = make_task("smoltalk", "train")
    assert task.eval_type is None and sorted(map(json.dumps, task)) == sorted(map(json.dumps, SMOLTALK))


def test_mmlu_trains_on_the_auxiliary_rows_and_is_measured_on_all(base_folder):
    auxiliary = [{"train": row} for row in MMLU]  # the hub has them wrapped
    write(base_folder, "mmlu/auxiliary_train/train-00000-of-00001.parquet", auxiliary)
    write(base_folder, "mmlu/all/test-00000-of-00001.parquet", MMLU[:1])
    trained = sorted(asked(conversation).splitlines()[1] for conversation in make_task("mmlu", "train"))
    assert trained == ["0 + 1?", "1 + 1?", "2 + 1?"]
    task = make_task("mmlu", "test")
    assert (len(task), task.name, task.eval_type, task.baseline) == (1, "MMLU", "categorical", 0.25)
    assert task[0]["letters"] == list("ABCD") and reference(task[0]) == "B"
    assert asked(task[0]).splitlines()[1:] == ["0 + 1?", "0", "A", "1", "B", "7", "C", "9", "D"]
    assert [letter for letter in "ABCD" if task.evaluate(task[0], letter)] == ["B"]
    check_conversation(task[0])


def test_arc_has_letters_whatever_its_labels_and_three_to_five_choices(base_folder):
    write(base_folder, "arc/ARC-Easy/test.jsonl", ARC)
    task = make_task("arc", "test")
    assert task.name == "ARC-Easy" and task.baseline == pytest.approx((1 / 3 + 1 / 5) / 2)
    found = {asked(conversation).splitlines()[1]: conversation for conversation in task}
    assert found["What is hot?"]["letters"] == list("ABC") and reference(found["What is hot?"]) == "B"
    assert found["What falls?"]["letters"] == list("ABCDE") and reference(found["What falls?"]) == "A"
    assert task.evaluate(found["What is hot?"], "B") and not task.evaluate(found["What is hot?"], "2")
    assert task[:1].baseline in (1 / 3, 1 / 5)  # of the part that is asked, not of the whole


def test_the_letter_in_the_question_is_the_token_of_the_answer(base_folder):
    """After a blank or a sign it would be another one; this tokenizer has merged them as often as it could."""

    write(base_folder, "mmlu/all/test.jsonl", MMLU)
    conversation = make_task("mmlu", "test")[0]
    tokenizer = learn_tokenizer([f"{mark}{letter}{mark}{letter} " * 3
                                 for mark in ("", " ", "=", "(", "\n", ".", "\n\n") for letter in "ABCD"], 400)
    ids = tokenizer.encode(asked(conversation))
    assert all(ids.count(tokenizer.encode(letter)[0]) == 1 for letter in "ABCD")
    assert len(tokenizer.encode("A")) == 1 and tokenizer.encode(" A") != tokenizer.encode("A")


def test_gsm8k_calls_the_calculator_where_it_was_annotated(base_folder):
    write(base_folder, "gsm8k/main/test-00000-of-00001.parquet", GSM8K)
    task = make_task("gsm8k", "test")
    assert parts_of(task[0]) == [
        ("text", "She sells 6 / 2 = "), ("python", "6/2"), ("python_output", "3"),
        ("text", "3 eggs.\nThat is 3 * 1,000 = $"),
        ("python", "3*1000"), ("python_output", "3000"), ("text", "3,000.\n#### 3,000")]
    assert reference(task[0]) == "She sells 6 / 2 = 3 eggs.\nThat is 3 * 1,000 = $3,000.\n#### 3,000"
    check_conversation(task[0])
    for answer in (reference(task[0]), "So\n####3,000.", "#### $3,000.00", "#### 4\nNo:\n#### 3000 dollars"):
        assert task.evaluate(task[0], answer)
    for answer in ("The answer is 3,000.", "#### -3000", "#### 3,0001", "####", "#### 3000\n#### 4"):
        assert not task.evaluate(task[0], answer)


@pytest.mark.parametrize("answer, expected", [
    ("a <<1+1=2>>2<<2*2=4>>4 b", [("text", "a "), ("python", "1+1"), ("python_output", "2"), ("text", "2"),
                                  ("python", "2*2"), ("python_output", "4"), ("text", "4 b")]),
    ("20% of 50 is <<50*20%=10>>10, x", [("text", "20% of 50 is 10, x")]),  # nothing that the calculator knows
])
def test_annotations_become_calls_of_the_tool(answer: str, expected: list[tuple[str, str]]):
    assert [(part["type"], part["text"]) for part in answer_parts(answer)] == expected


def test_humaneval_runs_the_tests_of_its_problem(base_folder):
    write(base_folder, "humaneval/openai_humaneval/test-00000-of-00001.parquet", HUMANEVAL)
    task = make_task("humaneval", "test")
    check_conversation(task[0])
    assert "def double" in asked(task[0]) and "return" not in asked(task[0])
    body = "return [number + number for number in numbers]"
    whole = f"def double(numbers: List[int]) -> List[int]:\n    {body}"  # the import is in the prompt only
    for right in (reference(task[0]), whole, f"Sure!\n\n```python\n{whole}\n```\nIt doubles.", f"```py\n{whole}"):
        assert task.evaluate(task[0], right), right
    for wrong in ("I cannot.", whole.replace("+", "*"), f"{whole}\nimport sys\nsys.exit(0)",
                  f"```python\n{whole.replace('double', 'twice')}\n```", f"{whole}\nassert False"):
        assert not task.evaluate(task[0], wrong), wrong
    with pytest.raises(UserError, match="cannot load the train split of .*humaneval"):
        make_task("humaneval", "train")


# ---- One's own conversations ----------------------------------------------------------------------------------------

def own_file(folder: Path, lines: list[str]) -> Path:
    path = folder / "own.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_own_conversations_are_split_by_their_text_and_duplicates_stay_together(tmp_path):
    lines = [json.dumps(single_turn(f"Frage {i} ü", f"{i}")) for i in range(400)]
    bare = (json.loads(line)["messages"] for line in lines)  # only the list of messages
    again = [json.dumps(messages, ensure_ascii=False, separators=(",", ":")) for messages in bare]
    path = own_file(tmp_path, [*lines, "", *again])
    sides = {split: make_task(f"json:{path}", split) for split in ("train", "test")}
    counts = [Counter(questions(task)) for task in sides.values()]
    assert not set(counts[0]) & set(counts[1]) and len(counts[0]) + len(counts[1]) == 400
    assert all(set(count.values()) == {2} for count in counts) and 5 < len(counts[1]) < 45
    assert set(sides["train"][0]) == {"messages"} and sides["train"].eval_type is None
    assert questions(make_task(f"json:{path}:all", "test"))[:400] == [f"Frage {i} ü" for i in range(400)]


GOOD = json.dumps(single_turn("a", "b"))


@pytest.mark.parametrize("line, problem", [
    ('{"messages": [', "not JSON"), ("17", "messages.*; there is: int"), ("[]", "no messages"),
    ('[{"role": "user", "content": "x"}]', "last message"), ('[{"role": "assistant", "content": "x"}]', "take turns"),
    (json.dumps(single_turn("a", "")), "message 2 is an empty answer"),
])
def test_a_bad_line_is_named_by_file_and_line(tmp_path, line: str, problem: str):
    path = own_file(tmp_path, [GOOD, "", GOOD, line, "worse"])
    with pytest.raises(UserError, match=problem) as caught:
        make_task(f"json:{path}", "train")
    assert str(caught.value).startswith(f"{path}, line 4: ") and "\n" not in str(caught.value)


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
    """{"id": "0", "conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}""":
        "u:Hi a:Hello",
    # Alpaca
    """{"instruction": "Classify.", "input": "Blue", "output": "A color."}""": "u:Classify.\n\nBlue a:A color.",
    """{"instruction": "Say hi.", "input": "", "output": "Hi."}""": "u:Say hi. a:Hi.",
    # trl and mlx-lm: the prompt is not learned
    """{"prompt": "The sky is", "completion": " blue."}""": "u:The sky is a: blue.",
    """{"prompt": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"},
        {"role": "user", "content": "C"}], "completion": [{"role": "assistant", "content": "D"}]}""":
        "u:A a:(B) u:C a:D",
    # Servers of models that reason
    """{"messages": [{"role": "user", "content": "A"},
        {"role": "assistant", "content": "B", "reasoning_content": "Hm."}]}""": "u:A a:B",
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


def test_conversations_in_the_forms_of_other_tools(tmp_path, capsys):
    """As lines and as one JSON list, also compressed; what is not used is said once, with how often it is there."""
    rows = [json.loads(row) for row in FORMS]
    lines = own_file(tmp_path, map(json.dumps, rows))
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=2))
    with gzip.open(tmp_path / "list.json.gz", "wt") as file:
        json.dump(rows, file)
    for path in (lines, tmp_path / "list.json", tmp_path / "list.json.gz"):
        for split in ("train", "test"):
            task = make_task(f"json:{path}:all", split)
            assert [in_short(conversation) for conversation in task] == list(FORMS.values())
            assert all(check_conversation(conversation) is None for conversation in task)
        assert capsys.readouterr().out == (f"{path}: not learned, with counts: answers of weight 0 (2), "
                                           "id (2), name (1), tools (1), reasoning_content (1)\n")


@pytest.mark.parametrize("row, problem", [
    ({"text": "<s>[INST] Hi [/INST] Hello</s>", "id": 3, "n": None}, "no messages; expected .*; there is: text, id$"),
    ({"prompt": "x", "chosen": "y", "rejected": "z"}, "there is: prompt, chosen, rejected$"),
    ({"messages": []}, "there is: messages$"), (["x"], "message 1 has role None; expected one of system, user"),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0.5}],
     r"message 2 has weight 0.5; expected 0 \(read, not learned\) or 1"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "message 1: only .*than texts"),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "content": None}], "message 2: its content is neither"),
    ([{"role": "user", "content": "x"}, {"role": "tool", "content": "1"}], "message 2 has role 'tool'"),
    ([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}], "must take turns, .*: user user"),
    ({"conversations": [{"from": "human", "value": "x"}, {"from": "bing", "value": "y"}]}, "message 2 has role 'bing'"),
    ({"conversations": [{"from": "gpt", "value": "x"}]}, "must take turns, the user first"),
])
def test_what_is_no_conversation_is_named_with_what_is_there(tmp_path, row, problem: str):
    for lines, place in (([GOOD, json.dumps(row)], "line 2"), ([f"[{GOOD}, {json.dumps(row)}]"], "entry 2")):
        path = own_file(tmp_path, lines)
        with pytest.raises(UserError, match=problem) as caught:
            make_task(f"json:{path}:all", "train")
        assert str(caught.value).startswith(f"{path}, {place}: ") and "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8_is_read_with_the_encoding_that_is_named(tmp_path, capsys):
    """Without one the error says which it may be, and how to name it; damage in UTF-8 is said."""
    path = tmp_path / "own.jsonl"
    answers = [f"Die Bäckerei öffnet früh um {i} Uhr; süße Brötchen gibt es für {i} Mäuse." for i in range(40)]
    for encoding, told in (("latin-1", "cp1250|cp1252|latin_1|iso8859_1"), ("utf-16", "utf_16")):
        lines = [json.dumps(single_turn(f"Wann {i}?", answer), ensure_ascii=False) for i, answer in enumerate(answers)]
        path.write_bytes("\n".join(lines).encode(encoding))
        with pytest.raises(UserError, match=rf"not utf-8: .*; perhaps json:{path}:encoding=({told}), which begins"):
            make_task(f"json:{path}", "train")
        with pytest.raises(UserError, match="unknown encoding: latein"):
            make_task(f"json:{path}:encoding=latein", "train")
        for spec in (f"json:{path}:all:encoding={encoding}", f"json:{path}:encoding={encoding}:all"):
            assert [reference(conversation) for conversation in make_task(spec, "train")[:3]] == answers[:3]
    umlauts = [json.dumps(single_turn("Wann?", answer), ensure_ascii=False).encode() for answer in answers]
    path.write_bytes(b"\n".join([*umlauts, GOOD.replace("b", "\xe9").encode("latin-1")]))
    assert len(make_task(f"json:{path}:all", "train")) == len(answers) + 1
    assert f"1 files are damaged UTF-8, whose unreadable characters became U+FFFD: {path}" in capsys.readouterr().out


@pytest.mark.parametrize("name, reason", [("own.jsonl.gz", "inflate"), ("own.jsonl.xz", "ended"), ("", "such file")])
def test_own_conversations_that_cannot_be_read_are_one_line(tmp_path, name, reason):
    (tmp_path / "own.jsonl.gz").write_bytes(b"no")
    (tmp_path / "own.jsonl.xz").write_bytes(b"no")
    path = tmp_path / (name or "nothing.jsonl")
    with pytest.raises(UserError, match=f"^cannot read {path}: .*{reason}.*$"):
        make_task(f"json:{path}", "train")


def test_conversations_that_are_trained_on_are_not_called_held_out(tmp_path):
    path = own_file(tmp_path, [json.dumps(single_turn(f"Frage {i}", f"{i}")) for i in range(100)])
    for specs, said in ((f"json:{path}, arithmetic", "held out"),
                        (f"json:{path}:all[:9]*2", "validation, on the same conversations as in training"),
                        (f"arithmetic, json:{path}:all", rf"validation, held out except json:{path}, the same")):
        assert re.match(said, describe_validation(make_mixture(without_parts(specs), "test", seed=0)))


# ---- Specs, and data that is not there ------------------------------------------------------------------------------

def test_a_task_after_another_is_asked_and_judged_as_it_is_alone():
    """One turn of the other task, without its system message, which may only stand first; then its own conversation."""
    alone, after = make_task("tinyworld", "test"), make_task("after:arithmetic+tinyworld[:400]", "test")
    assert len(after) == 400 and after.name == "TinyWorld after Arithmetic" and len(after[:3]) == 3
    systems = 0
    for index, conversation in enumerate(after):
        check_conversation(conversation)
        first, reply, *rest = conversation["messages"]
        own = alone[index]["messages"]
        systems += own[0]["role"] == "system"
        assert rest == own[own[0]["role"] == "system":]
        assert [first, reply] == make_task("arithmetic", "test")[index]["messages"][-2:]
        assert after.evaluate(conversation, reference(conversation))
        assert not after.evaluate(conversation, reference({"messages": [first, reply]}))
    assert systems > 5
    with pytest.raises(UserError, match="task '' is not NAME"):
        make_task("after:lookup", "train")


def test_specs_say_which_task_which_part_and_how_often(tmp_path):
    assert len(make_task("arithmetic:hard[:30]", "train")) == 30
    assert questions(make_task("spellingbee[10:12]", "test")) == questions(make_task("spellingbee", "test"))[10:12]
    assert len(make_task("arithmetic[100:]", "test")) == len(make_task("arithmetic", "test")) - 100
    path = own_file(tmp_path, [json.dumps(single_turn(f"own {i}", "x")) for i in range(10)])
    mixture = make_mixture(f"arithmetic:easy[:30],spellingbee[:20]*2 , json:{path}:all*3, json:{path}:all[:1]", "train",
                           seed=1)
    assert len(mixture) == 30 + 40 + 30 + 1
    counts = Counter(questions(mixture))
    assert counts["own 0"] == 4 and counts["own 1"] == 3
    assert sum(count == 2 for count in counts.values()) == 20


@pytest.mark.parametrize("spec, problem", [
    ("arithmetic*0", "NAME"), ("arithmetic:brutal", "expected easy or medium or hard"), ("gsm8k:x", "expected no arg"),
    ("words", "needs an argument.*words:climbmix"), ("arithmetic[99999:]", "nothing is left of its 20,000"),
    ("spelingbee:tool", r"no task 'spelingbee'; known: .*; did you mean 'spellingbee'\?$"),
])
def test_wrong_specs_are_said_to_be_wrong(spec: str, problem: str):
    with pytest.raises(UserError, match=problem) as caught:
        make_mixture(spec, "train", seed=0)
    assert "\n" not in str(caught.value)


def test_local_folders_without_the_right_files_say_what_is_missing(base_folder):
    write(base_folder, "gsm8k/main/train-00000-of-00001.parquet", GSM8K)
    with pytest.raises(UserError, match="cannot load the test split of .*tasks/gsm8k/main: Unknown split"):
        make_task("gsm8k", "test")


def test_without_a_network_it_says_so_in_one_line():
    """In a process of its own: whether the hub may be asked is settled when its package is imported."""
    code = ("from nanochat.runtime.errors import UserError\nfrom nanochat.tasks import make_task\n"
            "try:\n    make_task('gsm8k', 'train')\nexcept UserError as error:\n    print(error)")
    said = in_a_process(code, HF_HUB_OFFLINE="1", HF_HOME=os.environ["NANOCHAT_BASE_DIR"])
    assert re.fullmatch(r"cannot load the train split of openai/gsm8k from the hub, and there is no .*: .*\n", said)


def test_example_questions_are_of_tasks_that_are_made_here_only():
    """Neither downloads nor a user's own conversations and libraries; what is not known here is left out."""
    for specs in ("", "gsm8k, json:/nobody/reads/this.jsonl", "tinyworld:of-another-version"):
        assert example_questions(specs) == []
    questions = example_questions("json:/nobody.jsonl, lookup:/nowhere, spellingbee[:600]*2, arithmetic:hard", count=6)
    held_out = [one["messages"][0]["content"] for spec in ("spellingbee", "arithmetic:hard")
                for one in make_task(spec, "test")]
    assert len(set(questions)) == 6 and set(questions) <= set(held_out) and max(map(len, questions)) <= 80
