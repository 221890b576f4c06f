"""
What a short Python program prints: needs no download, and what is asked in the test split is never trained on.

    run:steps    "What does this print?\\n\\nx = 4\\nx = x + 3\\nprint(x)" - "x = 4; x = 7. It prints 7"
    run          half of the answers with the steps, half at once: "It prints 7"

A generator makes the programs; what they print is known because they are run, all at once (execution.py). `run` is for
reinforcement learning: a model that imitates the examples leaves the steps out half of the time, and then it is more
often wrong; rewards tell it which of the two ways to go.
"""
import itertools
import json
from functools import cache

from nanochat.conversation import Conversation
from nanochat.corpus.tinyworld import StableRandom
from nanochat.corpus.tinyworld_facts import NAMES
from nanochat.task import Task
from nanochat.tasks.common import single_turn, split_of
from nanochat.tasks.execution import run_python

SIZES = {"train": 20_000, "test": 1_000}
QUESTIONS = (
    "What does this print?", "What does this program print?", "What is the output of this program?",
    "What will this print?", "Tell me what this prints.", "Run this in your head.", "What is printed here?")
# Numbers: {a} to {k}, small ones {i} {j} {m} {n}, lists {L} {S}. Words: {u} {v} {w}, a list {W}. Names: {x} {y} {f}.
PROGRAMS = (
    "print({a} + {b})", "print({a} - {b})", "print({n} * {m})", "print({a} // {n})", "print({a} % {n})",
    "print({a} > {b})", "print({a} == {n} + {m})", "print({a} % 2 == 0)", "print({a} < {b} and {c} < {b})",
    "print(len({L}))", "print(max({L}))", "print(min({L}))", "print(sum({S}))", "print(sorted({L}))", "print({L}[{i}])",
    "print({L}[-1])", "print({L}[:{n}])", "print({L}[1:])", "print({L} + {S})", "print({k} in {L})",
    "print({L}.index({e}))", "print(list(reversed({S})))", "print(list(range({n})))",
    "print(list(range({n}, {n} + {m})))", 'print(len("{w}"))', 'print("{w}".upper())', 'print("{w}".capitalize())',
    'print("{w}"[0])', 'print("{w}"[-1])', 'print("{w}"[:{n}])', 'print("{w}"[1:])', 'print("{w}" + "{u}")',
    'print("{w}" * 2)', 'print("{w}"[::-1])', 'print("{w} {u}".split())', 'print("-".join({W}))', "print(len({W}))",
    "print({W}[{j}])", 'print("{w}" == "{v}")', "print({n}, {m})", 'print("{w}", {a})', 'print(f"{w} {{{n} + {m}}}")',
    "print([{x} + {n} for {x} in {S}])", "print([{x} for {x} in {L} if {x} > {b}])",
    "{x} = {a}\nprint({x} + {b})", "{x} = {a}\n{y} = {x} + {n}\nprint({y})", "{x} = {a}\n{x} = {x} - {n}\nprint({x})",
    "{x} = {n}\n{y} = {m}\nprint({x} * {y})", "{x} = {a}\n{x} += {n}\n{x} += {m}\nprint({x})",
    "{x}, {y} = {a}, {b}\n{x}, {y} = {y}, {x}\nprint({x})", "{x} = {L}\nprint({x}[0] + {x}[1])",
    "{x} = {L}\n{x}.append({a})\nprint({x})", "{x} = {L}\n{x}.append({a})\nprint(len({x}))",
    "{x} = {L}\n{x}.sort()\nprint({x}[0])", "{x} = {L}\n{x}.pop()\nprint({x})", "{x} = {L}\n{x}[{i}] = {a}\nprint({x})",
    '{x} = {{"{w}": {a}, "{u}": {b}}}\nprint({x}["{w}"])', '{x} = {{"{w}": {a}}}\n{x}["{u}"] = {b}\nprint(len({x}))',
    '{x} = {{"{w}": {a}}}\n{x}["{w}"] += {n}\nprint({x}["{w}"])', '{x} = "{w}"\nprint({x} + {x}[0])',
    '{x} = "{w}"\n{y} = {x}.upper()\nprint({y}[0])',
    '{x} = {a}\nif {x} > {b}:\n    print("{w}")\nelse:\n    print("{u}")',
    '{x} = {a}\nif {x} % 2 == 0:\n    print("even")\nelse:\n    print("odd")',
    "{x} = {a}\nif {x} > {b}:\n    {x} = {x} - {n}\nprint({x})",
    "{x} = {n}\n{y} = {m}\nif {x} > {y}:\n    print({x})\nelse:\n    print({y})",
    "for {x} in range({m}):\n    print({x})", "for {x} in {S}:\n    print({x} + {n})",
    "for {x} in {W}:\n    print({x}[0])", "{y} = 0\nfor {x} in {S}:\n    {y} += {x}\nprint({y})",
    "{y} = {a}\nfor {x} in range({m}):\n    {y} += {n}\nprint({y})",
    "{y} = []\nfor {x} in {S}:\n    {y}.append({x} * 2)\nprint({y})",
    '{y} = ""\nfor {x} in {W}:\n    {y} += {x}[0]\nprint({y})',
    "{y} = 0\nfor {x} in {L}:\n    if {x} > {b}:\n        {y} += 1\nprint({y})",
    "{x} = {n}\nwhile {x} < {a}:\n    {x} += {m}\nprint({x})",
    "{x} = {m}\nwhile {x} > 0:\n    print({x})\n    {x} -= 1", "def {f}({x}):\n    return {x} + {n}\n\nprint({f}({a}))",
    "def {f}({x}, {y}):\n    return {x} * {y}\n\nprint({f}({n}, {m}))",
    "def {f}({x}):\n    return {x} * 2\n\nprint({f}({f}({n})))",
    'def {f}({x}):\n    return "{w} " + {x}\n\nprint({f}("{u}"))',
)
WORDS = (*NAMES, *"apple bird book cat chair dog fish flower green house lamp moon river stone sun tree".split())
# Runs a list of programs. Of each: what it printed, and the values of its variables as they changed.
RUNNER = """
import contextlib, io, json, sys

def run(source):
    steps, printed, before = [], io.StringIO(), {{}}
    def look(frame, event, value):
        if frame.f_code.co_filename == "program" and frame.f_code.co_name == "<module>" and event in ("line", "return"):
            for name, value in frame.f_locals.items():
                if name[:2] != "__" and not callable(value) and before.get(name) != (told := repr(value)):
                    before[name] = told
                    steps.append(f"{{name}} = {{told}}")
        return look
    code = compile(source, "program", "exec")
    with contextlib.redirect_stdout(printed):
        sys.settrace(look)
        exec(code, {{}})
        sys.settrace(None)
    return printed.getvalue(), steps

print(json.dumps([run(source) for source in json.loads({sources!r})]))
"""


