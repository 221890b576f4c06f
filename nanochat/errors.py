"""What a user can cause and act on is said in one line; everything else keeps its traceback."""
import errno
import os
import sys
from types import TracebackType

# Operating-system refusals that the user, not the program, has to mend.
USER_ERRNOS = {errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EPERM}


class UserError(Exception):
    """Bad input. The message is one or two lines: the value, what was expected, what to do."""


def one_line(error: BaseException) -> str | None:
    """The line to show instead of a traceback, or None where the traceback is what helps."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in USER_ERRNOS:
        where = f": {error.filename}" if error.filename else ""
        return f"{os.strerror(error.errno)}{where} (free space there, or set NANOCHAT_BASE_DIR to another folder)"
    return None


def install_one_line_errors() -> None:
    """From here on an uncaught UserError ends the process with its one line and exit code 1.
    NANOCHAT_TRACEBACK=1 shows the traceback as well."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        line = one_line(error)
        if line is None or os.environ.get("NANOCHAT_TRACEBACK") == "1":
            previous(kind, error, traceback)
        if line is not None:
            print(f"error: {line}", file=sys.stderr)

    sys.excepthook = hook
