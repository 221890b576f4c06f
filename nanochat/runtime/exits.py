"""How a process ends after an uncaught error: one line, and no restart that would only fail again."""
import contextlib
import os
import signal
import sys
import time
import traceback
from types import TracebackType
from typing import Any

from nanochat.runtime.errors import one_line

job_stores: list[Any] = []  # torchrun's, a torch.distributed.Store that outlives its ranks; none without torchrun


def install_one_line_errors(config: dict | None = None) -> None:
    """
    An uncaught error that `one_line` knows ends the process with that line and exit code 1. NANOCHAT_TRACEBACK=1 shows
    the traceback as well.
    """
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line, rank = one_line(error, config), os.environ.get("RANK")
        another_rank = rank not in (None, "0")
        if line is not None and not isinstance(error, KeyboardInterrupt):
            # A restart would only repeat the error: `join` reads the line and ends it.
            for store in job_stores:
                # torchrun itself may be gone.
                with contextlib.suppress(Exception):
                    store.set("user error", line)
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