class Run(Task):
    eval_type = "generative"

    def __init__(self, argument: str, split: str) -> None:
        self.always = argument == "steps"
        self.name = f"Run {argument}".rstrip()
        self.programs = programs(split)

    def __len__(self) -> int:
        return len(self.programs)

    def conversation(self, index: int) -> Conversation:
        source, output, steps = self.programs[index]
        rng = StableRandom(f"run: {source}")
        question, answer = f"{rng.choice(QUESTIONS)}\n\n{source}", told(output)
        if self.always or rng.below(2):
            answer = f"{'; '.join(steps)}. {answer}" if steps else answer
        return single_turn(question, answer) | {"prints": output}

    def evaluate(self, conversation: Conversation, answer: str) -> bool:
        """What it says last that it prints is what was printed when the program was run."""
        return answer.rpartition("It prints")[2].strip(": \n") == conversation["prints"].strip("\n")


def told(output: str) -> str:
    lines = output.rstrip("\n")
    return f"It prints:\n{lines}" if "\n" in lines else f"It prints {lines}"


@cache
def programs(split: str) -> tuple[tuple[str, str, list[str]], ...]:
    """(source, output, steps) of the distinct programs of a split, in a fixed order."""
    sources: dict[str, None] = {}
    for number in itertools.count():
        if len(sources) == SIZES[split]:
            break
        source, key = draw_program(number)
        if split_of(f"run:{key}") == split:
            sources[source] = None
    result = run_python(RUNNER.format(sources=json.dumps(list(sources))), timeout=60, max_output_bytes=2**24)
    assert result.ok, result
    return tuple((source, *ran) for source, ran in zip(sources, json.loads(result.stdout)))


def draw_program(number: int) -> tuple[str, str]:
    """Candidate `number`, and what decides its split: the program with the names of its variables left out."""
    rng = StableRandom(f"run:{number}")
    template = rng.choice(PROGRAMS)
    long, short = ([rng.below(20) for _ in range(count)] for count in (3 + rng.below(3), 2 + rng.below(3)))
    words = [rng.choice(WORDS).lower() for _ in range(4)]
    a, b, c = (2 + rng.below(29) for _ in range(3))
    values = dict(
        a=a, b=b, c=c, n=1 + rng.below(5), m=2 + rng.below(4), i=rng.below(3), j=rng.below(2), L=long, S=short,
        e=rng.choice(long), k=rng.choice([a, long[-1]]), w=words[0], u=words[1], v=rng.choice(words[:2]),
        W=json.dumps(words[:2 + rng.below(3)]))
    x, y = rng.choice("x n a i k".split()), rng.choice("y total s b result".split())
    names = dict(x=x, y=y, f=rng.choice("f add double change g".split()))
    return template.format(**values, **names), template.format(**values, x="x", y="y", f="f")
