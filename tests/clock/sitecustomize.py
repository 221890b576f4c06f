"""
A machine that is ten times faster, or slower: the clocks of all Python processes run at CLOCK times their speed, and
what waits for seconds waits accordingly. Whatever is measured, slept or limited in seconds then sees ten times as much
done in each of them (0.1), or a tenth (10). Times of day stay, as do the clocks of the browser and of C++ in torch.

    CLOCK=0.1 tests/run.sh --ignore=tests/test_execution.py
    CLOCK=0.1 PYTHONPATH=$PWD/tests/clock python -m pytest tests/test_chat_web.py

Python imports this file when it starts (see the module `site`). The programs of nanochat/tasks/execution.py are kept
from it: leave test_execution.py out.
"""
import functools
import os

RATE = float(os.environ.get("CLOCK") or 1)


def run_clocks_at(rate: float) -> None:
    import time

    def scale_clock(name: str) -> None:
        clock, kind = getattr(time, name), int if name.endswith("_ns") else float
        setattr(time, name, lambda: kind(clock() * rate))

    for name in ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"):
        scale_clock(name)
    scale_wait(time, "sleep", 0, rate)

    # What imports these clocks by name comes after this.
    import select
    import selectors
    import signal
    import socket
    import subprocess
    import threading

    scale_wait(threading.Condition, "wait", 1, rate)
    scale_wait(threading.Thread, "join", 1, rate)
    scale_wait(select, "select", 3, rate)
    for selector in (selectors.PollSelector, selectors.EpollSelector):
        scale_wait(selector, "select", 1, rate)
    scale_wait(socket.socket, "settimeout", 1, rate)
    gettimeout = socket.socket.gettimeout
    socket.socket.gettimeout = lambda self: (seconds := gettimeout(self)) and seconds * rate
    scale_wait(signal, "setitimer", 1, rate)
    execute = subprocess.Popen._execute_child
    subprocess.Popen._execute_child = lambda self, args, *others: execute(self, without_isolation(args), *others)
    signal.alarm = lambda seconds: round(signal.setitimer(signal.ITIMER_REAL, seconds)[0])


def without_isolation(args: list[str]) -> list[str]:
    """With -I the process beside a rank (nanochat/runtime/heartbeat.py) would not import this file."""
    return ["-P" if arg == "-I" else arg for arg in args] if isinstance(args, list) else args


def scale_wait(place, name: str, position: int, rate: float) -> None:
    """Its argument at this position, or named `timeout`, is seconds; None or a negative number waits for ever."""
    wait = getattr(place, name)

    @functools.wraps(wait)
    def scaled(*args, **settings):
        if settings.get("timeout") is not None:
            settings["timeout"] /= rate
        if len(args) > position and args[position] is not None:
            args = *args[:position], args[position] / rate, *args[position + 1 :]
        return wait(*args, **settings)

    setattr(place, name, scaled)


if RATE != 1:
    run_clocks_at(RATE)
