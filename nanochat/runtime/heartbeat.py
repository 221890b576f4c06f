"""
Ranks that fall silent without dying: a stopped process, a thread that keeps the interpreter's lock, a host that is cut
off. (A rank that dies is noticed by torchrun on its host, and by the lost connection elsewhere.)

    every rank              a thread writes to a small process beside it, the guard, every BEAT seconds; the guard ends
                            a rank that it has not heard for MISSED_BEATS beats, unless it is writing a checkpoint
    first rank of a host    its thread also counts in the store of all ranks. The thread of rank 0 compares; it ends
                            rank 0 where a host has not counted for so long. A store that does not answer keeps the
                            other threads from writing to their guards.

A rank that is ended this way is a dead rank; the other ranks notice it as they would any other.
"""
import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

BEAT = 5.0        # seconds between two signs of life
MISSED_BEATS = 8  # in a row: then a rank is silent
STOPPED = "its process was stopped, or a thread keeps the interpreter's lock"
WRITING, WRITTEN = "writing a checkpoint", "written"
guards: list[subprocess.Popen] = []  # the one beside this rank, if there is one
pipe = threading.Lock()  # to the guard


def start(name: str, names: list[str], ending: threading.Event, node: int = 0, store=None) -> None:
    """
    Begin to show that this rank is alive, until `ending` is set. name: of this rank; names: of the hosts. store: on
    the first rank of each of several hosts, a connection that nothing else uses.
    """
    command = [sys.executable, "-I", __file__, name, str(BEAT), str(MISSED_BEATS)]
    # In a session of its own, because a signal to the ranks must not end it.
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    os.set_blocking(guard.stdin.fileno(), False)
    guards[:] = [guard]
    if store is not None:
        store.set(f"beats of host {node}", "0")
    work = threading.Thread(target=beat, args=(guard, names, ending, node, store), daemon=True, name="heartbeat")
    work.start()
    atexit.register(finish, work, ending)


def finish(work: threading.Thread, ending: threading.Event) -> None:
    """Before the interpreter ends: a thread that is in the store's native code then would abort the process."""
    ending.set()
    work.join(10)


def tell(line: str) -> None:
    """To the guard, if it is there: why this rank may be silent now."""
    with pipe:
        for guard in guards:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):  # the guard was ended or stopped, not this rank
                os.write(guard.stdin.fileno(), f"{line}\n".encode())


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Around the writing of a checkpoint: the guard never ends a rank that does this, however slow its disk is."""
    tell(WRITING)
    try:
        yield
    finally:
        tell(WRITTEN)


def beat(guard: subprocess.Popen, names: list[str], ending: threading.Event, node: int, store) -> None:
    """The thread. Waiting for the store's answer is what the guard then reports as the reason."""
    own, keys = f"beats of host {node}", [f"beats of host {other}" for other in range(len(names))]
    number, seen, missing = 0, [b""] * len(names), [0] * len(names)
    try:
        while not ending.is_set():
            tell(STOPPED)
            if not ending.wait(BEAT) and store is not None:
                tell(f"{names[0]} does not answer")
                number += 1
                store.set(own, str(number))
                beats = store.multi_get(keys if node == 0 else [own])
                missing = [count + 1 if now == before else 0 for count, now, before in zip(missing, beats, seen)]
                seen = beats
                if max(missing) >= MISSED_BEATS:
                    end(f"{names[missing.index(max(missing))]}: silent for {BEAT * MISSED_BEATS:.0f} s, cut off or stopped",
                        ending)
    except Exception as error:  # of the store
        ending.wait(4 * BEAT)  # the training thread may have noticed, too, and has more to do than this one
        end(f"heartbeat: {error}", ending)
    finally:
        with pipe:
            guards.clear()
            guard.stdin.close()  # so that it leaves: what a rank does last, such as a save, may take long
        guard.wait()


def end(why: str, ending: threading.Event) -> None:
    if not ending.is_set():
        os.write(2, f"{why}; this rank ends, too\n".encode())
        os._exit(1)


def guard(name: str, beat: float, missed_beats: int) -> None:
    """
    The process beside a rank. It counts beats instead of comparing clocks: after a pause of the whole machine nobody
    is silent. SIGABRT first: a rank that runs then shows where its threads are (faulthandler needs no lock).
    """
    rank, silent, why, is_writing = os.getppid(), 0, STOPPED, False
    while os.getppid() == rank:
        if select.select([0], [], [], beat)[0]:
            heard = os.read(0, 65536)
            if not heard:
                return  # the rank has ended
            silent = 0
            for line in heard.decode().splitlines():
                if line in (WRITING, WRITTEN):
                    is_writing = line == WRITING
                else:
                    why = line
        elif not is_writing:
            silent += 1
        if silent >= missed_beats:
            print(f"{name}: silent for {beat * missed_beats:.0f} s: {why}; it is ended now", file=sys.stderr, flush=True)
            for number in (signal.SIGABRT, signal.SIGKILL):
                os.kill(rank, number)
                if select.select([0], [], [], 2)[0] or os.getppid() != rank:  # the pipe is closed; a child may keep it
                    return
            return


if __name__ == "__main__":
    guard(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
