"""
When the forward and backward passes of a pipeline run: 1F1B as torch.distributed.pipelining runs it. docs/pipeline.md.
"""
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple


class Pass(NamedTuple):
    """Of one micro-batch through one pipeline stage, from `start` to `end` seconds, which includes what it sends."""

    stage: int
    micro_batch: int
    backward: bool
    start: float
    end: float


def order(stage: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    """(backward?, micro-batch) as a stage runs them: stages − stage forward passes, then one of each in turn."""
    ahead = min(stages - stage, micro_batches)
    turns = [(backward, i + (0 if backward else ahead)) for i in range(micro_batches) for backward in (True, False)]
    return [(False, i) for i in range(ahead)] + [turn for turn in turns if turn[1] < micro_batches]


@cache
def passes(
    forward: Sequence[float], backward: Sequence[float], sending: Sequence[float], micro_batches: int
) -> list[Pass]:
    """
    Of so many micro-batches in an optimizer step. Arguments: seconds of a micro-batch's passes in each stage, and from
    each stage to the next, one way (tuples). A stage waits until what it sent has arrived: torch sends and receives in
    one batch, between two passes.
    """
    stages = len(forward)
    after, before = (*sending, 0.0), (0.0, *sending)
    lasting = [(forward[s] + after[s], backward[s] + before[s]) for s in range(stages)]
    todo = [order(s, stages, micro_batches) for s in range(stages)]
    ends: dict[tuple[int, bool, int], float] = {}
    found: list[Pass] = []
    at, free = [0] * stages, [0.0] * stages
    while len(found) < 2 * stages * micro_batches:
        for s in range(stages):
            while at[s] < len(todo[s]):
                back, i = todo[s][at[s]]
                giver = s + 1 if back else s - 1  # the loss and the tokens are there
                ready = ends.get((giver, back, i)) if 0 <= giver < stages else 0.0
                if ready is None:
                    break
                start = max(free[s], ready)
                free[s] = ends[s, back, i] = start + lasting[s][back]
                found.append(Pass(s, i, back, start, free[s]))
                at[s] += 1
    return found
