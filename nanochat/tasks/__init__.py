"""
Tasks by name, and mixtures of them.

    make_task("arc:ARC-Challenge", "test")
    make_mixture("smoltalk[:10000], gsm8k*2, arithmetic, json:/path/to.jsonl", "train", seed=0)

A spec is NAME, NAME:ARGUMENT, either with [start:stop] behind it for a part; in a mixture also with *K for K passes.
"""
import importlib
import itertools
import re

from nanochat.errors import UserError, did_you_mean
from nanochat.tasks.common import SPLITS, Concatenation, Mixture, Task

# Name -> the module and class below nanochat.tasks, and the arguments that it takes, the default first; None: any.
TASKS: dict[str, tuple[str, str, tuple[str, ...] | None]] = {
    "smoltalk": ("smoltalk", "SmolTalk", ("",)),
    "mmlu": ("mmlu", "MMLU", ("",)),
    "arc": ("arc", "ARC", ("ARC-Easy", "ARC-Challenge")),
    "gsm8k": ("gsm8k", "GSM8K", ("",)),
    "humaneval": ("humaneval", "HumanEval", ("",)),
    "arithmetic": ("arithmetic", "Arithmetic", ("", "easy", "medium", "hard", "quick")),
    "spellingbee": ("spellingbee", "SpellingBee", ("", "spell", "tool", "hand")),
    "tinyworld": ("tinyworld", "TinyWorld", ("", "facts", "identity")),
    "json": ("custom_json", "CustomJSON", None),
}
MADE_HERE = ("arithmetic", "spellingbee", "tinyworld")  # nothing is downloaded for them, and nobody's own data shows
SPEC = re.compile(r"(?P<name>[^:\[*]+?)(?::(?P<argument>.+?))?(?P<part>\[(?P<start>\d*):(?P<stop>\d*)\])?(?:\*(?P<passes>\d+))?")

__all__ = [
    "Concatenation", "Mixture", "Task", "example_questions", "make_mixture", "make_task", "make_tasks", "without_parts",
]


def make_task(spec: str, split: str) -> Task:
    """
    The task of a spec such as "gsm8k", "arc:ARC-Challenge", "arithmetic[:5000]". split: "train" or "test".
    UserError for a spec that is none, a name or an argument that is not known, and data that is missing.
    """
    task, passes = parse(spec, split)
    if passes != 1:
        raise UserError(f"task {spec!r}: several passes are for mixtures; leave out *{passes}")
    return task


def make_tasks(specs: str, split: str) -> list[Task]:
    """The tasks of several specs, separated by commas, each once: to be measured by."""
    return [parse(spec.strip(), split)[0] for spec in specs.split(",")]


def without_parts(specs: str) -> str:
    """The same tasks whole and once: what a mixture that is trained on in parts is measured by."""
    return ",".join(dict.fromkeys(re.sub(r"(\[\d*:\d*\])?(\*\d+)?$", "", spec.strip()) for spec in specs.split(",")))


def make_mixture(specs: str, split: str, seed: int) -> Mixture:
    """The tasks of several specs, separated by commas, in an order that depends on their lengths and the seed only."""
    parts = []
    for spec in specs.split(","):
        task, passes = parse(spec.strip(), split)
        parts += [task] * passes
    return Mixture(parts, seed)


def example_questions(specs: str, count: int = 4) -> list[str]:
    """
    Short held-out questions of a mixture's tasks in turn: what a model that was trained on it can be asked. Only of
    tasks that are made here; [] where there are none, or where a checkpoint of another version has an unknown spec.
    """
    own = [spec for spec in without_parts(specs).split(",") if spec.partition(":")[0] in MADE_HERE]
    try:
        tasks = [make_task(spec, "test") for spec in own]
    except UserError:
        return []
    first = [(conversation["messages"][0] for conversation in task) for task in tasks]
    short = [(one["content"] for one in messages if one["role"] == "user" and len(one["content"]) <= 80) for messages in first]
    return list(itertools.islice(itertools.chain.from_iterable(zip(*short)), count))


def parse(spec: str, split: str) -> tuple[Task, int]:
    """The task of a spec, and how many passes over it are asked for."""
    known = ", ".join(TASKS)
    found = SPEC.fullmatch(spec)
    if not found:
        raise UserError(f"task {spec!r} is not NAME, NAME:ARGUMENT, NAME[start:stop] or NAME*passes; known names: {known}")
    name, argument, passes = found["name"], found["argument"] or "", int(found["passes"] or 1)
    if name not in TASKS:
        raise UserError(f"there is no task {name!r}; known: {known}{did_you_mean(name, TASKS)}")
    if split not in SPLITS:
        raise UserError(f"split={split!r} of task {name!r}: expected one of {', '.join(SPLITS)}")
    if passes < 1:
        raise UserError(f"task {spec!r}: *{passes} must be at least 1")
    module, kind, arguments = TASKS[name]
    if arguments is None and not argument:
        raise UserError(f"task {spec!r} needs an argument, such as {name}:/path/to/file.jsonl")
    if arguments is not None:
        argument = argument or arguments[0]
        if argument not in arguments:
            options = [option for option in arguments if option]
            raise UserError(f"task {name!r} has no {argument!r}; " + (f"expected one of {', '.join(options)}" if options else "it takes no argument") + did_you_mean(argument, options))
    task = getattr(importlib.import_module(f"nanochat.tasks.{module}"), kind)(argument, split)
    if found["part"]:
        whole = len(task)
        task = task[int(found["start"] or 0):int(found["stop"] or whole)]
        if not len(task):
            raise UserError(f"task {spec!r}: nothing is left of its {whole:,} conversations")
    return task, passes
