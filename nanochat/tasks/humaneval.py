"""HumanEval (openai/openai_humaneval): Python functions to complete, judged by running their tests. Evaluation only."""
import re
import secrets

from nanochat.data.conversation import Conversation
from nanochat.tasks.common import single_turn
from nanochat.tasks.execution import run_python
from nanochat.tasks.hub import HubTask

# A fenced block; an unfinished one counts, too.
FENCED = re.compile(r"```[ \t]*(?:[Pp]ython3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


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
        # A program that calls exit() before its tests also ends with code 0, so the last line must be a secret, which
        # the code cannot print before.
        passed = secrets.token_hex(16)
        result = run_python(program(conversation, code_of(answer), passed))
        return result.ok and result.stdout.rstrip().endswith(passed)


def code_of(answer: str) -> str:
    """The first fenced block of an answer, or all of it if there is none."""
    found = FENCED.search(answer)
    return found[1] if found else answer


def program(conversation: Conversation, code: str, passed: str) -> str:
    """The code with its problem's tests, after which the program prints `passed`."""
    # The prompt alone is a program that does nothing: it has imports and helpers; the code redefines the function.
    prompt = conversation["prompt"].rstrip()
    tests = f"{conversation['test']}\n\ncheck({conversation['entry_point']})"
    return f"{prompt}\n    pass\n\n{code}\n\n{tests}\nprint({passed!r})\n"
