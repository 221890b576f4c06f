"""A progress bar for long work."""
import contextlib
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from nanochat.runtime.console import is_rank0

DELAY = 5  # seconds; shorter work shows no bar


class Bar(tqdm):
    """A bar that does not end the run when it cannot be written, such as into a log on a full disk."""

    def display(self, *args: Any, **settings: Any) -> None:
        with contextlib.suppress(OSError):
            super().display(*args, **settings)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def progress(items: Iterable | None, what: str, unit: str, total: int | None = None) -> Bar:
    """
    The items, or a bar to `update`, on stderr of rank 0: how many of the total, how fast, how long it will take. It is
    drawn twice a second in a terminal, every 15 s in a log.
    """
    interval = 0.5 if sys.stderr.isatty() else 15.0
    return Bar(items, what, total, unit=f" {unit}", delay=DELAY, mininterval=interval, miniters=1,
               disable=not is_rank0())
