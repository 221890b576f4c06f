"""
One step of a recipe: run a command, unless it has succeeded before and its inputs and results are unchanged.

    python -m scripts.once mid --needs base_checkpoints/d4 --makes mid_checkpoints/d4 -- \\
        python -m scripts.mid_train --model_tag=d4 --resume=auto

Paths are relative to the base folder. once/<name>.json records the command and the SHA-256 sums of inputs and results:
a result that is damaged, missing or made from other inputs is made again. Without --makes the command always runs: it
knows what is left to do. --show prints the command instead.
"""
import argparse
import contextlib
import hashlib
import json
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from nanochat.runtime.errors import UserError
from nanochat.runtime.exits import install_one_line_errors
from nanochat.runtime.files import base_dir, sha256, write_text
from nanochat.training.records import STEPS_LOG, newest_step, unfinished

LOG = "metrics.jsonl"  # beside checkpoints: a resumed run writes its last lines again


def digest(path: Path) -> str | None:
    """SHA-256 of a file, or of a folder's files and names without hidden files and the log; None: nothing is there."""
    if path.is_file():
        return sha256(path)
    content = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        if not file.name.startswith(".") and file.name != LOG:
            content.update(f"{sha256(file)} {file.relative_to(path)}\n".encode())
    return content.hexdigest() if path.exists() else None


def digests(paths: list[str]) -> dict[str, str | None]:
    return {path: digest(base_dir() / path) for path in paths}


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


def once(name: str, needs: list[str], makes: list[str], show: bool, command: list[str]) -> None:
    """Run the command unless its record says that it is done. UserError if a result is missing."""
    if show:
        print(f"\n=== {name}\n{' '.join(shlex.join(command).split())}")
        return
    print(f"\n=== {name}, {time.strftime('%H:%M:%S')}", flush=True)
    path = base_dir() / "once" / f"{name}.json"
    record: dict[str, Any] = {"command": command, "needs": digests(needs), "makes": digests(makes)}
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
    record["makes"] = digests(makes)
    for result in makes:
        if record["makes"][result] is None:
            raise UserError(f"{name} has ended without making {result} in {base_dir()}")
        newest = newest_step(base_dir() / result)
        # Under torchrun a run that was stopped exits with 0.
        if newest and unfinished(newest):
            raise UserError(f"{name} was stopped before its end; the same command goes on")
    for need in needs:
        if record["needs"][need] is None:  # the command has fetched it
            record["needs"][need] = digest(base_dir() / need)
    write_text(path, json.dumps(record, indent=1))


if __name__ == "__main__":
    install_one_line_errors()
    parser = argparse.ArgumentParser()
    parser.add_argument("name", help="of the record")
    parser.add_argument("--needs", nargs="+", default=[], metavar="PATH", help="read by the command")
    parser.add_argument("--makes", nargs="+", default=[], metavar="PATH", help="left when it ends well")
    parser.add_argument("--show", action="store_true", help="print the command and do nothing")
    parser.add_argument("command", nargs="+", help="after --")
    once(**vars(parser.parse_args()))
