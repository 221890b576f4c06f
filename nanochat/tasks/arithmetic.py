"""
Arithmetic with the calculator: needs no download, and the problems of the test split are never trained on.

    arithmetic:easy      one operation: "Subtract 12 from 37."
    arithmetic:medium    two operations: "Add 37 and 12, then multiply by 4."
    arithmetic:hard      stories of two steps, and three operations with larger numbers
    arithmetic           the three in turn
    arithmetic:quick     two operations, "Quick: …", shown half with the calculator and half without it

Quick problems are for reinforcement learning: a model that imitates the examples leaves out the calculator half of the
time, and is then mostly wrong; rewards teach it which way is better.

The model writes numbers and the tool computes, so the model has to learn which expression is meant.
Results are whole and not negative.
"""
import re
from functools import cache
from typing import NamedTuple

from nanochat.corpus.tinyworld import COMPUTED, SLOTS
from nanochat.data.conversation import Conversation
from nanochat.data.stable_random import StableRandom
from nanochat.data.task import Task
from nanochat.inference.calculator import calculate
from nanochat.tasks.common import Distinct, last_number, paragraphs, read_texts, single_turn, split_of

SIZES = {"train": 20_000, "test": 2_000}
LEVELS = ("easy", "medium", "hard")
DIGITS = {"easy": 3, "medium": 3, "hard": 4, "quick": 3}  # most digits of a drawn number
# The documents of the embedded corpus contain these sums, so they cannot be held out.
KNOWN = {row[0] for row in COMPUTED["additions"] + COMPUTED["subtractions"]}

TEXTS = read_texts("arithmetic")
# For each level the shapes of expressions, and ways to ask for each.
SHAPES = {level: paragraphs(TEXTS[level]) for level in LEVELS}
SHAPES["quick"] = SHAPES["medium"]


class Problem(NamedTuple):
    question: str
    expression: str | None  # for the tool; None: answered without it
    result: int


class Arithmetic(Task):
    eval_type = "generative"

    def __init__(self, argument: str, split: str) -> None:
        self.name = f"Arithmetic {argument}".rstrip()
        self.size = SIZES[split]
        self.problems = problems(argument, split)

    def __len__(self) -> int:
        return self.size

    def conversation(self, index: int) -> Conversation:
        question, expression, result = self.problems[index]
        calls = [(expression, f"{result}")] if expression else []
        return single_turn(question, f"The answer is {result}.", calls)

    def result(self, answer: str) -> float | None:
        return last_number(answer)


@cache
def problems(level: str, split: str) -> Distinct:
    """The problems of a split, in a fixed order; level "": all levels in turn."""
    levels = [level] if level else LEVELS
    return Distinct(lambda number: draw_problem(levels[number % len(levels)], number, split))


def draw_problem(level: str, number: int, split: str) -> Problem | None:
    """
    Candidate `number` of a level. None if it belongs to the other split, would have a negative number on the way, is
    told in the corpus, or ends with its own answer. An expression's own text, with sorted numbers, decides its split,
    on every level alike: if 12 * 37 is held out, so is 37 * 12.
    """
    rng = StableRandom(f"arithmetic:{level}:{number}")
    shape = rng.choice(list(SHAPES[level]))
    a, b, c, d = (draw_number(rng, DIGITS[level]) for _ in range(4))
    slots: dict[str, object] = dict(a=a, b=b, c=c, d=d, q=a * b, t=a * b + c)
    expression = shape.format(**slots)
    result = int(calculate(expression))
    numbers = sorted(map(int, re.findall("[0-9]+", expression)))
    key = re.sub("[0-9]+", "n", expression)
    if split_of(f"{key} {numbers}") != split or expression in KNOWN:
        return None
    if result < 0 or a < b and "{a} - {b}" in shape:
        return None

    one = rng.choice(SLOTS["A"])
    other = rng.choice([name for name in SLOTS["B"] if name != one])
    slots |= dict(e=expression, A=one, B=other, f=rng.choice(SLOTS["f"]))
    phrasings = SHAPES[level][shape]
    # A story is always told; other expressions are also asked for in generic ways.
    if "{A}" not in phrasings[0] and not rng.below(2):
        phrasings = TEXTS["any_shape"]
    question = rng.choice(phrasings).format(**slots)
    if level == "quick":
        question = f"Quick: {question}"
        if not rng.below(2):
            expression = None
    # An answer that only repeats the question must not be right by accident.
    if last_number(question) == result:
        return None
    return Problem(question, expression, result)


def draw_number(rng: StableRandom, digits: int) -> int:
    """A number from 2 on; it has 1, 2, … digits equally often."""
    end = 10 ** (1 + rng.below(digits))
    start = max(end // 10, 2)
    return start + rng.below(end - start)
