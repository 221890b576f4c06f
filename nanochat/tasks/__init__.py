"""
Tasks by name, and mixtures of them.

    make_task("arc:ARC-Challenge", "test")
    make_mixture("smoltalk[:10000], gsm8k*2, arithmetic, json:/path/to.jsonl", "train", seed=0)

A spec is NAME or NAME:ARGUMENT; [start:stop] after it selects a part, and in a mixture *K at the end makes K passes.
"after:lookup+arithmetic" gives the conversations of arithmetic, each after a question and answer of lookup.
"""
import importlib
import re
from collections.abc import Callable

from nanochat.data.task import Task
from nanochat.inference.tools import REFUSALS
from nanochat.runtime.errors import UserError, did_you_mean
from nanochat.tasks.common import Mixture

# Of the task notes: a language, a kind of question, or both, such as "de:talk".
LANGUAGES_AND_KINDS = tuple(
    f"{language}:{kind}".strip(":") for language in ("", *REFUSALS) for kind in ("", "unknown", "talk"))
# Name -> the class, or function, that makes the task from (argument, split), as MODULE:NAME in this folder, and the
# possible arguments. The first argument is the default; "FILE" stands for any text, and if it is first, an argument is
# required. The modules are not imported here: a command imports only those of the tasks that it is given.
TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "smoltalk": ("hub:SmolTalk", ("",)),
    "mmlu": ("hub:MMLU", ("",)),
    "arc": ("hub:ARC", ("ARC-Easy", "ARC-Challenge")),
    "gsm8k": ("hub:GSM8K", ("",)),
    "humaneval": ("hub:HumanEval", ("",)),
    "arithmetic": ("arithmetic:Arithmetic", ("", "easy", "medium", "hard")),
    "spellingbee": ("spellingbee:generated_words", ("", "spell", "tool", "hand")),
    "words": ("spellingbee:real_words", ("FILE",)),
    "tinyworld": ("world_questions:TinyWorld", ("", "facts", "identity")),
    "pydoc": ("python_questions:Pydoc", ("", "known")),
    "run": ("run:Run", ("", "tool")),
    "lookup": ("lookup:Lookup", ("", "unknown", "talk", "FILE")),
    "search": ("lookup:Search", ("", "unknown", "FILE")),
    "notes": ("notes:Notes", LANGUAGES_AND_KINDS),
    "typed": ("typed:Typed", ("messages", "sums")),
    "json": ("custom_json:CustomJSON", ("FILE",)),
    "after": ("after:After", ("FILE",)),
}
SPEC = re.compile(r"(?P<name>[^:\[*]+?)(:(?P<argument>.+?))?"
                  r"(\[(?P<start>\d*):(?P<stop>\d*)\])?(\*(?P<passes>[1-9]\d*))?")


def make_task(spec: str, split: str) -> Task:
    """
    The task of a spec such as "gsm8k", "arc:ARC-Challenge", "arithmetic[:5000]". split: "train" or "test".
    UserError for a malformed spec, an unknown name or argument, passes, and missing data.
    """
    fields, argument = read_spec(spec)
    if fields["passes"]:
        raise UserError(f"task {spec.strip()!r}: only a mixture can have *{fields['passes']} passes")
    task = maker_of(fields["name"])(argument, split)
    if fields["start"] is None:
        return task
    part = task[int(fields["start"] or 0) : int(fields["stop"] or len(task))]
    if not len(part):
        raise UserError(f"task {spec.strip()!r}: nothing is left of its {len(task):,} conversations")
    return part


def maker_of(name: str) -> Callable[[str, str], Task]:
    """The function that makes a task from (argument, split); its module is imported now."""
    module, _, maker = TASKS[name][0].partition(":")
    return getattr(importlib.import_module(f"nanochat.tasks.{module}"), maker)


def make_tasks(specs: str, split: str) -> list[Task]:
    """The tasks of several specs, separated by commas, except tasks for training only."""
    tasks = [make_task(spec, split) for spec in specs.split(",")]
    return [task for task in tasks if task.eval_type]


def make_mixture(specs: str, split: str, seed: int) -> Mixture:
    """The tasks of several specs, separated by commas, in an order that depends only on their lengths and the seed."""
    tasks = []
    for spec in specs.split(","):
        passes = read_spec(spec)[0]["passes"]
        tasks += [make_task(spec.strip().removesuffix(f"*{passes}"), split)] * int(passes or 1)
    return Mixture(tasks, seed)


def without_parts(specs: str) -> str:
    """The same tasks, whole and once each: a mixture that is trained on in parts is measured on these."""
    whole = [re.sub(r"(\[\d*:\d*\])?(\*\d+)?$", "", spec.strip()) for spec in specs.split(",")]
    return ",".join(dict.fromkeys(whole))


def describe_validation(mixture: Mixture) -> str:
    """In words, whether a model that trains on a mixture has seen the conversations of its test split."""
    seen = [task.name for task in mixture.tasks if not task.held_out]
    if not seen:
        return "held out"
    return f"validation, in training the same conversations of {', '.join(seen)}"


def read_spec(spec: str) -> tuple[re.Match[str], str]:
    """The fields of a spec, see SPEC, and its argument, which may be the default. UserError for a wrong spec."""
    spec = spec.strip()
    fields = SPEC.fullmatch(spec)
    if not fields:
        raise UserError(f"task {spec!r} is not NAME, NAME:ARGUMENT, NAME[start:stop] or NAME*passes; "
                        f"known names: {', '.join(TASKS)}")
    name = fields["name"]
    if name not in TASKS:
        raise UserError(f"there is no task {name!r}; known: {', '.join(TASKS)}{did_you_mean(name, TASKS)}")
    _, arguments = TASKS[name]
    argument = fields["argument"] or arguments[0]
    if argument == "FILE":
        raise UserError(f"task {spec!r} needs an argument, such as json:/path/to/file.jsonl or words:climbmix")
    if argument not in arguments and "FILE" not in arguments:
        expected = " or ".join(filter(None, arguments)) or "no argument"
        raise UserError(f"task {name!r} has no {argument!r}; expected {expected}{did_you_mean(argument, arguments)}")
    return fields, argument
