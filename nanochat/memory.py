"""
What a training run keeps and sends, in bytes per rank: the formulas. docs/zero.md shows them beside measurements.

Rajbhandari et al. 2020, arXiv:1910.02054, sections 5 and 7; here with gradients accumulated in float32 and with Muon, which has one
moment where AdamW has two. `ranks` share one copy of the sharded states (one shard group, no replicas).
"""
from typing import NamedTuple

import torch

FLOAT32 = 4  # bytes: masters, moments and accumulated gradients, whatever the compute dtype


class StateBytes(NamedTuple):
    """What a rank keeps between two micro-steps. A master that is the parameter's own memory counts as parameter."""

    parameters: float
    gradients: float
    optimizer: float  # masters and moments


def state_bytes(stage: int, ranks: int, dtype: torch.dtype, adamw: int, muon: int) -> StateBytes:
    """
    For so many parameters in AdamW's and in Muon's care. Per parameter of AdamW, in bfloat16 and in float32:

        stage 0    18           16
        stage 1    6 + 12/N     8 + 8/N
        stage 2    2 + 16/N     4 + 12/N
        stage 3    16/N         16/N

    Muon's are 4 less in what optimizer states share: 14, 6 + 8/N, 2 + 12/N, 12/N; 12, 8 + 4/N, 4 + 8/N, 12/N.
    """
    total, share = adamw + muon, 1 if stage == 0 else 1 / ranks
    parameters = FLOAT32 * share if stage == 3 else dtype.itemsize  # fully_shard keeps rows of float32: the masters
    gradients = FLOAT32 * share if stage >= 2 else FLOAT32
    masters = FLOAT32 if stage < 3 and dtype != torch.float32 else 0
    return StateBytes(parameters * total, gradients * total, (masters * total + FLOAT32 * (2 * adamw + muon)) * share)


def sent_bytes(
    stage: int, ranks: int, micro_steps: int, dtype: torch.dtype, reduce_dtype: torch.dtype, total: int, muon: int, head: int
) -> float:
    """
    What a rank sends in one optimizer step, on average over ranks. total: parameters of the model; muon: those in its
    care; head: those of the last unit, which stage 3 keeps whole from its forward to its backward pass.

    In elements, times (N − 1)/N, with A micro-steps: stages 0 and 1 send 2Ψ, stage 2 (A + 1)Ψ, stage 3 A(3Ψ − Ψ_head),
    and stages 1 to 3 about 2Ψ_muon/N more, for matrices on their way to the rank that orthogonalises them, and back.
    """
    gradients, gathered = total * reduce_dtype.itemsize, total * dtype.itemsize
    match stage:
        case 0:
            sent = 2 * gradients
        case 1:
            sent = gradients + gathered
        case 2:
            sent = micro_steps * gradients + gathered
        case 3:
            sent = micro_steps * (gradients + 2 * gathered - head * dtype.itemsize)
    if stage > 0:
        sent += 2 * muon / ranks * dtype.itemsize
    return sent * (ranks - 1) / ranks
