"""Stop requests: how a signal to one rank ends all of them in the same place."""
import os
import signal
from collections.abc import Iterable, Iterator
from typing import NoReturn, TypeVar

import torch

from nanochat.runtime.collectives import all_reduce_sum, collective_device
from nanochat.runtime.console import discard_output, is_rank0, print0
from nanochat.runtime.distributed import compute_cleanup

T = TypeVar("T")


class StopRequest:
    """
    Turns SIGTERM, SIGINT and SIGHUP (the terminal is gone) into `asked`, which the loop shares with all ranks. An
    ignored SIGHUP (nohup) stays ignored. Without torchrun, which repeats signals, a second Ctrl-C interrupts at once.

    A rank that waits in a collective on a GPU for a dead rank never runs Python's signal handler: torchrun kills it
    after its TORCH_ELASTIC_SHUTDOWN_TIMEOUT (30 s; 300 s in the launchers here, so that a save can end).
    """

    current: "StopRequest | None" = None  # of a training script

    def __init__(self):
        self.asked = False
        self.exit_code = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.ask)
        StopRequest.current = self

    def ask(self, number: int, _frame: object) -> None:
        """The signal handler."""
        again = self.asked
        # Before anything is printed, because the next signal may come meanwhile.
        self.asked = True
        hint = ""
        # torchrun would restart a run with a nonzero exit code.
        if "RANK" not in os.environ:
            self.exit_code = self.exit_code or 128 + number
            if number == signal.SIGINT:
                hint = "; Ctrl-C again ends at once"
                if again:
                    raise KeyboardInterrupt
        if not again and is_rank0():
            name = signal.Signals(number).name
            # os.write, because print is not safe in a signal handler.
            try:
                os.write(1, f"{name}: finishing this step, or batch of an evaluation, then saving{hint}\n".encode())
            except OSError:
                discard_output()

    def end(self, step: int, resume: str) -> NoReturn:
        """
        End a run that was stopped, once it is saved. Its exit code is the usual one for the signal (130 for Ctrl-C,
        143 for SIGTERM), so that a script does not run its next command; under torchrun 0. resume: the run's
        setting; commands of speedrun.sh have it. COLLECTIVE.
        """
        go_on = "the same command, run again," if resume else "--resume=auto"
        print0(f"stopped after step {step}; {go_on} continues" if step else "stopped before the first step")
        compute_cleanup(self.asked)
        raise SystemExit(self.exit_code)


class Stopped(Exception):
    """Raised on all ranks in the same place, if some rank was asked to stop. See `Metrics.stoppable`."""


def until_stopped(items: Iterable[T], every: int = 1) -> Iterator[T]:
    """
    The items of each rank; in a training script, Stopped is raised on all ranks once some rank is asked to stop.
    COLLECTIVE at every `every`-th item. Ranks may have different numbers of items: ranks that have finished go on
    voting until all have.
    """
    for number, item in enumerate(items):
        if number % every == 0:
            vote(finished=False)
        yield item
    while not vote(finished=True):
        pass


def vote(finished: bool) -> bool:
    """Whether all ranks have finished. Stopped if any rank of a training script was asked to stop. COLLECTIVE."""
    if StopRequest.current is None:
        return True
    votes = torch.tensor([StopRequest.current.asked, not finished], dtype=torch.float32, device=collective_device())
    all_reduce_sum(votes)
    asked, unfinished = votes.tolist()
    if asked:
        raise Stopped
    return unfinished == 0
