"""Multiple choice, measured by the likeliest letter: ARC (science questions from school) and MMLU (57 subjects)."""
from collections.abc import Sequence

from nanochat.data.conversation import Conversation
from nanochat.tasks.common import single_turn
from nanochat.tasks.hub import HubTask

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def multiple_choice(question: str, choices: Sequence[str], right: int) -> Conversation:
    """
    A question with lettered choices; the answer is the letter alone.

    Each letter follows its choice: when the model reads the letter, it has just read the choice, so the letter's place
    can store the choice, and one look back from the answer finds it. (A letter before its choice is read when the
    choice is not known yet.) The letter is on a line of its own, because only there is it the same token as the answer:
    the tokenizer joins it to a blank or sign before it.
    """
    letters = list(LETTERS[:len(choices)])
    lines = ["Which letter follows the right answer?", question.strip()]
    for choice, letter in zip(choices, letters):
        lines += [choice.strip(), letter]
    return single_turn("\n".join(lines), letters[right]) | {"letters": letters}


class ARC(HubTask):
    """allenai/ai2_arc: three to five choices, an easy and a challenging set."""
    eval_type = "categorical"
    hub, folder = "allenai/ai2_arc", "arc"

    def __init__(self, argument: str, split: str) -> None:
        self.name = self.config = argument
        super().__init__(argument, split)

    def convert(self, row: dict) -> Conversation:
        """choices: {text: […], label: […]}, answerKey: a label. Labels are A to E or 1 to 5; questions get letters."""
        choices = row["choices"]
        return multiple_choice(row["question"], choices["text"], choices["label"].index(row["answerKey"]))


class MMLU(HubTask):
    """cais/mmlu: trained on its auxiliary questions, measured on its test split."""
    name, eval_type = "MMLU", "categorical"
    hub, folder = "cais/mmlu", "mmlu"

    def __init__(self, argument: str, split: str) -> None:
        self.config = "auxiliary_train" if split == "train" else "all"
        super().__init__(argument, split)

    def convert(self, row: dict) -> Conversation:
        """question, choices: four texts, answer: the index of the right one."""
        # The hub's auxiliary rows are wrapped once more.
        row = row.get("train", row)
        return multiple_choice(row["question"], row["choices"], row["answer"])
