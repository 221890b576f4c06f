"""
Run a command once: not again when it has ended well, and its inputs and results are still as they were.

    python -m scripts.once mid --needs base_checkpoints/d4 --makes mid_checkpoints/d4 -- \\
        python -m scripts.mid_train --model_tag=d4 --resume=auto

Paths are relative to the base folder. The record of each name is once/<name>.json; it holds the command and SHA-256
sums of inputs and results, so that a damaged or missing result is made again, and so is one of another input.
"""
import argparse
import contextlib
import hashlib
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

from nanochat.runtime.errors import UserError
from nanochat.runtime.exits import install_one_line_errors
from nanochat.runtime.files import base_dir, sha256, write_text
from nanochat.training.records import newest_step, unfinished

LOG = "metrics.jsonl"  # beside checkpoints: a resumed run writes its last lines anew


def digest(path: Path) -> str | None:
    """SHA-256 of a file, or of a folder's files and names, without hidden ones and the log; None: nothing is there."""
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
    Run a command to its end; its exit code. It is for the command to act on signals, as it may have to save: Ctrl-C
    reaches it anyway, SIGTERM is passed on. Nothing is locked here: a training run locks its own folder.
    """
    child = subprocess.Popen(command)
    signal.signal(signal.SIGINT, lambda *_: None)  # a handler: to ignore it would be passed on to the command
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    while child.returncode is None:  # in turns: a handler waits while one system call waits for the command
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=1)
    return child.returncode


def once(name: str, needs: list[str], makes: list[str], command: list[str]) -> None:
    """Run the command unless its record says that this is done. UserError when a result is missing."""
    path = base_dir() / "once" / f"{name}.json"
    record: dict[str, Any] = {"command": command, "needs": digests(needs), "makes": digests(makes)}
    if path.is_file() and json.loads(path.read_bytes()) == record:
        print(f"done before: {', '.join(makes)}", flush=True)
        return
    code = run(command)
    if code:
        raise SystemExit(code if code > 0 else 128 - code)  # it has said why; by a signal: as a shell would
    record["makes"] = digests(makes)
    for result in makes:
        if record["makes"][result] is None:
            raise UserError(f"{name} has ended without making {result} in {base_dir()}")
        newest = newest_step(base_dir() / result)
        if newest and unfinished(newest):  # under torchrun a run that was stopped ends with 0
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
    parser.add_argument("command", nargs="+", help="after --")
    once(**vars(parser.parse_args()))
