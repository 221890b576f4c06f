"""How a process ends after an uncaught error: one line, and no restart that would only fail again."""
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from nanochat.runtime.errors import one_line

# Under torchrun: called with the line of an error that a restart would only repeat.
tell_restarts: list[Callable[[str], object]] = []


def install_one_line_errors(config: dict | None = None) -> None:
    """
    An uncaught error that `one_line` knows ends the process with that line and exit code 1. NANOCHAT_TRACEBACK=1 shows
    the traceback as well.
    """
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line, rank = one_line(error, config), os.environ.get("RANK")
        another_rank = rank not in (None, "0")
        if line is not None and not isinstance(error, KeyboardInterrupt):
            for tell in tell_restarts:
                # torchrun itself may be gone.
                with contextlib.suppress(Exception):
                    tell(line)
        if line is not None and another_rank:
            # An error that every rank has is reported once: rank 0 comes first, then torchrun ends the others.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)
        # torch's own hook calls this one, and holds back sys.stderr until it returns.
        out = sys.__stderr__ or sys.stderr
        # The terminal, or the reader of the pipe, may be gone.
        with contextlib.suppress(OSError):
            if line is None or os.environ.get("NANOCHAT_TRACEBACK") == "1":
                text = "".join(traceback.format_exception(kind, error, trace))
                if rank is not None:
                    text = f"rank {rank}:\n{text}"
                # One write, so that ranks do not mix their lines.
                out.write(text)
            if line is not None:
                of_rank = f" (rank {rank})" if another_rank else ""
                print(f"error: {line}{of_rank}", file=out)
            out.flush()
            # Among several ranks, an orderly exit could wait for a dead rank.
            if rank is not None:
                sys.stdout.flush()
        if rank is not None:
            os._exit(1)

    sys.excepthook = hook
