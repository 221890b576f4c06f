"""
What the objects of Python's standard library do, as their own documentation says: needs no download.

    "What does str.partition do?" - "Partition the string into three parts using the given separator."

    pydoc          test: objects that are held out; a fifth of the answers is trained on under another name (str.find's
                   under bytes.find)
    pydoc:known    test: objects that are trained on, each asked in the one phrasing that is never used for it

The objects, and some answers, are those of the running Python: another version has a few others.
"""
import re
from collections import Counter
from functools import cache

from nanochat.corpus.python_docs import documentation, first_paragraph, first_sentence
from nanochat.data.conversation import Conversation
from nanochat.data.task import Task, reference
from nanochat.tasks.common import read_texts, single_turn, split_of, stable_hash

QUESTIONS = read_texts("python_questions")["questions"].splitlines()
WORD = re.compile(r"(?<!\S)[a-z]{3,}(?=[,.;:]?(?:\s|$))")  # in a sentence, not in a piece of code


class Pydoc(Task):
    eval_type = "generative"

    def __init__(self, argument: str, split: str) -> None:
        self.known = argument == "known"
        self.name = "Pydoc (objects it has read about)" if self.known else "Pydoc (held-out objects)"
        side = "train" if self.known else split
        self.objects = [(name, text) for name, text in documented().items() if split_of(f"pydoc:{name}") == side]
        self.turns = 1 if split == "test" else len(QUESTIONS) - 1  # in training all phrasings but the one held out
        self.held_out = split == "test" and self.known

    def __len__(self) -> int:
        return len(self.objects) * self.turns

    def conversation(self, index: int) -> Conversation:
        """In every pass over the objects each of them once, in another phrasing each time."""
        turn, number = divmod(index, len(self.objects))
        name, text = self.objects[number]
        own = stable_hash(f"phrasing:{name}")  # the phrasing that is held out for this object; the others come after it
        later = 0 if self.held_out else 1 + (own // len(QUESTIONS) + turn) % (len(QUESTIONS) - 1)
        question = QUESTIONS[(own + later) % len(QUESTIONS)].format(n=name)
        return single_turn(question, text) | {"paragraph": first_paragraph(documentation()[name])}

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """The same words in the same order: those of the sentence, or of more of its paragraph, as a library has it."""
        said = words_of(answer)
        sentence = words_of(reference(conversation))
        paragraph = words_of(conversation["paragraph"])
        return said[: len(sentence)] == sentence and said == paragraph[: len(said)]


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@cache
def documented() -> dict[str, str]:
    """Names of objects, and the first sentence about each, in the order of a hash."""
    found = {}
    for name in sorted(documentation(), key=lambda name: stable_hash(f"pydoc:{name}")):
        sentence = first_sentence(documentation()[name])
        if sentence:
            found[name] = sentence
    return found


@cache
def documentation_words() -> frozenset[str]:
    """The words that stand at least twice in the documentation's sentences: lower-case, of three letters and more."""
    found = Counter()
    for doc in documentation().values():
        found.update(re.findall(WORD, doc))
    return frozenset(word for word, count in found.items() if count > 1)
