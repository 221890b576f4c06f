"""ARC (allenai/ai2_arc): science questions from school with three to five choices, an easy and a challenging set."""
from nanochat.tasks.common import Conversation, HubTask, multiple_choice


class ARC(HubTask):
    eval_type = "categorical"
    hub, folder, columns = "allenai/ai2_arc", "arc", ("question", "choices", "answerKey")

    def __init__(self, argument: str, split: str) -> None:
        self.name = argument
        super().__init__(argument, split)

    def converse(self, row: dict) -> Conversation:
        """choices: {text: […], label: […]}, answerKey: a label. Labels are A to E or 1 to 5; letters come out."""
        choices = row["choices"]
        return multiple_choice(row["question"], choices["text"], choices["label"].index(row["answerKey"]))
