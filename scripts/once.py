"""
Run a command of a recipe, unless it has succeeded before and what it read and what it left are unchanged.

    python -m scripts.once python -m scripts.tok_train --data=tinyworld --vocab_size=4096

The command's script and settings say what it reads and leaves (FILES). once/NAME.json in the base folder records the
command and the SHA-256 sums: a result that is damaged, missing or made from other inputs is made again. --show as the
first argument prints the command instead.
"""
import contextlib
import hashlib
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from configurator import read_arguments, read_settings
from nanochat.runtime.errors import UserError
from nanochat.runtime.exits import install_one_line_errors
from nanochat.runtime.files import base_dir, sha256, write_text
from nanochat.training.records import SCRIPTS, STEPS_LOG, newest_step, unfinished

LOG = "metrics.jsonl"  # beside checkpoints: a resumed run writes its last lines again
REPORT = "report/sections/*/{model_tag}/"
# What each script reads, and what it leaves, in the base folder. Another script runs each time: it knows what is left
# to do.
FILES = {
    "dataset": ([], ["data/{name}/manifest.json", "data/{name}/shard_*"]),
    "tok_train": (["data/{data}/manifest.json"], ["tokenizer/{data}"]),
    "base_train": (["data/{data}/manifest.json", "tokenizer/{data}"],
                   ["base_checkpoints/{model_tag}", REPORT + "base_train.json"]),
    "base_eval": (["base_checkpoints/{model_tag}", "eval_bundle"], [REPORT + "base_eval.json"]),
    "mid_train": (["base_checkpoints/{model_tag}"], ["mid_checkpoints/{model_tag}", REPORT + "mid_train.json"]),
    "chat_sft": (["{source}_checkpoints/{model_tag}"], ["sft_checkpoints/{model_tag}", REPORT + "chat_sft.json"]),
    "chat_rl": (["{source}_checkpoints/{model_tag}"], ["rl_checkpoints/{model_tag}", REPORT + "chat_rl.json"]),
    "chat_eval": (["{source}_checkpoints/{model_tag}"], [REPORT + "chat_eval_{source}.json"]),
}


def files_of(command: list[str]) -> tuple[str, list[str], list[str]]:
    """
    (name, needs, makes) of a command that runs one of the scripts: the name of its record, and patterns of paths.
    UserError if its settings are wrong.
    """
    place = next((i for i, word in enumerate(command) if word.startswith("scripts.")), None)
    if place is None:
        raise UserError(f"{shlex.join(command)} runs no script: expected python -m scripts.NAME --key=value")
    script = command[place].removeprefix("scripts.")
    settings, _ = read_settings(str(Path(__file__).with_name(f"{script}.py")))
    values = {name: setting.default for name, setting in settings.items()}
    values |= read_arguments(command[place + 1 :], settings)
    if script == "dataset":
        from nanochat.corpus.make_dataset import default_name  # it imports pyarrow, and a plan calls this often

        values["name"] = values["name"] or default_name(values["source"])
    # Trainings are called as their stage: the page finds them by "mid-TAG".
    kinds = {name: stage for stage, name in SCRIPTS.items()}
    kinds["chat_eval"] = f"chat_eval-{values.get('source')}"
    about = (Path(str(values.get(key) or "")).name for key in ("model_tag", "data", "name", "source"))
    if script in FILES and not values.get("model_tag", script):
        raise UserError(f"scripts.once runs {script} with --model_tag=…: it is part of the paths that are compared")
    needs, makes = ([path.format(**values) for path in paths] for paths in FILES.get(script, ([], [])))
    return f"{kinds.get(script, script)}-{next(filter(None, about), 'newest')}", needs, makes


def digest(pattern: str) -> str | None:
    """
    SHA-256 of the names and contents of the files at, or in, the paths that match a pattern in the base folder, without
    hidden files and the log. None: nothing is there.
    """
    content, paths = hashlib.sha256(), sorted(base_dir().glob(pattern))
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and not file.name.startswith(".") and file.name != LOG:
                content.update(f"{sha256(file)} {file.relative_to(base_dir())}\n".encode())
    return content.hexdigest() if paths else None


def run(command: list[str]) -> int:
    """
    Run a command to its end and return its exit code. The command handles signals, because it may have to save: Ctrl-C
    reaches it anyway, SIGTERM is passed on. Nothing is locked here: a training run locks its own folder.
    """
    child = subprocess.Popen(command)
    # A handler that does nothing: Ctrl-C is for the command.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    # In turns: a signal that comes just before a system call is handled only after it.
    while child.returncode is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=1)
    return child.returncode


def note(**record: Any) -> None:
    """Add a line to the log of steps, which the page of scripts/chat_web.py --watch shows."""
    path = base_dir() / STEPS_LOG
    # A full disk costs the line, not the step.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def once(name: str, needs: list[str], makes: list[str], command: list[str]) -> None:
    """Run the command unless its record says that it is done. UserError if it leaves no result."""
    print(f"\n=== {name}, {time.strftime('%H:%M:%S')}", flush=True)
    path = base_dir() / "once" / f"{name}.json"
    record = {"command": command, "needs": [*map(digest, needs)], "makes": [*map(digest, makes)]}
    if makes and path.is_file() and json.loads(path.read_bytes()) == record:
        print(f"done before: {', '.join(makes)}", flush=True)
        return
    began = time.time()
    note(name=name, began=began)
    code = run(command)
    note(name=name, began=began, ended=time.time(), code=code)
    if code:
        # The command has said why. After a signal, the code is what a shell would give.
        raise SystemExit(code if code > 0 else 128 - code)
    record["makes"] = [*map(digest, makes)]
    for result, found in zip(makes, record["makes"], strict=True):
        if found is None:
            raise UserError(f"{name} has ended without making {result} in {base_dir()}")
        newest = newest_step(base_dir() / result)
        # Under torchrun a run that was stopped exits with 0.
        if newest and unfinished(newest):
            raise UserError(f"{name} was stopped before its end; the same command goes on")
    # What the command has fetched itself.
    record["needs"] = [before or digest(need) for need, before in zip(needs, record["needs"], strict=True)]
    write_text(path, json.dumps(record, indent=1))


if __name__ == "__main__":
    install_one_line_errors()
    show = sys.argv[1:2] == ["--show"]
    command = sys.argv[1 + show :]
    files = files_of(command)
    if show:
        print(f"\n=== {files[0]}\n{' '.join(shlex.join(command).split())}")
    else:
        once(*files, command)
