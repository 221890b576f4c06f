"""MMLU (cais/mmlu): multiple choice on 57 subjects. Trained on its auxiliary questions, measured on its test split."""
from nanochat.tasks.common import Conversation, HubTask, multiple_choice


class MMLU(HubTask):
    name, eval_type = "MMLU", "categorical"
    hub, folder = "cais/mmlu", "mmlu"

    def __init__(self, argument: str, split: str) -> None:
        super().__init__("auxiliary_train" if split == "train" else "all", split)

    def converse(self, row: dict) -> Conversation:
        """question, choices: four texts, answer: the index of the right one."""
        row = row.get("train", row)  # the hub's auxiliary rows are wrapped once more
        if not 0 <= row["answer"] < len(row["choices"]):
            raise ValueError(f"answer {row['answer']} of {len(row['choices'])} choices")
        return multiple_choice(row["question"], row["choices"], row["answer"])
