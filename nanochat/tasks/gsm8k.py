"""GSM8K (openai/gsm8k): primary-school word problems, solved with the calculator."""
import re

from nanochat.data.conversation import Conversation
from nanochat.tasks.common import as_parts, single_turn
from nanochat.tasks.hub import HubTask

ANNOTATION = re.compile(r"<<([^<>]*)>>")
CALCULABLE = re.compile(r"[\d\s.+\-*/()]+")
FINAL = re.compile(r"####\s*\$?\s*(-?)\$?((?:\d[\d,]*)?(?:\.\d+)?)")


class GSM8K(HubTask):
    name, eval_type = "GSM8K", "generative"
    hub, folder, config = "openai/gsm8k", "gsm8k", "main"

    def convert(self, row: dict) -> Conversation:
        """question; answer: prose with <<expression=result>> before each computed number, and "#### number" last."""
        return single_turn(row["question"], answer_parts(row["answer"]))

    def result(self, answer: str) -> float | None:
        """The number after the last "####"; commas and a dollar sign do not matter. None if there is none."""
        found = [sign + digits for sign, digits in FINAL.findall(answer) if digits]
        return float(found[-1].replace(",", "")) if found else None


def answer_parts(answer: str) -> list[dict]:
    """
    The answer as text and calculator calls: "6 / 2 = <<6/2=3>>3 eggs" becomes text "6 / 2 = ", python "6/2",
    python_output "3", text "3 eggs". Annotations that the calculator could not compute (20% of …) are left out.
    """
    parts = []
    # The text since the last call.
    text = ""
    end = 0
    for found in ANNOTATION.finditer(answer):
        text += answer[end:found.start()]
        end = found.end()
        expression, _, result = (piece.strip().replace(",", "") for piece in found[1].rpartition("="))
        if CALCULABLE.fullmatch(expression) and result:
            if text:
                parts.append(("text", text))
            parts.append(("python", expression))
            parts.append(("python_output", result))
            text = ""
    parts.append(("text", text + answer[end:]))
    return as_parts(parts)
