"""
Copies pieces of flattened tensors from the files of the ranks that saved them to the memory of the ranks that need
them. So a checkpoint of N ranks is loaded on M, and a checkpoint of one ZeRO stage on another.
"""
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
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
        for key, tensors in optimizer.state.items():
            for name, tensor in tensors.items():
                kept[f"{optimizer.kind}.{key}.{name}"] = Piece(shards[name].start, shards[name].end, tensor)
        for key, tensors in optimizer.owned.items():
            for name, tensor in tensors.items():
                kept[f"{optimizer.kind}.{key}.{name}"] = Piece(0, tensor.numel(), tensor)
        for name, tensor in optimizer.counters.items():
            kept[f"{optimizer.kind}.{name}"] = Piece(0, 1, tensor.view(-1))
    return kept


@torch.no_grad()
def load_training_state(checkpoint: Path, sharding: Sharding, optimizers) -> None:
    """
    Copy weights, masters and moments of a verified checkpoint into model and optimizers, each rank its own pieces.
    UserError, before anything is changed, if the checkpoint does not fit the run. COLLECTIVE.
    """
    kept = kept_state(sharding, optimizers)
    with ExitStack() as stack:
        # safe_open maps a file into memory: only the pages of this rank's pieces are read.
        weights = stack.enter_context(safe_open(checkpoint / MODEL_FILE, framework="pt"))
        paths = sorted(checkpoint.glob("optimizer_rank_*.safetensors"))
        saved = index_of([stack.enter_context(safe_open(path, framework="pt")) for path in paths])
        if problem := first_problem(next(mismatches(weights, saved, sharding, kept), None)):
            raise UserError(f"{checkpoint} does not fit this run: {problem}")
        # A rank has all weights; on stage 3 only its shards, which are the masters.
        if sharding.zero_stage < 3:
            sharding.wait_for_params()
            for name, p in sharding.model.named_parameters():
                # In float32 that loads the master, too.
                p.copy_(weights.get_tensor(name))
        elif not sharding.separate_masters:
            for s in sharding.shards:
                s.master.copy_(weights.get_tensor(s.name).flatten()[s.start : s.end])
        # One of our pieces may lie in the files of several ranks.
        for name, (start, end, tensor) in kept.items():
            for low, high, piece in overlaps(saved.get(name, []), start, end):
                stored = piece.source.get_slice(name)[low - piece.start : high - piece.start]
                tensor[low - start : high - start].copy_(stored)


def index_of(files: Iterable[safe_open]) -> dict[str, list[Piece]]:
    """The pieces of each tensor in the files. Only counters overlap: in one replica each element has one keeper."""
    index: dict[str, list[Piece]] = {}
    for file in files:
        for name, (start, end) in json.loads(file.metadata()["pieces"]).items():
            index.setdefault(name, []).append(Piece(start, end, file))
    return index


def overlaps(pieces: list[Piece], start: int, end: int) -> Iterator[tuple[int, int, Piece]]:
    """(low, high, piece) for each piece that overlaps [start, end), namely in [low, high)."""
    for piece in pieces:
        low, high = max(piece.start, start), min(piece.end, end)
        if low < high:
            yield low, high, piece


def mismatches(
    weights: safe_open, saved: dict[str, list[Piece]], sharding: Sharding, kept: dict[str, Piece],
) -> Iterator[str]:
    """Every way in which a checkpoint does not fit this rank's pieces; all ranks together keep everything."""
    # Weights: the same names, shapes and dtypes. The model's file has them whole.
    here = {name: f"{shape} {sharding.dtype}" for name, (_, shape) in sharding.stage_and_shape.items()}
    there = {}
    for name in weights.keys():
        stored = weights.get_slice(name)
        # The dtype of an empty slice: nothing is read.
        there[name] = f"{tuple(stored.get_shape())} {stored[:0].dtype}"
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            yield (f"{name} is {there.get(name, 'not')} there, but {here.get(name, 'not')} here "
                   "(other depth, arch or dtype?)")
    # Masters and moments, float32 in every run: all elements that this rank keeps must be in some file.
    for name, (start, end, _) in kept.items():
        covered = sum(high - low for low, high, _ in overlaps(saved.get(name, []), start, end))
        if covered < end - start:
            yield f"{name} is not whole in its optimizer files (other optimizers?)"
