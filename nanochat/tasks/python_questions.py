"""
What the objects of Python's standard library do, as their own documentation says: needs no download.

    "What does str.partition do?" - "Partition the string into three parts using the given separator."

    pydoc          test: held-out objects; a fifth of the answers is trained on under another name (str.find's answer
                   under bytes.find)
    pydoc:known    test: objects that are trained on, each in the one phrasing that is never used for it

The objects, and some answers, come from the running Python: another version has a few others.
"""
import re
from collections import Counter
from functools import cache

from nanochat.data.conversation import Conversation
from nanochat.data.task import Task, reference
from nanochat.library.python_docs import documentation, first_paragraph, first_sentence
from nanochat.tasks.common import read_texts, single_turn, split_of, stable_hash

QUESTIONS = read_texts("lookup")["lookup"].splitlines()[:10]
# A word of a sentence, not of code.
WORD = re.compile(r"(?<!\S)[a-z]{3,}(?=[,.;:]?(?:\s|$))")


class Pydoc(Task):
    eval_type = "generative"

    def __init__(self, argument: str, split: str) -> None:
        known = argument == "known"
        self.name = "Pydoc (objects it has read about)" if known else "Pydoc (held-out objects)"
        self.objects = list(documented("train" if known else split).items())
        # Each object is trained on in all phrasings but one, which the test split uses.
        self.turns = 1 if split == "test" else len(QUESTIONS) - 1
        self.held_out_phrasing = split == "test" and known

    def __len__(self) -> int:
        return len(self.objects) * self.turns

    def conversation(self, index: int) -> Conversation:
        """Every pass over the objects has each object once, in another phrasing each time."""
        turn, number = divmod(index, len(self.objects))
        name, text = self.objects[number]
        # The hash chooses the object's held-out phrasing; the other phrasings come after it.
        phrasing = stable_hash(f"phrasing:{name}")
        if not self.held_out_phrasing:
            phrasing += 1 + (phrasing // len(QUESTIONS) + turn) % (len(QUESTIONS) - 1)
        question = QUESTIONS[phrasing % len(QUESTIONS)].format(n=name)
        return single_turn(question, text) | {"paragraph": first_paragraph(documentation()[name])}

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """The same words in the same order: the sentence's, or more of its paragraph's, as a library has it."""
        said = plain_words(answer)
        # The paragraph begins with the sentence.
        paragraph = plain_words(conversation["paragraph"])
        return len(said) >= len(plain_words(reference(conversation))) and said == paragraph[: len(said)]


def plain_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@cache
def documented(split: str) -> dict[str, str]:
    """A split's objects, in the order of a hash: names, and the first sentence about each."""
    objects = {}
    for name in sorted(documentation(), key=lambda name: stable_hash(f"pydoc:{name}")):
        sentence = first_sentence(documentation()[name])
        if sentence and split_of_name(name) == split:
            objects[name] = sentence
    return objects


def split_of_name(name: str) -> str:
    """The split of an object by its name."""
    return split_of(f"pydoc:{name}")


@cache
def documentation_words() -> frozenset[str]:
    """The words that occur at least twice in the documentation's sentences: lower-case, of three or more letters."""
    counts = Counter(WORD.findall("\n".join(documentation().values())))
    return frozenset(word for word, count in counts.items() if count > 1)
