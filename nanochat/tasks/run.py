"""
What a short Python program prints: needs no download, and programs of the test split are never trained on.

    run:tool    "What does this print?\\n\\nx = 14\\nx = x + 23\\nprint(x)" - [14 + 23 = 37] "It prints 37"
    run         half of the answers with the calculator, half without: "It prints 37"

A generator makes the programs, and runs them to learn what they print and calculate.
`run` is for reinforcement learning: a model that imitates the examples leaves the calculator out half of the time, and
is then more often wrong; rewards teach it which way is better. No program is in both splits.
"""
import ast
import io
import json
import re
from functools import partial, reduce

from nanochat.data.conversation import Conversation
from nanochat.data.stable_random import StableRandom
from nanochat.tasks.common import Drawn, read_texts, single_turn, split_of

TEXTS = read_texts("run")
QUESTIONS = TEXTS["questions"].splitlines()
PROGRAMS = TEXTS["programs"].strip("\n").split("\n---\n")
WORDS = TEXTS["words"].split()
# Where an operation's operands stand, to be filled in when it is carried out.
OPERAND = ast.Name("{!r}", ast.Load())


class Run(Drawn):
    sizes = {"train": 20_000, "test": 1_000}

    def __init__(self, argument: str, split: str) -> None:
        super().__init__(argument, split)
        self.always = argument == "tool"

    def draw(self, number: int) -> tuple[str, str] | None:
        """
        (key, source) of a program of this split, which does not depend on the program's variables' names. The test
        split has each source once. In training sources repeat, also from one slice to another, because templates that
        make only a few programs would otherwise be rare.
        """
        rng = StableRandom(f"run:{number}")
        template = rng.choice(PROGRAMS)
        long = 3 + rng.below(3)
        short = 2 + rng.below(3)
        long_list = [rng.below(20) for _ in range(long)]
        short_list = [rng.below(20) for _ in range(short)]
        words = [rng.choice(WORDS) for _ in range(4)]
        a, b, c = (2 + rng.below(29) for _ in range(3))
        # The order of these draws decides every program.
        values = dict(
            a=a,
            b=b,
            c=c,
            L=long_list,
            S=short_list,
            w=words[0],
            u=words[1],
            n=1 + rng.below(5),
            m=2 + rng.below(4),
            i=rng.below(3),
            j=rng.below(2),
            e=rng.choice(long_list),
            k=rng.choice([a, long_list[-1]]),
            v=rng.choice(words[:2]),
            W=json.dumps(words[: 2 + rng.below(3)]),
        )
        names = {slot: rng.choice(choices.split()) for slot, choices in TEXTS["names"].items()}
        source = template.format(**values, **names)
        nameless = template.format(**values, **{slot: slot for slot in names})
        if split_of(f"run:{nameless}") != self.split:
            return None
        return (source if self.split == "test" else f"{number}", source)

    def conversation(self, index: int) -> Conversation:
        key, source = self.problem(index)
        output, calls = run_program(source)
        rng = StableRandom(f"run: {key}")
        question = f"{rng.choice(QUESTIONS)}\n\n{source}"
        lines = output.rstrip("\n")
        answer = f"It prints:\n{lines}" if "\n" in lines else f"It prints {lines}"
        if calls and not self.always and not rng.below(2):
            calls = []
        return single_turn(question, answer, calls) | {"prints": output}

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """The text after the last "It prints" is the program's output."""
        return answer.rpartition("It prints")[2].strip(": \n") == conversation["prints"].strip("\n")


class RecordOperations(ast.NodeTransformer):
    """Writes record("{!r} + {!r}", a, b) instead of a + b, and the same for a < b."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.Call:
        self.generic_visit(node)
        return record_call(ast.BinOp(OPERAND, node.op, OPERAND), node.left, node.right)

    def visit_Compare(self, node: ast.Compare) -> ast.Call:
        self.generic_visit(node)
        return record_call(ast.Compare(OPERAND, node.ops, [OPERAND]), node.left, *node.comparators)


def record_call(operation: ast.expr, left: ast.expr, right: ast.expr) -> ast.Call:
    return ast.Call(ast.Name("record", ast.Load()), [ast.Constant(ast.unparse(operation)), left, right], [])


def run_program(source: str) -> tuple[str, list[tuple[str, str]]]:
    """
    What one of our own programs prints, and its operations on whole numbers in order, with their results. It runs in
    this process: models' programs need execution.py's sandbox, but these are made from our own templates.
    """
    calls = []
    printed = io.StringIO()

    def record(operation: str, left, right):
        expression = operation.format(left, right)
        value = eval(expression)
        if type(left) is type(right) is int:
            calls.append((expression, f"{value}"))
        return value

    # x += 1 is an operation, too.
    source = re.sub(r"(\S+) ([+-])= (.+)", r"\1 = \1 \2 (\3)", source)
    program = ast.fix_missing_locations(RecordOperations().visit(ast.parse(source)))
    add = partial(record, "{} + {}")
    names = {"record": record, "sum": partial(reduce, add), "print": partial(print, file=printed)}
    exec(compile(program, "program", "exec"), names)
    return printed.getvalue(), calls
