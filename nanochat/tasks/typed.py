"""
What people type first into a chat: needs no download.

    typed:messages    "hi", "who are you?", "thx", "erzähl mir einen witz"
    typed:sums        "whats 5x5", "100/7", "Was ist 7 mal 8?", "5/0"

The problems of the test split were written by hand, and so was the judge of each kind of message (typed.toml). Training
has other wordings (typed_training.toml). A sum's call and answer are those that the engine itself makes (`read_sum`).
"""
import re

from nanochat.data.conversation import Conversation
from nanochat.data.stable_random import StableRandom
from nanochat.inference.calculator import calculate
from nanochat.inference.sums import read_sum
from nanochat.tasks.common import Shuffled, read_texts, shuffled, single_turn

SUMS = 2_000    # to train on
PASSES = 6      # over the messages to train on, all but the first in other forms
# A sentence that says that there is no result.
HONEST = re.compile(r"\b(cannot|do not know)\b")
WORD = re.compile(r"-?\d+(?:\.\d+)?|[a-z]+")


class Typed(Shuffled):
    """argument: "messages" or "sums"."""
    eval_type = "generative"

    def __init__(self, argument: str, split: str) -> None:
        self.name = f"Typed {argument}"
        data = read_texts("typed" if split == "test" else "typed_training")
        texts = data[argument]
        if argument == "sums":
            lines = texts.splitlines()
            self.found = [*map(tested_sum, lines)] if split == "test" else [drawn_sum(lines, n) for n in range(SUMS)]
        elif split == "test":
            self.found = [single_turn(way, "") | {"right": kind["right"]}
                          for kind in texts.values() for way in kind["ways"].splitlines()]
        else:
            self.found = [drawn_message(way, reply, data["around"][language].splitlines(), again)
                          for again in range(PASSES) for language, replies in texts.items()
                          for reply, ways in replies.items() for way in ways.splitlines()]
        self.order = shuffled(len(self.found), self.name)

    def conversation(self, index: int) -> Conversation:
        return self.found[self.order[index]]

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """A sum: a number, or a word, that is accepted; else honesty. A message: one of its kind's expressions."""
        if "accepted" not in conversation:
            return any(re.search(expression, answer, re.IGNORECASE) for expression in conversation["right"])
        if not conversation["accepted"]:
            return bool(HONEST.search(answer))
        # Of a number with four places these are enough.
        return any(said == one or "." in one[:-4] and said.startswith(one)
                   for said in WORD.findall(answer.lower()) for one in conversation["accepted"])


def tested_sum(line: str) -> Conversation:
    question, _, accepted = line.rpartition("|")
    return single_turn(question.strip(), "") | {"accepted": accepted.split()}


def drawn_sum(forms: list[str], number: int) -> Conversation:
    """Numbers are mostly small; some have thousands commas or decimals."""
    rng = StableRandom(f"typed sum:{number}")

    def drawn() -> str:
        value = rng.below(10 ** (1 + rng.below(3)))
        return rng.choice([f"{value}"] * 4 + [f"{value + 1000:,}", f"{value}.5"])

    question = rng.choice(forms).format(a=drawn(), b=drawn(), c=drawn(), s=rng.choice("+-*/+-*/+-*/x×÷"))
    call, answer = read_sum(question)
    return single_turn(question, answer, [(call, str(calculate(call)))] if call else [])


def drawn_message(way: str, reply: str, around: list[str], again: int) -> Conversation:
    """The message as it is; or in another form, perhaps with words around it."""
    rng = StableRandom(f"typed message:{way}:{again}")
    if again:
        bare = way.rstrip("?!.。？！ ")
        way = rng.choice([way.lower(), bare, rng.choice(around).replace("…", bare)])
    return single_turn(way, reply)
