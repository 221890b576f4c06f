"""
Data sets from the Hugging Face hub, or from local folders with the same layout.

    SmolTalk     HuggingFaceTB/smol-smoltalk    conversations about everything, for training
    ARC          allenai/ai2_arc                multiple choice: science questions from school, an easy and a hard set
    MMLU         cais/mmlu                      multiple choice: 57 subjects
    GSM8K        openai/gsm8k                   word problems of primary school, solved with the calculator
    HumanEval    openai/openai_humaneval        Python functions to complete, judged by running their tests
"""
import re
import secrets
from collections.abc import Sequence

from nanochat.data.conversation import Conversation
from nanochat.runtime.errors import UserError, first_line
from nanochat.runtime.files import base_dir
from nanochat.tasks.common import Shuffled, as_parts, shuffled, single_turn
from nanochat.tasks.execution import run_python

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# GSM8K's answers: a computed number has its expression before it, "<<6/2=3>>3".
ANNOTATION = re.compile(r"<<([^<>]*)>>")
CALCULABLE = re.compile(r"[\d\s.+\-*/()]+")
FINAL = re.compile(r"####\s*\$?\s*(-?)\$?((?:\d[\d,]*)?(?:\.\d+)?)")
# A fenced block of Python; an unfinished one counts, too.
FENCED = re.compile(r"```[ \t]*(?:[Pp]ython3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class HubTask(Shuffled):
    """
    A data set of the Hugging Face hub: from the folder $NANOCHAT_BASE_DIR/tasks/<folder> if it is there, else from the
    hub. Its rows come in a shuffled order that is always the same, because many data sets are sorted: their first
    hundred rows would all be about one subject. Each data set has a method `convert`: row -> conversation.

    The folder has the layout of the hub's repository, one folder for each configuration:

        tasks/smoltalk/data/train-00000-of-00004.parquet …           HuggingFaceTB/smol-smoltalk (train, test)
        tasks/mmlu/auxiliary_train/train-00000-of-00001.parquet      cais/mmlu (for training)
        tasks/mmlu/all/test-00000-of-00001.parquet                   cais/mmlu (for evaluation)
        tasks/arc/ARC-Easy/train-00000-of-00001.parquet              allenai/ai2_arc (and ARC-Challenge; train, test)
        tasks/gsm8k/main/train-00000-of-00001.parquet                openai/gsm8k (train, test)
        tasks/humaneval/openai_humaneval/test-00000-of-00001.parquet openai/openai_humaneval (test)

    so `hf download --repo-type dataset openai/gsm8k --local-dir tasks/gsm8k` makes it; .jsonl files work as well.
    """
    hub = ""        # name on the hub
    folder = ""     # folder below $NANOCHAT_BASE_DIR/tasks/
    config = ""     # configuration; empty: the only one

    def __init__(self, argument: str, split: str) -> None:
        """UserError if the package or the data is missing."""
        try:
            import datasets
        except ImportError:
            raise UserError(f"the data set {self.hub} needs the datasets package: . ./setup.sh hub") from None
        local = base_dir() / f"tasks/{self.folder}"
        source = str(local / self.config)
        try:
            if local.is_dir():
                self.rows = datasets.load_dataset(source, split=split, cache_dir=f"{base_dir()}/tasks/cache")
            else:
                source = f"{self.hub} from the hub, and there is no {local}"
                self.rows = datasets.load_dataset(self.hub, self.config or None, split=split)
        except Exception as error:
            # The package raises many exceptions: no network, no such data set, a damaged file.
            raise UserError(f"cannot load the {split} split of {source}: {first_line(error)}") from error
        self.order = shuffled(len(self.rows), self.hub)

    def conversation(self, index: int) -> Conversation:
        return self.convert(self.rows[int(self.order[index])])

    def convert(self, row: dict) -> Conversation:
        raise NotImplementedError


class SmolTalk(HubTask):
    """Conversations about everything, for training."""
    name, hub, folder = "SmolTalk", "HuggingFaceTB/smol-smoltalk", "smoltalk/data"

    def convert(self, row: dict) -> Conversation:
        """messages: [{role, content}], maybe a system message first."""
        return {"messages": row["messages"]}


# ---- Multiple choice: measured by the likeliest letter

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


# ---- Word problems

class GSM8K(HubTask):
    name, eval_type = "GSM8K", "generative"
    hub, folder, config = "openai/gsm8k", "gsm8k", "main"

    def convert(self, row: dict) -> Conversation:
        """
        question; answer: prose with <<expression=result>> before each computed number, and "#### number" last.

        "6 / 2 = <<6/2=3>>3 eggs" becomes text "6 / 2 = ", python "6/2", python_output "3", text "3 eggs". Annotations
        that the calculator could not compute (20% of …) are left out.
        """
        parts = []
        # Texts and annotations in turn; `text` is what came since the last call.
        text, *rest = ANNOTATION.split(row["answer"])
        for annotation, following in zip(rest[::2], rest[1::2]):
            expression, _, result = (piece.strip().replace(",", "") for piece in annotation.rpartition("="))
            if CALCULABLE.fullmatch(expression) and result:
                parts += [("text", text), ("python", expression), ("python_output", result)]
                text = ""
            text += following
        return single_turn(row["question"], as_parts([*parts, ("text", text)]))

    def result(self, answer: str) -> float | None:
        """The number after the last "####"; commas and a dollar sign do not matter. None if there is none."""
        found = [sign + digits for sign, digits in FINAL.findall(answer) if digits]
        return float(found[-1].replace(",", "")) if found else None


# ---- Programs

class HumanEval(HubTask):
    name, eval_type = "HumanEval", "generative"
    hub, folder, config = "openai/openai_humaneval", "humaneval", "openai_humaneval"

    def convert(self, row: dict) -> Conversation:
        """prompt: imports and a function up to its docstring; test: a function check(candidate); the rest as named."""
        question = f"Complete this Python function.\n\n```python\n{row['prompt'].rstrip()}\n```"
        answer = f"```python\n{row['prompt']}{row['canonical_solution'].rstrip()}\n```"
        return single_turn(question, answer) | {key: row[key] for key in ("prompt", "test", "entry_point")}

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """Runs the model's code in a sandbox; execution.py says what it does not protect from."""
        found = FENCED.search(answer)
        code = found[1] if found else answer
        # The prompt alone is a program that does nothing: it has imports and helpers; the code redefines the function.
        prompt = conversation["prompt"].rstrip()
        tests = f"{conversation['test']}\n\ncheck({conversation['entry_point']})"
        # A program that calls exit() before its tests also ends with code 0, so the last line must be a secret, which
        # the code cannot print before.
        passed = secrets.token_hex(16)
        printed = run_python(f"{prompt}\n    pass\n\n{code}\n\n{tests}\nprint({passed!r})\n")
        return printed is not None and printed.rstrip().endswith(passed)
