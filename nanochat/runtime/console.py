"""What a process prints. Ranks that share a terminal print once; imports no torch."""
import contextlib
import errno
import io
import os
import sys
import traceback


def is_rank0() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def print0(*values: object) -> None:
    """
    Print on rank 0, at once. A run continues if its terminal, or the reader of its pipe (`| tee`), is gone. While its
    log's disk is full, lines are lost.
    """
    if not is_rank0():
        return
    try:
        print(*values, flush=True)
    except OSError as error:
        # EIO is a terminal that is gone, EPIPE a pipe without a reader.
        if error.errno in (errno.EIO, errno.EPIPE):
            discard_output()


def escape_unprintable() -> None:
    """Print characters that the encoding of stdout lacks as escapes: none may end a run. For scripts."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The setting takes effect even when the position in a file that became a pipe is unknown.
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Send all further output to /dev/null; errors as well if they went to the same place."""
    # Descriptors, not sys.stdout: libraries and child processes write to them as well.
    null = os.open(os.devnull, os.O_WRONLY)
    if os.path.sameopenfile(1, 2):
        os.dup2(null, 2)
    os.dup2(null, 1)


def log_error(what: str, error: BaseException) -> None:
    """Print on stderr where an error came from, without its message, which may quote a user's text."""
    trace = "".join(traceback.format_tb(error.__traceback__))
    print(f"{what}: {type(error).__name__}\n{trace}", file=sys.stderr, end="", flush=True)
