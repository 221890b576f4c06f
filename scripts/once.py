"""
Run a command once: not again when it has ended well, and both what it read and what it made are still as they were.

    python -m scripts.once mid --needs base_checkpoints/d4 --makes mid_checkpoints/d4 -- \\
        python -m scripts.mid_train --model_tag=d4 --resume=auto

Paths are relative to the base folder. The record of each name is once/<name>.json; it holds the command and SHA-256
sums over what it read and made, so that a damaged or missing result is made again, and so is what was made of another
input.
"""
import argparse
import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

from nanochat.runtime.errors import UserError
from nanochat.runtime.exits import install_one_line_errors
from nanochat.runtime.files import base_dir, locked, sha256, write_text

LOG = "metrics.jsonl"  # beside checkpoints: a resumed run writes its last lines anew


def digest(path: Path) -> str | None:
    """SHA-256 of a file, or of a folder's files and names, without hidden ones and the log; None: nothing is there."""
    if path.is_file():
        return sha256(path)
    names = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    lines = [f"{sha256(path / name)} {name}\n" for name in names if not name.startswith(".") and name != LOG]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else None


def digests(paths: list[str]) -> dict[str, str | None]:
    return {path: digest(base_dir() / path) for path in paths}


def unfinished(path: Path) -> str | None:
    """How far the run in a folder has come by its newest checkpoint, "300 of 700"; None if it has ended or is none."""
    metas = path.glob("step_*/meta.json")
    steps = {int(meta.parent.name[5:]): meta for meta in metas if meta.parent.name[5:].isdecimal()}
    meta = json.loads(steps[max(steps)].read_text(encoding="utf-8")) if steps else {"step": 0}
    return f"{meta['step']:,} of {meta['num_iterations']:,}" if meta["step"] < meta.get("num_iterations", 0) else None


def run(command: list[str], lock: Path) -> int:
    """
    Run a command to its end; its exit code. It is for the command to act on signals, as it may have to save: Ctrl-C
    reaches it anyway, SIGTERM is passed on. UserError while another process runs the same. The command inherits the
    open lock file, so that the lock holds until it ends, even if this process is killed.
    """
    try:
        file = locked(lock, wait=False)
    except BlockingIOError:
        raise UserError(f"{lock.stem} is being made by another process; wait for it, or end it") from None
    with file:
        child = subprocess.Popen(command, pass_fds=[file.fileno()])
        signal.signal(signal.SIGINT, lambda *_: None)  # a handler: to ignore it would be passed on to the command
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        return child.wait()


def once(name: str, needs: list[str], makes: list[str], command: list[str]) -> None:
    """Run the command unless its record says that this is done. UserError when it does not make what it should."""
    path = base_dir() / "once" / f"{name}.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    read = {"command": command, "needs": digests(needs)}
    if record == read | {"makes": digests(makes)}:
        print(f"done before: {', '.join(makes)}", flush=True)
        return
    code = run(command, path.with_suffix(".lock"))
    if code:
        raise SystemExit(code if code > 0 else 128 - code)  # it has said why; by a signal: as a shell would
    made = digests(makes)
    for result in makes:
        if made[result] is None:
            raise UserError(f"{name} has ended without making {result} in {base_dir()}")
        if (steps := unfinished(base_dir() / result)) is not None:
            raise UserError(f"{name} was stopped after {steps} steps; the same command goes on")
    read["needs"] |= digests([need for need, found in read["needs"].items() if found is None])  # it has fetched them
    write_text(path, json.dumps(read | {"makes": made}, indent=1))


if __name__ == "__main__":
    install_one_line_errors()
    parser = argparse.ArgumentParser(
        prog="python -m scripts.once", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="of the record")
    parser.add_argument("--needs", action="append", default=[], metavar="PATH", help="what the command reads")
    parser.add_argument("--makes", action="append", default=[], metavar="PATH", help="what it leaves when it ends well")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments = parser.parse_args(sys.argv[1:split])
    if not sys.argv[split + 1 :]:
        parser.error("there is no command after --")
    once(arguments.name, arguments.needs, arguments.makes, sys.argv[split + 1 :])
