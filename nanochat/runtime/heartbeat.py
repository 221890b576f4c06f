"""
Ends ranks that fall silent without dying: a stopped process, a thread that keeps the interpreter's lock, a host that is
cut off. (A rank that dies is noticed by torchrun on its host, and by the lost connection elsewhere.)

    every rank              a thread writes to a small process beside it, the guard, every BEAT seconds; the guard ends
                            a rank after MISSED_BEATS beats without a line
    first rank of a host    its thread also counts in the store of all ranks. Rank 0's thread compares the counts; it
                            ends rank 0 if a host has not counted for that long. A store that does not answer keeps the
                            other threads from writing to their guards.

The other ranks notice a rank ended this way like any dead rank.
"""
import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading

BEAT = 5.0        # seconds between two signs of life
MISSED_BEATS = 8  # in a row: then a rank is silent
STOPPED = "its process was stopped, or a thread keeps the interpreter's lock"


def start(name: str, hosts: list[str], ending: threading.Event, node: int = 0, store=None) -> None:
    """
    Begin to show that this rank is alive, until `ending` is set. name: of this rank; hosts: their names. store: on
    the first rank of each of several hosts, a connection that nothing else uses.
    """
    command = [sys.executable, "-I", __file__, name, str(BEAT), str(MISSED_BEATS)]
    # In a session of its own, because a signal to the ranks must not end it.
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    os.set_blocking(guard.stdin.fileno(), False)
    if store is not None:
        store.set(f"beats of host {node}", "0")
    thread = threading.Thread(target=beat, args=(guard, hosts, ending, node, store), daemon=True, name="heartbeat")
    thread.start()
    atexit.register(finish, thread, ending)


def finish(thread: threading.Thread, ending: threading.Event) -> None:
    """Stop the thread before the interpreter ends: if then in the store's native code, it would abort the process."""
    ending.set()
    thread.join(10)


def tell(guard: subprocess.Popen, reason: str) -> None:
    """A sign of life, and the likely reason if no other follows."""
    # The guard may have been ended or stopped; this rank goes on.
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
        os.write(guard.stdin.fileno(), f"{reason}\n".encode())


def beat(guard: subprocess.Popen, hosts: list[str], ending: threading.Event, node: int, store) -> None:
    """The thread. While it waits for the store's answer, the guard has that as the reason for silence."""
    own = f"beats of host {node}"
    keys = [f"beats of host {other}" for other in range(len(hosts))] if node == 0 else [own]
    number, seen, missing = 0, [b""] * len(keys), [0] * len(keys)
    try:
        while not ending.is_set():
            tell(guard, STOPPED)
            if ending.wait(BEAT) or store is None:
                continue
            tell(guard, f"{hosts[0]} does not answer")
            number += 1
            store.set(own, str(number))
            for host, count in enumerate(store.multi_get(keys)):
                missing[host] = missing[host] + 1 if count == seen[host] else 0
                seen[host] = count
                if missing[host] >= MISSED_BEATS:
                    end(f"{hosts[host]}: silent for {BEAT * MISSED_BEATS:.0f} s, cut off or stopped", ending)
    except Exception as error:
        # The store failed. The training thread may have noticed, too, and its error says more.
        ending.wait(4 * BEAT)
        end(f"heartbeat: {error}", ending)
    finally:
        # The guard leaves now, because the rank's last act, such as a save, may take long.
        guard.stdin.close()
        guard.wait()


def end(why: str, ending: threading.Event) -> None:
    if not ending.is_set():
        os.write(2, f"{why}; this rank ends, too\n".encode())
        os._exit(1)


def guard(name: str, beat: float, missed_beats: int) -> None:
    """
    The process beside a rank. It counts beats instead of comparing clocks: after a pause of the whole machine no rank
    is silent. SIGABRT first: a rank that runs then shows where its threads are (faulthandler needs no lock).
    """
    rank, silent, why = os.getppid(), 0, STOPPED
    while os.getppid() == rank and silent < missed_beats:
        silent += 1
        if select.select([0], [], [], beat)[0]:
            lines = os.read(0, 65536).decode().splitlines()
            if not lines:
                return  # the rank has ended
            silent, why = 0, lines[-1]
    if silent == missed_beats:
        print(f"{name}: silent for {beat * missed_beats:.0f} s: {why}; it is ended now", file=sys.stderr, flush=True)
        os.kill(rank, signal.SIGABRT)
        # The pipe is closed when the rank ends; a child of it may keep it open.
        if not select.select([0], [], [], 2)[0] and os.getppid() == rank:
            os.kill(rank, signal.SIGKILL)


if __name__ == "__main__":
    guard(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
