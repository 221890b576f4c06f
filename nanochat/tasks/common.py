"""
Tasks: sequences of conversations, to train on or to be measured by.

    task[17]               # a whole conversation, its last message the right answer; the same one every time
    task[:100]             # the first hundred, as a task again
    task.evaluate(conversation, "The answer is 36.")

What is drawn here is drawn by hashes or by `random.Random(text).random()`, which are the same on every machine.
"""
import bisect
import hashlib
import itertools
import random
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from nanochat.conversation import Conversation
from nanochat.dataset import first_line
from nanochat.errors import UserError
from nanochat.files import base_dir

SPLITS = ("train", "test")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FORMATS = {"parquet": ("parquet",), "json": ("jsonl", "json")}  # loader of `datasets` -> endings of its files


# ---- A task, a part of one, several of them

class Task(Sequence):
    """
    A sequence of conversations. A task defines `__len__`, `conversation` and, where it is measured, `evaluate`;
    conversations may carry more keys than "messages", for `evaluate`. Categorical ones carry "letters".
    """
    name = ""                                                    # its row in the report
    eval_type: Literal["categorical", "generative"] | None = None  # how it is measured; None: only to train on

    def conversation(self, index: int) -> Conversation:
        """Conversation 0 <= index < len(self): a pure function of the task and the index."""
        raise NotImplementedError

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """
        Whether the answer is right. Generative: the text that the assistant wrote, without calls of tools and their
        output. Categorical: the letter chosen.
        """
        if self.eval_type != "categorical":
            raise NotImplementedError(f"{self.name or type(self).__name__} is only to train on")
        return answer == reference(conversation)

    def reward(self, conversation: Conversation, answer: str) -> float:
        """What reinforcement learning gives for the answer."""
        return float(self.evaluate(conversation, answer))

    @cached_property
    def baseline(self) -> float:
        """The accuracy of guessing: the mean of 1 / number of choices, 0 where there is nothing to choose from."""
        if self.eval_type != "categorical":
            return 0.0
        return sum(1 / len(conversation["letters"]) for conversation in self) / len(self)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Slice(self, range(len(self))[index])
        return self.conversation(range(len(self))[index])  # the range counts from the end and raises IndexError


class Slice(Task):
    """Some conversations of a task."""

    def __init__(self, task: Task, indices: Sequence[int]) -> None:
        self.task, self.indices = task, indices
        self.name, self.eval_type = task.name, task.eval_type
        self.evaluate, self.reward = task.evaluate, task.reward

    def __len__(self) -> int:
        return len(self.indices)

    def conversation(self, index: int) -> Conversation:
        return self.task[self.indices[index]]


class Concatenation(Task):
    """Tasks one after the other; one that is given twice comes twice. To train on: answers belong to the parts."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = list(tasks)
        self.starts = list(itertools.accumulate(map(len, self.tasks), initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def conversation(self, index: int) -> Conversation:
        number = bisect.bisect_right(self.starts, index) - 1
        return self.tasks[number][index - self.starts[number]]


class Mixture(Concatenation):
    """All conversations of several tasks, in an order that depends on their lengths and the seed only."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        super().__init__(tasks)
        self.order = shuffled(len(self), f"mixture:{seed}")

    def conversation(self, index: int) -> Conversation:
        return super().conversation(int(self.order[index]))


# ---- Chance that is the same everywhere

def shuffled(count: int, key: str) -> np.ndarray:
    """(count,) int64: 0 … count-1 in an order that depends on the key only."""
    uniform = random.Random(key).random
    return np.argsort(np.fromiter((uniform() for _ in range(count)), np.float64, count), kind="stable")


def drawing(key: str) -> Callable[[int], int]:
    """A function n -> one of 0 … n-1, whose results, call by call, depend on the key only."""
    uniform = random.Random(key).random
    return lambda n: int(uniform() * n)


def hashed(key: str) -> int:
    """A number of 64 bits that depends on the key only: to decide the side of an item, whatever seeds there are."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def side(key: str, one_in: int = 10) -> str:
    """"test" for one in so many keys, "train" for the others: an item's own text decides, so none is on both sides."""
    return "test" if hashed(f"side:{key}") % one_in == 0 else "train"


# ---- Answers

