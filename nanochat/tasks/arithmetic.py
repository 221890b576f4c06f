"""
Arithmetic with the calculator: needs no download, and the problems of the test split are never trained on.

    arithmetic:easy      one operation: "Subtract 12 from 37."
    arithmetic:medium    two operations: "Add 37 and 12, then multiply by 4."
    arithmetic:hard      stories of two steps, and three operations with larger numbers
    arithmetic           the three in turn

The model writes numbers and the tool computes, so the model has to learn which expression is meant.
Results are whole and not negative.
"""
import re

from nanochat.corpus.tinyworld import COMPUTED, SLOTS
from nanochat.data.conversation import Conversation
from nanochat.data.stable_random import StableRandom
from nanochat.inference.calculator import calculate
from nanochat.tasks.common import Drawn, last_number, lines_of, read_texts, single_turn, split_of

DIGITS = {"easy": 3, "medium": 3, "hard": 4}  # for each level the most digits of a drawn number
# The documents of the embedded corpus contain these sums, so they cannot be held out.
KNOWN = {row[0] for row in COMPUTED["additions"] + COMPUTED["subtractions"]}

TEXTS = read_texts("arithmetic")
# For each level the shapes of expressions, and ways to ask for each.
SHAPES = {level: lines_of(TEXTS[level]) for level in DIGITS}


class Arithmetic(Drawn):
    """argument: a level; without one all are drawn in turn."""
    sizes = {"train": 20_000, "test": 2_000}

    def __init__(self, argument: str, split: str) -> None:
        super().__init__(argument, split)
        self.levels = [argument] if argument else list(DIGITS)

    def draw(self, number: int) -> tuple[str, str, int] | None:
        """
        Question, expression and result of a candidate. None if it belongs to the other split, would have a negative
        number on the way, is told in the corpus, or ends with its own answer. An expression's own text, with sorted
        numbers, decides its split, on every level alike: if 12 * 37 is held out, so is 37 * 12.
        """
        level = self.levels[number % len(self.levels)]
        rng = StableRandom(f"arithmetic:{level}:{number}")
        shape = rng.choice(list(SHAPES[level]))
        a, b, c, d = (draw_number(rng, DIGITS[level]) for _ in range(4))
        slots: dict[str, object] = dict(a=a, b=b, c=c, d=d, q=a * b, t=a * b + c)
        expression = shape.format(**slots)
        result = int(calculate(expression))
        numbers = sorted(map(int, re.findall("[0-9]+", expression)))
        key = re.sub("[0-9]+", "n", expression)
        if split_of(f"{key} {numbers}") != self.split or expression in KNOWN:
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
        # An answer that only repeats the question must not be right by accident.
        return None if last_number(question) == result else (question, expression, result)

    def conversation(self, index: int) -> Conversation:
        question, expression, result = self.problem(index)
        return single_turn(question, f"The answer is {result}.", [(expression, f"{result}")])

    def result(self, answer: str) -> float | None:
        return last_number(answer)


def draw_number(rng: StableRandom, digits: int) -> int:
    """A number from 2 on; it has 1, 2, … digits equally often."""
    end = 10 ** (1 + rng.below(digits))
    start = max(end // 10, 2)
    return start + rng.below(end - start)
