"""Helpers for all tasks: mixtures, shuffles and splits that are the same on every machine, forms of conversations."""
import bisect
import hashlib
import itertools
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from nanochat.data.conversation import Conversation
from nanochat.data.task import Task
from nanochat.runtime.files import read_toml


class Shuffled(Task):
    """A task that shuffles what it is made of: conversation i is made of number order[i]."""
    order: np.ndarray

    def __len__(self) -> int:
        return len(self.order)


class Mixture(Shuffled):
    """
    All conversations of several tasks, in an order that depends only on their lengths and the seed. A task that is
    given twice occurs twice. For training only: it has no judge.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self.tasks = tasks
        self.starts = list(itertools.accumulate(map(len, tasks), initial=0))
        self.order = shuffled(self.starts[-1], f"mixture:{seed}")

    def conversation(self, index: int) -> Conversation:
        position = int(self.order[index])
        # The task whose conversations begin at or before this position.
        number = bisect.bisect_right(self.starts, position) - 1
        return self.tasks[number][position - self.starts[number]]


def shuffled(count: int, key: str) -> np.ndarray:
    """(count,) int64: 0 … count-1 in an order that depends only on the key."""
    uniform = random.Random(key).random
    return np.argsort(np.fromiter((uniform() for _ in range(count)), np.float64, count), kind="stable")


def stable_hash(key: str) -> int:
    """64 bits of SHA-256: unlike Python's hash, the same in every process."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def split_of(key: str, one_in: int = 10) -> str:
    """"test" for one key in `one_in`, else "train". An item's own text decides, so no item is in both splits."""
    return "test" if stable_hash(f"side:{key}") % one_in == 0 else "train"


class Drawn(Task):
    """
    A task whose problems are drawn: `draw` of 0, 1, …, without None and without problems that begin with the same text
    as an earlier one. A problem is drawn when an index first needs it; for one thread at a time.
    """
    eval_type = "generative"
    sizes: dict[str, int]   # conversations of each split

    def __init__(self, argument: str, split: str) -> None:
        self.name = f"{type(self).__name__} {argument}".rstrip()
        self.split = split
        self.candidates = map(self.draw, itertools.count())
        self.texts: set[str] = set()
        self.problems: list[tuple] = []

    def draw(self, number: int) -> tuple | None:
        raise NotImplementedError

    def __len__(self) -> int:
        return self.sizes[self.split]

    def problem(self, index: int) -> tuple:
        while index >= len(self.problems):
            problem = next(self.candidates)
            if problem and problem[0] not in self.texts:
                self.texts.add(problem[0])
                self.problems.append(problem)
        return self.problems[index]


@cache
def read_texts(task: str) -> dict[str, Any]:
    """
    The texts of tasks/TASK.toml by name, or groups of them: sentences, words, and templates, which str.format fills.

    A slot is {letter}, and each file says at its top what its letters stand for. A capital letter stands for the same
    as the small one, written with a capital, except in run.toml, where capitals are lists, and in arithmetic.toml,
    where {A} and {B} are names. In lookup.toml a slot without a given word draws a new one each time.
    " | " separates a question from what it asks for.
    """
    return read_toml(f"tasks/{task}.toml")


def lines_of(table: dict[str, str]) -> dict[str, list[str]]:
    return {key: text.splitlines() for key, text in table.items()}


def single_turn(question: str, answer: Any, calls: Sequence[tuple[str, str]] = ()) -> Conversation:
    """The conversation of one question and its answer, which first calls tools. calls: (expression, output)."""
    if calls:
        parts = []
        for expression, output in calls:
            parts += [("python", expression), ("python_output", output)]
        answer = as_parts([*parts, ("text", answer)])
    return {"messages": [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]}


def as_parts(parts: list[tuple[str, str]]) -> list[dict]:
    """The (type, text) parts of an answer in the form of conversations, without empty ones."""
    return [{"type": kind, "text": text} for kind, text in parts if text]


def last_number(text: str) -> float | None:
    """The last number in a text; commas may group its digits. None if there is none."""
    found = re.findall(r"(?<![\w.])-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?", text)
    return float(found[-1].replace(",", "")) if found else None