def exchange(question: str, answer: str | list[dict]) -> Conversation:
    """The conversation of one question and its answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def with_tool(expression: str, output: str, text: str) -> list[dict]:
    """The parts of an answer that calls the tool first."""
    return [{"type": "python", "text": expression}, {"type": "python_output", "text": output}, {"type": "text", "text": text}]


def reference(conversation: Conversation) -> str:
    """The text of the last message, tools left out: what `evaluate` must find right."""
    content = conversation["messages"][-1]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content if part["type"] == "text")


def last_number(text: str) -> float | None:
    """The last number in a text; commas may group its digits. None where there is none."""
    found = re.findall(r"(?<![\w.])-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?", text)
    return float(found[-1].replace(",", "")) if found else None


def multiple_choice(question: str, choices: Sequence[str], right: int) -> Conversation:
    """
    A question with lettered choices; the answer is the letter alone.

    Each letter follows its choice: when the model reads it, it has just read the choice, so what the letter stands for
    can be kept at the letter, and one look back from the answer finds it. (A letter before its choice is read when
    nothing is known of it yet.) It stands on a line of its own because only there is it the same token as the answer:
    after a blank or a sign, the tokenizer joins the two.
    """
    letters = list(LETTERS[:len(choices)])
    lines = [line for choice, letter in zip(choices, letters) for line in (choice.strip(), letter)]
    question = "\n".join(["Which letter follows the right answer?", question.strip(), *lines])
    return exchange(question, letters[right]) | {"letters": letters}


# ---- Data sets of the hub

class HubTask(Task):
    """
    A data set of the Hugging Face hub. Its rows come in a shuffled order that is always the same, because many data
    sets are sorted, and the first hundred of them would all be about one subject.
    """
    hub = ""                       # its name there
    folder = ""                    # its name below $NANOCHAT_BASE_DIR/tasks/
    columns: tuple[str, ...] = ()  # those that are needed

    def __init__(self, config: str, split: str) -> None:
        self.rows = load_rows(self.hub, self.folder, config, split, self.columns)
        self.order = shuffled(len(self.rows), self.hub)

    def __len__(self) -> int:
        return len(self.rows)

    def conversation(self, index: int) -> Conversation:
        number = int(self.order[index])
        try:
            return self.converse(self.rows[number])
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{self.hub}: row {number} is not as expected: {type(error).__name__}: {first_line(error)}") from error

    def converse(self, row: dict) -> Conversation:
        """The conversation of a row."""
        raise NotImplementedError


def load_rows(hub: str, folder: str, config: str, split: str, columns: Sequence[str]):
    """
    The rows of a data set: from the folder $NANOCHAT_BASE_DIR/tasks/<folder> if it is there, else from the hub.

    The folder has the layout of the hub's repository, one folder for each configuration:

        tasks/smoltalk/data/train-00000-of-00004.parquet …         HuggingFaceTB/smol-smoltalk (train, test)
        tasks/mmlu/auxiliary_train/train-00000-of-00001.parquet    cais/mmlu (to train on)
        tasks/mmlu/all/test-00000-of-00001.parquet                 cais/mmlu (to be measured by)
        tasks/arc/ARC-Easy/train-00000-of-00001.parquet            allenai/ai2_arc (ARC-Easy and ARC-Challenge; train, test)
        tasks/gsm8k/main/train-00000-of-00001.parquet              openai/gsm8k (train, test)
        tasks/humaneval/openai_humaneval/test-00000-of-00001.parquet   openai/openai_humaneval (test)

    so `hf download --repo-type dataset openai/gsm8k --local-dir tasks/gsm8k` makes it. Of a split are all files named
    <split>.<ending> or <split>-<anything>.<ending>; endings: parquet, or jsonl or json with one object a line.

    UserError when the package, the data, or one of the columns is missing.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(f"the data set {hub} needs the `datasets` package: pip install datasets") from None
    own = base_dir() / "tasks" / folder
    place = own / config
    try:
        if own.is_dir():
            kind, files = local_files(place, split, hub)
            cache = str(base_dir() / "tasks" / "cache")
            rows = datasets.load_dataset(kind, data_files=[str(file) for file in files], split="train", cache_dir=cache)
        else:
            rows = datasets.load_dataset(hub, None if config == "data" else config, split=split)
    except UserError:
        raise
    except Exception as error:  # the package raises all kinds: no network, no such set, a damaged file
        source = f"cannot read {place}" if own.is_dir() else f"no {place}, and cannot load {hub} from the hub"
        raise UserError(f"{source}: {type(error).__name__}: {first_line(error)}") from error
    if not len(rows):
        raise UserError(f"the {split} split of {hub} ({place if own.is_dir() else 'hub'}) has no rows")
    if lacking := [column for column in columns if column not in rows.column_names]:
        raise UserError(f"the {split} split of {hub} has no column {lacking[0]!r}; there is: {', '.join(rows.column_names)}")
    return rows


def local_files(place: Path, split: str, hub: str) -> tuple[str, list[Path]]:
    """The loader and the files of a split in a local folder."""
    for kind, endings in FORMATS.items():
        pattern = re.compile(rf"{split}(-.*)?\.({'|'.join(endings)})")
        files = sorted(file for file in place.glob("*") if pattern.fullmatch(file.name))
        if files:
            return kind, files
    raise UserError(f"no {split}-*.parquet or {split}.jsonl in {place}: expected the layout of {hub}; "
                    f"without the folder {place.parent} it is loaded from the hub")
