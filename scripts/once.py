"""
Run a command of a recipe, unless it is done. Like a layer of a container's image it is done if it has succeeded after
the same commands, word by word, and if the user's own files that they name are unchanged.

    export CHAIN=$(mktemp)    # once in a recipe: a sum of its commands so far. Without it every command stands alone
    python -m scripts.once python -m scripts.tok_train --data=tinyworld --vocab_size=4096

once/NAME.json in the base folder says after what a command has succeeded. What it made is not compared: whoever reads
it checks it. --show as the first argument prints the command instead.
"""
import contextlib
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nanochat.runtime.errors import UserError
from nanochat.runtime.exits import install_one_line_errors
from nanochat.runtime.files import base_dir, write_text
from nanochat.training.records import SCRIPTS, STEPS_LOG, latest_checkpoint, unfinished

STAGES = {script: stage for stage, script in SCRIPTS.items()}
# They know what is left to do, and no other command reads what they make.
EACH_TIME = ("library", "report")


def name_of(command: list[str]) -> tuple[str, str, str]:
    """
    (script, model_tag, name of its record) of a command. One name for each result: "mid-d4", as the page calls a
    training; "chat_eval-mid-d4", "tok_train-mine".
    """
    script = next((word for word in command if word.startswith("scripts.")), command[0]).removeprefix("scripts.")
    settings = dict(word.partition("=")[::2] for word in command)
    kind = STAGES.get(script, script)
    if script == "chat_eval":
        kind = f"{script}-{settings.get('--source', '')}"
    about = (Path(settings.get(f"--{key}", "")).name for key in ("model_tag", "data", "name", "source"))
    return script, settings.get("--model_tag", ""), f"{kind}-{next(filter(None, about), 'newest')}"


def own_files(command: list[str]) -> list[tuple[str, int, int]]:
    """(path, size, time) of the files that a command names, as in --tasks=json:FILE, and of the files below folders."""
    found = []
    for word in command:
        for place in filter(None, map(str.strip, [word.partition("=")[2], *re.split(r"[=:,+*[]", word)])):
            path = Path(os.path.expanduser(place))
            # os.path, because Path would raise errors for long texts and unknown users.
            for file in sorted(path.rglob("*")) if os.path.isdir(path) else [path]:
                if os.path.isfile(file) and not any(part.startswith(".") for part in file.relative_to(path).parts):
                    found.append((str(file), file.stat().st_size, file.stat().st_mtime_ns))
    return found


def run(command: list[str]) -> int:
    """
    Run a command to its end and return its exit code. The command handles signals, because it may have to save: Ctrl-C
    reaches it anyway, SIGTERM is passed on. Nothing is locked here: a training run locks its own folder.
    """
    child = subprocess.Popen(command)
    # Ctrl-C is for the command, which has begun and does not inherit this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
            file.write(f"{json.dumps(record)}\n")


def once(command: list[str]) -> None:
    """Run the command unless it is done. SystemExit if it fails, UserError for a training that was stopped."""
    script, model_tag, name = name_of(command)
    print(f"\n=== {name}, {time.strftime('%H:%M:%S')}", flush=True)
    chain = Path(os.environ.get("CHAIN", os.devnull))
    path = base_dir() / f"once/{name}.json"
    record = json.dumps({"after": chain.read_text(), "command": command, "files": own_files(command)}, indent=1)
    if path.exists() and path.read_text() == record:
        print("done before", flush=True)
    else:
        # Before it runs: what an earlier command of this name has made may change.
        path.unlink(missing_ok=True)
        began = time.time()
        note(name=name, began=began)
        code = run(command)
        note(name=name, began=began, ended=time.time(), code=code)
        if code:
            # The command has said why. After a signal, the code is what a shell would give.
            raise SystemExit(code if code > 0 else 128 - code)
        if script in STAGES:
            # Under torchrun a run that was stopped exits with 0.
            newest = latest_checkpoint([STAGES[script]], model_tag or None)
            if newest is None or unfinished(newest):
                raise UserError(f"{name} was stopped before its end; the same command goes on")
        if script in EACH_TIME:
            return
        write_text(path, record)
    chain.write_text(hashlib.sha256(record.encode()).hexdigest())


if __name__ == "__main__":
    install_one_line_errors()
    show = sys.argv[1:2] == ["--show"]
    command = sys.argv[1 + show :]
    if show:
        print(f"\n=== {name_of(command)[2]}\n{' '.join(shlex.join(command).split())}")
    else:
        once(command)
