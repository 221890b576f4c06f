"""
What a short Python program prints: needs no download, and what is asked in the test split is never trained on.

    run:tool    "What does this print?\\n\\nx = 14\\nx = x + 23\\nprint(x)" - [14 + 23 = 37] "It prints 37"
    run         half of the answers with the calculator, half without: "It prints 37"

A generator makes the programs; what they print and calculate is known because they are run, a thousand at a time
(execution.py), when the first of these is wanted.
`run` is for reinforcement learning: a model that imitates the examples leaves the calculator out half of the time, and
is then more often wrong; rewards tell it which of the two ways to go. No program is on both sides; what a test program
calculates also occurs in training programs of another shape, half of the time.
"""
import json
from functools import cache

from nanochat.data.conversation import Conversation
from nanochat.data.stable_random import StableRandom
from nanochat.data.task import Task
from nanochat.runtime.errors import UserError
from nanochat.tasks.common import Distinct, as_parts, read_texts, single_turn, split_of
from nanochat.tasks.execution import run_python

SIZES = {"train": 20_000, "test": 1_000}
RUN_TOGETHER = 1_000  # programs in one process
TEXTS = read_texts("run")
QUESTIONS = TEXTS["questions"].splitlines()
PROGRAMS = TEXTS["programs"].strip("\n").split("\n---\n")
WORDS = TEXTS["words"].split()
# Runs a list of programs. Of each: what it printed, and what it calculated with whole numbers, in order.
RUNNER = """
import ast, contextlib, io, json, operator

SIGNS = {{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}}
COMPUTE = dict(zip(SIGNS.values(), (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)))

class RecordCalculations(ast.NodeTransformer):
    def visit_BinOp(self, node):
        sides = [self.visit(node.left), self.visit(node.right)]
        return ast.Call(ast.Name("record", ast.Load()), [ast.Constant(SIGNS[type(node.op)]), *sides], [])
    def visit_AugAssign(self, node):
        before = ast.parse(ast.unparse(node.target), mode="eval").body
        return ast.Assign([node.target], self.visit(ast.BinOp(before, node.op, node.value)))

def run(source):
    calls, printed = [], io.StringIO()
    def record(sign, left, right):
        value = COMPUTE[sign](left, right)
        if type(left) is type(right) is int:
            calls.append((f"{{left}} {{sign}} {{right}}", str(value)))
        return value
    with contextlib.redirect_stdout(printed):
        recording = ast.fix_missing_locations(RecordCalculations().visit(ast.parse(source)))
        exec(compile(recording, "program", "exec"), {{"record": record}})
    return printed.getvalue(), calls

print(json.dumps([run(source) for source in json.loads({sources!r})]))
"""


class Run(Task):
    eval_type = "generative"

    def __init__(self, argument: str, split: str) -> None:
        self.always = argument == "tool"
        self.name = f"Run {argument}".rstrip()
        self.split = split

    def __len__(self) -> int:
        return SIZES[self.split]

    def conversation(self, index: int) -> Conversation:
        batch, number = divmod(index, RUN_TOGETHER)
        source, output, calls = programs(self.split, batch)[number]
        rng = StableRandom(f"run: {source}")
        question = f"{rng.choice(QUESTIONS)}\n\n{source}"
        lines = output.rstrip("\n")
        answer = f"It prints:\n{lines}" if "\n" in lines else f"It prints {lines}"
        if calls and (self.always or rng.below(2)):
            parts = []
            for expression, value in calls:
                parts += [("python", expression), ("python_output", value)]
            answer = as_parts([*parts, ("text", answer)])
        return single_turn(question, answer) | {"prints": output}

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """What it says last that it prints is what was printed when the program was run."""
        return answer.rpartition("It prints")[2].strip(": \n") == conversation["prints"].strip("\n")


@cache
def programs(split: str, batch: int) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(source, output, calls of the calculator) of a batch of the distinct programs of a split, in a fixed order."""
    begin = batch * RUN_TOGETHER
    wanted = [sources(split)[index][0] for index in range(begin, begin + RUN_TOGETHER)]
    result = run_python(RUNNER.format(sources=json.dumps(wanted)), timeout=60, max_output_bytes=2**24)
    if not result.ok:
        raise UserError(f"task run: its programs could not be run: {result.error}")
    ran = json.loads(result.stdout)
    return [(source, output, calls) for source, (output, calls) in zip(wanted, ran, strict=True)]


@cache
def sources(split: str) -> Distinct:
    """The programs of a split, as (source,), in a fixed order. Names of variables do not make another program."""
    def draw(number: int) -> tuple[str] | None:
        source, key = draw_program(number)
        return (source,) if split_of(f"run:{key}") == split else None

    return Distinct(draw)


def draw_program(number: int) -> tuple[str, str]:
    """Candidate `number`, and what decides its split: the program with the names of its variables left out."""
    rng = StableRandom(f"run:{number}")
    template = rng.choice(PROGRAMS)
    long = 3 + rng.below(3)
    short = 2 + rng.below(3)
    long_list = [rng.below(20) for _ in range(long)]
    short_list = [rng.below(20) for _ in range(short)]
    words = [rng.choice(WORDS) for _ in range(4)]
    a, b, c = (2 + rng.below(29) for _ in range(3))
    values = dict(  # the order of the draws decides every program
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
    x = rng.choice("x n a i k".split())
    y = rng.choice("y total s b result".split())
    f = rng.choice("f add double change g".split())
    return template.format(**values, x=x, y=y, f=f), template.format(**values, x="x", y="y", f="f")
