"""
A task: a sequence of conversations with a judge. The tasks themselves are in nanochat/tasks/.

    task[17]               # a whole conversation, ending with the right answer; always the same
    task[:100]             # the first hundred, again a task
    task.evaluate(conversation, "The answer is 36.")
"""
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

from nanochat.data.conversation import Conversation, text_of


class Task(Sequence):
    """
    A sequence of conversations. A task defines `__len__`, `conversation` and, if it is measured, `evaluate`.
    Conversations may have more keys than "messages", for `evaluate`. Categorical tasks have "letters".
    """
    name = ""                                                    # its row in the report
    eval_type: Literal["categorical", "generative"] | None = None  # how it is measured; None: only to train on
    held_out = True                                              # its test split is not trained on
    library: str | None = None                                   # name of what answers search; None: Python's
    notes: Any = None           # an object with lookup and search that answers instead

    def conversation(self, index: int) -> Conversation:
        """Conversation 0 <= index < len(self): a pure function of the task and the index."""
        raise NotImplementedError

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """
        Whether the answer is right. answer: if generative, the assistant's text without tool calls and their output;
        if categorical, the letter chosen.
        """
        return self.result(answer) == self.result(reference(conversation))

    def result(self, answer: str) -> Any:
        """The part of an answer that is compared with the reference."""
        return answer

    @cached_property
    def baseline(self) -> float:
        """The accuracy of guessing: the mean of 1 / number of choices, 0 if there are no choices."""
        if self.eval_type != "categorical":
            return 0.0
        chances = [1 / len(conversation["letters"]) for conversation in self]
        return sum(chances) / len(self)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Slice(self, range(len(self))[index])
        # The range handles negative indices and raises IndexError.
        return self.conversation(range(len(self))[index])


class Slice(Task):
    """Some conversations of a task."""

    def __init__(self, task: Task, indices: Sequence[int]) -> None:
        self.task, self.indices = task, indices
        # The task judges: an attribute replaces the class's method.
        for name in ("name", "eval_type", "held_out", "library", "notes", "evaluate"):
            setattr(self, name, getattr(task, name))

    def __len__(self) -> int:
        return len(self.indices)

    def conversation(self, index: int) -> Conversation:
        return self.task[self.indices[index]]


def reference(conversation: Conversation) -> str:
    """The text of the last message without tools: `evaluate` must accept it."""
    return text_of(conversation["messages"][-1]["content"])


# ---- Names of tasks, for commands that need no task itself

LOOKING_UP = {"lookup", "search", "notes"}  # tasks that teach a model to use a library


def task_names(specs: str) -> set[str]:
    """The names in several specs, without arguments and parts."""
    return {re.split(r"[:\[*]", spec.strip())[0] for spec in specs.split(",")}


def never_looks_up(specs: str, library: str | None) -> str:
    """A warning if a model is given a library, but no task that it was trained on teaches it to look things up."""
    if library is None or task_names(specs) & LOOKING_UP:
        return ""
    return (f"warning: this model was never taught to look things up: no lookup or search among its tasks "
            f"({specs or 'none are known'}); unless your own conversations do it, train with "
            f'--tasks="lookup, search, lookup:{library}, search:{library}, …"')
