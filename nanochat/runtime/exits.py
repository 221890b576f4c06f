"""How a process ends after an uncaught error: one line, a last save, and no restart that would only fail again."""
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from nanochat.runtime.errors import one_line

# Under torchrun: called with the line of an error that a restart would only repeat.
tell_restarts: list[Callable[[str], object]] = []
# Called after an uncaught error is reported, such as a last save. They never raise, and wait for no dead rank.
last_acts: list[Callable[[], None]] = []
ending = threading.Event()  # this process is about to exit: the heartbeat leaves it alone


def act_last() -> None:
    """Run the last acts before the process ends, each once."""
    ending.set()
    while last_acts:
        last_acts.pop()()


def install_one_line_errors(config: dict | None = None) -> None:
    """
    An uncaught error that `one_line` knows ends the process with that line and exit code 1. NANOCHAT_TRACEBACK=1 shows
    the traceback as well.
    """
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line, rank = one_line(error, config), os.environ.get("RANK")
        if line is not None and not isinstance(error, KeyboardInterrupt):
            for tell in tell_restarts:
                with contextlib.suppress(Exception):  # torchrun itself may be gone
                    tell(line)
        another_rank = rank not in (None, "0")
        if line is not None and another_rank:
            # An error that every rank has is reported once: rank 0 comes first, then torchrun ends the others.
            act_last()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)
        out = sys.__stderr__ or sys.stderr  # torch's own hook calls this one and holds back sys.stderr until it returns
        with contextlib.suppress(OSError):  # its terminal, or what reads its pipe, is gone
            if line is None or os.environ.get("NANOCHAT_TRACEBACK") == "1":
                text = "".join(traceback.format_exception(kind, error, trace))
                if rank is not None:
                    text = f"rank {rank}:\n{text}"
                out.write(text)  # in one write: ranks must not mix their lines
            if line is not None:
                of_rank = f" (rank {rank})" if another_rank else ""
                print(f"error: {line}{of_rank}", file=out)
            out.flush()
        act_last()
        if rank is not None:  # among several ranks, an orderly exit could wait for a dead rank
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(1)

    sys.excepthook = hook
