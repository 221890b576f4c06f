"""
Tasks by name, and mixtures of them.

    make_task("arc:ARC-Challenge", "test")
    make_mixture("smoltalk[:10000], gsm8k*2, arithmetic, json:/path/to.jsonl", "train", seed=0)

A spec is NAME or NAME:ARGUMENT; [start:stop] after it takes a part, and in a mixture *K after that makes K passes.
"after:lookup+arithmetic" are the conversations of arithmetic, each after a question and answer of lookup.
"""
import re
from collections.abc import Callable
from functools import partial

from nanochat.data.task import Task
from nanochat.runtime.errors import UserError, did_you_mean
from nanochat.tasks.arithmetic import Arithmetic
from nanochat.tasks.common import After, Mixture
from nanochat.tasks.custom_json import CustomJSON
from nanochat.tasks.gsm8k import GSM8K
from nanochat.tasks.hub import SmolTalk
from nanochat.tasks.humaneval import HumanEval
from nanochat.tasks.lookup import Lookup, Tokens
from nanochat.tasks.multiple_choice import ARC, MMLU
from nanochat.tasks.python_questions import Pydoc
from nanochat.tasks.run import Run
from nanochat.tasks.spellingbee import generated_words, real_words
from nanochat.tasks.world_questions import TinyWorld


def after(argument: str, split: str) -> Task:
    """The task after:EARLIER+TASK."""
    earlier, _, task = argument.partition("+")
    return After(make_task(earlier, split), make_task(task, split))


# Name -> what makes the task from (argument, split), and the arguments that it takes, the default first;
# FILE: any besides; None: any, and one is needed.
TASKS: dict[str, tuple[Callable[[str, str], Task], tuple[str, ...] | None]] = {
    "smoltalk": (SmolTalk, ("",)),
    "mmlu": (MMLU, ("",)),
    "arc": (ARC, ("ARC-Easy", "ARC-Challenge")),
    "gsm8k": (GSM8K, ("",)),
    "humaneval": (HumanEval, ("",)),
    "arithmetic": (Arithmetic, ("", "easy", "medium", "hard", "quick")),
    "spellingbee": (generated_words, ("", "spell", "tool", "hand")),
    "words": (real_words, None),
    "tinyworld": (TinyWorld, ("", "facts", "identity")),
    "pydoc": (Pydoc, ("", "known")),
    "run": (Run, ("", "tool")),
    "lookup": (partial(Lookup, "lookup"), ("", "true", "unknown", "talk", "FILE")),
    "search": (partial(Lookup, "search"), ("", "true", "unknown", "FILE")),
    "tokens": (Tokens, None),
    "json": (CustomJSON, None),
    "after": (after, None),
}
# Not downloaded, and neither a user's own data nor words of it.
GENERATED = ("arithmetic", "lookup", "pydoc", "run", "search", "spellingbee", "tinyworld")
PART = r"\[(?P<start>\d*):(?P<stop>\d*)\]"
SPEC = re.compile(rf"(?P<name>[^:\[*]+?)(:(?P<argument>.+?))?({PART})?(\*(?P<passes>[1-9]\d*))?")


def make_task(spec: str, split: str) -> Task:
    """
    The task of a spec such as "gsm8k", "arc:ARC-Challenge", "arithmetic[:5000]". split: "train" or "test".
    UserError for a spec that is none, a name or an argument that is not known, and data that is missing.
    """
    name, argument, found = read_spec(spec)
    make, _ = TASKS[name]
    task = make(argument, split)
    if found["start"] is None:
        return task
    part = task[int(found["start"] or 0) : int(found["stop"] or len(task))]
    if not len(part):
        raise UserError(f"task {spec.strip()!r}: nothing is left of its {len(task):,} conversations")
    return part


def make_tasks(specs: str, split: str) -> list[Task]:
    """The tasks of several specs, separated by commas, each once and without those that are only to train on."""
    tasks = [make_task(spec, split) for spec in specs.split(",")]
    return [task for task in tasks if task.eval_type]


def make_mixture(specs: str, split: str, seed: int) -> Mixture:
    """The tasks of several specs, separated by commas, in an order that depends on their lengths and the seed only."""
    tasks = []
    for spec in specs.split(","):
        _, _, found = read_spec(spec)
        tasks += [make_task(spec, split)] * int(found["passes"] or 1)
    return Mixture(tasks, seed)


def without_parts(specs: str) -> str:
    """The same tasks whole and once: what a mixture that is trained on in parts is measured by."""
    whole = [re.sub(r"(\[\d*:\d*\])?(\*\d+)?$", "", spec.strip()) for spec in specs.split(",")]
    return ",".join(dict.fromkeys(whole))


def describe_validation(mixture: Mixture) -> str:
    """What the test split of a mixture is to a model that trains on it, in words."""
    seen = [task.name for task in mixture.tasks if not task.held_out]
    if not seen:
        return "held out"
    if len(seen) == len(mixture.tasks):
        return "validation, on the same conversations as in training"
    return f"validation, held out except {', '.join(seen)}, the same conversations as in training"


def task_names(specs: str) -> set[str]:
    """The names in several specs, without arguments and parts."""
    return {re.split(r"[:\[*]", spec.strip())[0] for spec in specs.split(",")}


def never_looks_up(specs: str, library: str | None) -> str:
    """A warning, if a library is opened to a model of these tasks and none of them teaches it to look things up."""
    if library is None or task_names(specs) & {"lookup", "search"}:
        return ""
    return (f"warning: this model was never taught to look things up: no lookup or search among its tasks "
            f"({specs or 'none are known'}); unless your own conversations do it, train with "
            f'--tasks="lookup, search, lookup:{library}, search:{library}, …"')


def example_questions(specs: str, count: int = 4) -> list[str]:
    """
    Short held-out questions of a mixture's tasks in turn: what a model that was trained on it can be asked. Only of
    generated tasks, and none about a library of one's own; [] where there are none.
    """
    tasks = []
    for spec in without_parts(specs).split(","):
        name, _, argument = spec.partition(":")
        if name in GENERATED and argument in TASKS[name][1]:
            tasks.append(make_task(spec, "test")[:50])
    found = []
    for one_of_each_task in zip(*tasks):
        for conversation in one_of_each_task:
            message = conversation["messages"][0]
            if message["role"] == "user" and len(message["content"]) <= 80:
                found.append(message["content"])
    return found[:count]


def read_spec(spec: str) -> tuple[str, str, re.Match[str]]:
    """Name and argument of a spec, and how it was read; UserError for one that cannot be meant. Makes nothing."""
    spec = spec.strip()
    found = SPEC.fullmatch(spec)
    if not found:
        raise UserError(f"task {spec!r} is not NAME, NAME:ARGUMENT, NAME[start:stop] or NAME*passes; "
                        f"known names: {', '.join(TASKS)}")
    name = found["name"]
    argument = found["argument"] or ""
    if name not in TASKS:
        raise UserError(f"there is no task {name!r}; known: {', '.join(TASKS)}{did_you_mean(name, TASKS)}")
    _, arguments = TASKS[name]
    if arguments is None:
        if not argument:
            raise UserError(f"task {spec!r} needs an argument, such as json:/path/to/file.jsonl or words:climbmix")
        return name, argument, found
    if argument and argument not in arguments and "FILE" not in arguments:
        expected = " or ".join(filter(None, arguments)) or "no argument"
        raise UserError(f"task {name!r} has no {argument!r}; expected {expected}{did_you_mean(argument, arguments)}")
    return name, argument or arguments[0], found
