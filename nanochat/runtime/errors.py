"""Errors: one line for those a user can cause and fix; all others keep their tracebacks. Imports no torch."""
import difflib
import errno
import os
from collections.abc import Iterable

# Without a network the hub's library reports each try on several lines; the error after them needs only one.
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
# Operating-system refusals that the user, not the program, has to fix.
FULL = {errno.ENOSPC, errno.EDQUOT}
FREE_SPACE = "free space there, or "  # in their line
USER_ERRNOS = FULL | {errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR}


class UserError(Exception):
    """Bad input. The message is one or two lines: the value, what was expected, what to do."""


def first_line(error: BaseException) -> str:
    """An error's first line, of bounded length: libraries write long messages."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown word: "; did you mean 'x'?" with the nearest name, or ""."""
    others = {name.lower(): name for name in names if name != word}
    nearest = difflib.get_close_matches(word.lower(), others, n=1, cutoff=0.5)
    return f"; did you mean {others[nearest[0]]!r}?" if nearest else ""


def one_line(error: BaseException, config: dict | None = None) -> str | None:
    """The line to show instead of a traceback; None if the traceback helps more. config: a script's settings."""
    config = config or {}
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.errno in USER_ERRNOS:
        where = f": {error.filename}" if error.filename else ""
        full = FREE_SPACE if error.errno in FULL else ""
        return f"{os.strerror(error.errno)}{where} ({full}set NANOCHAT_BASE_DIR to another folder)"
    rows = config.get("device_batch_size")
    if rows and is_out_of_memory(error):
        advice = "a smaller max_seq_len or depth, or activation_checkpointing"
        if rows > 1:
            advice = f"--device_batch_size={rows // 2}"
        return f"out of memory with device_batch_size={rows}; try {advice}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the CPU has no memory left; by name and text, because this module knows no torch."""
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return True
    return "DefaultCPUAllocator: can't allocate memory" in str(error) or "std::bad_alloc" in str(error)
