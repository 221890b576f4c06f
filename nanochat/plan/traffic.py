"""
The collectives of an optimizer step on each stage of ZeRO, and the bytes that ranks send. docs/zero.md compares them
with the collectives that pass PyTorch's dispatcher, docs/many_hosts.md with a network interface's traffic.
"""
from typing import Literal, NamedTuple

import torch

from nanochat.plan.memory import FLOAT32

Kind = Literal["reduce-scatter", "all-gather", "all-reduce", "all-to-all"]


class Collective(NamedTuple):
    """A tensor of `bytes` bytes on each rank of a group, `times` times in an optimizer step."""

    kind: Kind
    bytes: float
    ranks: int          # in the group
    stride: int = 1     # between neighbours of the group: 1 for ranks that share a copy, more for replicas of a shard
    times: int = 1
    behind: Literal["forward", "backward", ""] = ""  # the pass that runs meanwhile; "": none

    @property
    def passes(self) -> int:
        """An all-reduce is a reduce-scatter and an all-gather; matrices travel to their owners and back."""
        return 2 if self.kind in ("all-reduce", "all-to-all") else 1


def collectives(
    zero_stage: int, shards: int, replicas: int, micro_steps: int, dtype: torch.dtype, total: int, muon: int, head: int
) -> list[Collective]:
    """
    The collectives of a step on shards · replicas ranks; on stage 0 shards is 1. total: parameters of the model; muon:
    Muon's; head: the last unit's, which stage 3 keeps whole from its forward to its backward pass.
    """
    gradients = total * FLOAT32
    gathered = total * dtype.itemsize
    if zero_stage == 0:
        return [Collective("all-reduce", gradients, replicas, behind="backward")]
    sent = []
    if shards > 1:
        # From stage 2 on no whole gradient is kept from one micro-step to the next.
        sums = micro_steps if zero_stage >= 2 else 1
        sent.append(Collective("reduce-scatter", gradients, shards, times=sums, behind="backward"))
        if zero_stage < 3:
            sent.append(Collective("all-gather", gathered, shards, behind="forward"))
        else:
            again = gathered - head * dtype.itemsize
            sent.append(Collective("all-gather", gathered, shards, times=micro_steps, behind="forward"))
            sent.append(Collective("all-gather", again, shards, times=micro_steps, behind="backward"))
        sent.append(Collective("all-to-all", muon * dtype.itemsize / shards, shards))
    if replicas > 1:
        sent.append(Collective("all-reduce", gradients / shards, replicas, shards, behind="backward"))
    return sent
