"""
Copies pieces of flattened tensors from the files of the ranks that saved them to the memory of the ranks that need
them. So a checkpoint of N ranks is loaded on M, and a checkpoint of one ZeRO stage on another.
"""
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from nanochat.optim.sharding import Sharding
from nanochat.runtime.collectives import first_problem
from nanochat.runtime.errors import UserError
from nanochat.training.records import MODEL_FILE


class Piece(NamedTuple):
    """Elements [start, end) of a flattened tensor: in memory, (end − start,), or in an open file under its name."""

    start: int
    end: int
    source: Any  # Tensor | safe_open: of the latter only get_slice is used


def stored_weights(checkpoint: Path) -> Callable[[str], Tensor]:
    """
    For Sharding: the whole weights of a parameter by its name, from a verified checkpoint, in the dtype they were saved
    in. They are read from the mapped file when they are used.
    """
    return safe_open(checkpoint / MODEL_FILE, framework="pt").get_tensor


def kept_state(sharding: Sharding, optimizers) -> dict[str, Piece]:
    """
    The state that this rank keeps beyond the weights, by name: `master.<parameter>`, `adamw.exp_avg.<parameter>`, …
    Masters that are the weights themselves (float32) are in the model's file already. An optimizer's `state` is cut
    like the parameters; its `owned` is whole, on one rank of the shard group; its `counters` are alike on every rank.
    """
    shards = {s.name: s for s in sharding.shards}
    kept: dict[str, Piece] = {}
    if sharding.separate_masters:
        for name, s in shards.items():
            kept[f"master.{name}"] = Piece(s.start, s.end, s.master)
    for optimizer in optimizers:
        for key, tensors in (optimizer.state | optimizer.owned).items():
            for name, tensor in tensors.items():
                start = shards[name].start if key in optimizer.state else 0
                kept[f"{optimizer.kind}.{key}.{name}"] = Piece(start, start + tensor.numel(), tensor)
        for name, tensor in optimizer.counters.items():
            kept[f"{optimizer.kind}.{name}"] = Piece(0, 1, tensor.view(-1))
    return kept


@torch.no_grad()
def load_training_state(checkpoint: Path, sharding: Sharding, optimizers) -> None:
    """
    Copy weights, masters and moments of a verified checkpoint of the same model into model and optimizers, each rank
    its own pieces. UserError if the checkpoint lacks some: then the model is of no use. COLLECTIVE.
    """
    # safe_open maps a file into memory: only the pages of this rank's pieces are read.
    weights = safe_open(checkpoint / MODEL_FILE, framework="pt")
    # An empty slice: nothing is read.
    stored = weights.get_slice(next(iter(sharding.stage_and_shape)))[:0].dtype
    if stored != sharding.dtype:
        raise UserError(f"{checkpoint} does not fit this run: its weights are {stored}, this run's {sharding.dtype}; "
                        "say so with --dtype")
    # A rank has all weights; on stage 3 only its shards, which are the masters.
    if sharding.zero_stage < 3:
        sharding.wait_for_params()
        for name, p in sharding.model.named_parameters():
            # In float32 that loads the master, too.
            p.copy_(weights.get_tensor(name))
    elif not sharding.separate_masters:
        for s in sharding.shards:
            s.master.copy_(weights.get_tensor(s.name).flatten()[s.start : s.end])

    saved = stored_pieces(checkpoint)
    problem = None
    for name, (start, end, tensor) in kept_state(sharding, optimizers).items():
        missing = end - start
        if name not in saved:
            name = name.replace("ema_nesterov.", "look_ahead.", 1)  # its name in older checkpoints
        # One of our pieces may lie in the files of several ranks.
        for piece in saved.get(name, []):
            low, high = max(piece.start, start), min(piece.end, end)
            if low < high:
                tensor[low - start : high - start].copy_(
                    piece.source.get_slice(name)[low - piece.start : high - piece.start])
                missing -= high - low
        if missing > 0:
            problem = f"{name} is not whole in its optimizer files (other optimizers?)"
    if problem := first_problem(problem):
        raise UserError(f"{checkpoint} does not fit this run: {problem}")


def stored_pieces(checkpoint: Path) -> dict[str, list[Piece]]:
    """
    The pieces of each tensor in the optimizers' files. Only counters overlap: in one replica each element has one
    keeper.
    """
    pieces: dict[str, list[Piece]] = {}
    for path in sorted(checkpoint.glob("optimizer_rank_*.safetensors")):
        file = safe_open(path, framework="pt")
        for name, (start, end) in json.loads(file.metadata()["pieces"]).items():
            pieces.setdefault(name, []).append(Piece(start, end, file))
    return pieces
