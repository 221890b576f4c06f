"""
When the forward and backward passes of a pipeline run: 1F1B as torch.distributed.pipelining runs it. docs/pipeline.md.
"""
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple


class Pass(NamedTuple):
    """One micro-batch goes through one pipeline stage, from `start` to `end` seconds, sending included."""

    pipeline_stage: int
    micro_batch: int
    backward: bool
    start: float
    end: float


def order(stage: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    """(backward?, micro-batch) as a stage runs them: `stages - stage` forward passes, then one of each in turn."""
    ahead = min(stages - stage, micro_batches)
    turns = [(False, i) for i in range(ahead)]
    for i in range(micro_batches):
        turns.append((True, i))
        if i + ahead < micro_batches:
            turns.append((False, i + ahead))
    return turns


@cache
def passes(
    forward: Sequence[float], backward: Sequence[float], sending: Sequence[float], micro_batches: int
) -> list[Pass]:
    """
    All passes of an optimizer step. Arguments (tuples): seconds of a micro-batch's passes in each stage, and from each
    stage to the next, one way. A stage waits until its message has arrived: torch sends and receives in one batch,
    between two passes.
    """
    stages = len(forward)
    to_next = (*sending, 0.0)
    to_previous = (0.0, *sending)
    todo = [order(stage, stages, micro_batches) for stage in range(stages)]
    ends: dict[tuple[int, bool, int], float] = {}
    found: list[Pass] = []
    position = [0] * stages
    free = [0.0] * stages
    while len(found) < 2 * stages * micro_batches:
        for stage in range(stages):
            while position[stage] < len(todo[stage]):
                is_backward, i = todo[stage][position[stage]]
                sender = stage + 1 if is_backward else stage - 1
                ready = 0.0  # the loss and the tokens are there
                if 0 <= sender < stages:
                    ready = ends.get((sender, is_backward, i))
                if ready is None:
                    break
                if is_backward:
                    lasting = backward[stage] + to_previous[stage]
                else:
                    lasting = forward[stage] + to_next[stage]
                start = max(free[stage], ready)
                free[stage] = ends[stage, is_backward, i] = start + lasting
                found.append(Pass(stage, i, is_backward, start, free[stage]))
                position[stage] += 1
    return found
