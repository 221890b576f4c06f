"""Errors: one line for what a user can cause and act on; everything else keeps its traceback."""
import contextlib
import difflib
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType

# Without a network the hub's library tells each of its tries on several lines; the error after them says it in one.
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
# Operating-system refusals that the user, not the program, has to mend.
USER_ERRNOS = {errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EPERM}
# Under torchrun: called with the line of an error that a restart would only repeat.
tell_restarts: list[Callable[[str], object]] = []

# Called after an uncaught error is reported, such as a last save. They never raise, and wait for no dead rank.
last_acts: list[Callable[[], None]] = []
ending = threading.Event()  # once this process is about to exit: StopRequest.watch leaves it alone


def is_rank0() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def first_line(error: Exception) -> str:
    """An error's first line, of bounded length: libraries tell long stories."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def act_last() -> None:
    """Run what is left to do before the process ends, each once."""
    ending.set()
    while last_acts:
        last_acts.pop()()


class UserError(Exception):
    """Bad input. The message is one or two lines: the value, what was expected, what to do."""


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown word: "; did you mean 'x'?" with the nearest name, or ""."""
    others = {name.lower(): name for name in names if name != word}
    nearest = difflib.get_close_matches(word.lower(), others, n=1, cutoff=0.5)
    return f"; did you mean {others[nearest[0]]!r}?" if nearest else ""


def one_line(error: BaseException, config: dict | None = None) -> str | None:
    """The line to show instead of a traceback; None where the traceback helps more. config: a script's settings."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted" + "; --resume=auto continues from the last checkpoint" * ("resume" in (config or {}))
    if isinstance(error, OSError) and error.errno in USER_ERRNOS:
        where = f": {error.filename}" if error.filename else ""
        return f"{os.strerror(error.errno)}{where} (free space there, or set NANOCHAT_BASE_DIR to another folder)"
    rows = (config or {}).get("device_batch_size", 0)
    if rows and is_out_of_memory(error):
        smaller = "a smaller max_seq_len or depth, or activation_checkpointing"
        advice = f"--device_batch_size={rows // 2}" if rows > 1 else smaller
        return f"out of memory with device_batch_size={rows}; try {advice}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU or the CPU; by name and text, because scripts without torch import this module."""
    texts = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")
    by_name = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return by_name or any(text in str(error) for text in texts)


def log_error(what: str, error: BaseException) -> None:
    """On stderr: where an error came from, without its message, which may quote what somebody wrote."""
    trace = "".join(traceback.format_tb(error.__traceback__))
    print(f"{what}: {type(error).__name__}\n{trace}", file=sys.stderr, end="", flush=True)


def install_one_line_errors(config: dict | None = None) -> None:
    """
    An uncaught error that `one_line` knows ends the process with that line and exit code 1. NANOCHAT_TRACEBACK=1 shows
    the traceback as well.
    """
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line, rank = one_line(error, config), os.environ.get("RANK")
        out = sys.__stderr__  # torch's own hook calls this one and holds back sys.stderr until it returns
        if line is not None and not isinstance(error, KeyboardInterrupt):
            for tell in tell_restarts:
                with contextlib.suppress(Exception):  # torchrun itself may be gone
                    tell(line)
        if line is not None and rank not in (None, "0"):
            # An error that every rank has is reported once: rank 0 comes first, then torchrun ends the others.
            act_last()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)
        with contextlib.suppress(OSError):  # its terminal, or what reads its pipe, is gone
            if line is None or os.environ.get("NANOCHAT_TRACEBACK") == "1":
                text = "".join(traceback.format_exception(kind, error, trace))
                out.write((f"rank {rank}:\n" if rank else "") + text)  # in one write: ranks must not mix their lines
            if line is not None:
                print(f"error: {line}" + f" (rank {rank})" * (rank not in (None, "0")), file=out)
            out.flush()
        act_last()
        if rank is not None:  # among several ranks, an orderly exit could wait for a dead rank
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(1)

    sys.excepthook = hook
