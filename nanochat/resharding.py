"""
Ranges of flattened tensors, from the files of whatever ranks saved them to the memory of whatever ranks need them: how a
checkpoint of N ranks is loaded on M, and that of one stage of ZeRO on another.
"""
import json
from collections.abc import Iterable
from contextlib import ExitStack
from math import ceil, prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from nanochat.checkpoint import MODEL_FILE, first_problem, read_meta, restore_random_states
from nanochat.errors import UserError
from nanochat.partition import Shard
from nanochat.zero import Sharding

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}  # as safetensors calls them


class Kept(NamedTuple):
    """What this rank keeps of a tensor: elements [start, end) of it, flattened."""

    start: int
    end: int
    tensor: Tensor  # (end − start,)


class Stored(NamedTuple):
    """What an open file holds of a tensor: elements [start, end) of it, flattened."""

    start: int
    end: int
    file: safe_open


def kept_state(sharding: Sharding, optimizers) -> dict[str, Kept]:
    """
    What this rank keeps beyond the weights, by name: `master.<parameter>`, `adamw.exp_avg.<parameter>`, … Masters that
    are the weights themselves (float32) are in the model's file already.
    """
    slices = {s.name: s for s in sharding.shards}
    tensors = {f"{o.kind}.{key}": by_name for o in optimizers for key, by_name in o.state.items()}
    if sharding.masters_apart:
        tensors["master"] = {name: s.master for name, s in slices.items()}
    return {
        f"{key}.{name}": Kept(slices[name].start, slices[name].end, tensor)
        for key, by_name in tensors.items() for name, tensor in by_name.items()
    }


def counters(optimizers) -> dict[str, Kept]:
    """What every rank has alike, such as `adamw.steps`."""
    return {f"{o.kind}.{name}": Kept(0, t.numel(), t.view(-1)) for o in optimizers for name, t in o.counters.items()}


@torch.no_grad()
def load_training_state(checkpoint: Path, sharding: Sharding, optimizers) -> dict:
    """
    Copy weights, masters and moments of a verified checkpoint into model and optimizers, each rank what it keeps;
    returns the checkpoint's meta. UserError, before anything is changed, when it does not fit the run. COLLECTIVE.
    """
    meta = read_meta(checkpoint)
    kept = kept_state(sharding, optimizers) | counters(optimizers)
    with ExitStack() as stack:
        weights = stack.enter_context(safe_open(checkpoint / MODEL_FILE, framework="pt"))
        paths = sorted(checkpoint.glob("optimizer_rank_*.safetensors"))
        stored = index_of(stack.enter_context(safe_open(path, framework="pt")) for path in paths)
        if problem := first_problem(weights_problem(weights, sharding) or state_problem(stored, kept, optimizers)):
            raise UserError(f"{checkpoint} does not fit this run: {problem}")
        for name in weights.keys() if sharding.stage < 3 else sharding.frozen:
            sharding.load_whole(name, weights.get_tensor(name))
        if sharding.stage == 3 and not sharding.masters_apart:
            for s in sharding.shards:
                s.master.copy_(read_range(weights, s))
        for name, (start, end, tensor) in kept.items():
            for low, high, piece in overlaps(stored.get(name, []), start, end):
                tensor[low - start : high - start].copy_(piece.file.get_slice(name)[low - piece.start : high - piece.start])
    restore_random_states(meta["rng"])
    return meta


def index_of(files: Iterable[safe_open]) -> dict[str, list[Stored]]:
    """Where the elements of each tensor are, in rising order."""
    index: dict[str, list[Stored]] = {}
    for file in files:
        for name, (start, end) in json.loads(file.metadata()["pieces"]).items():
            index.setdefault(name, []).append(Stored(start, end, file))
    return {name: sorted(pieces, key=lambda piece: piece[:2]) for name, pieces in index.items()}


def overlaps(pieces: list[Stored], start: int, end: int) -> list[tuple[int, int, Stored]]:
    """(low, high, piece) for each piece that holds some of [start, end): [low, high) is what it holds of it."""
    found = [(max(piece.start, start), min(piece.end, end), piece) for piece in pieces]
    return [(low, high, piece) for low, high, piece in found if low < high]


def read_range(weights: safe_open, s: Shard) -> Tensor:
    """The elements of a slice from a file of whole tensors, (end − start,); only the rows that hold them are read."""
    row = prod(s.shape[1:])
    first, last = s.start // row, ceil(s.end / row)
    return weights.get_slice(s.name)[first:last].flatten()[s.start - first * row : s.end - first * row]


def weights_problem(weights: safe_open, sharding: Sharding) -> str | None:
    """The first name, shape or dtype in which the model's file and this rank's slices differ; all ranks together have all."""
    there, here = set(weights.keys()), {name for name, _ in sharding.model.named_parameters()}
    for name in sorted(there ^ here):
        return f"{name} is only in {'it' if name in there else 'the run'} (other depth?)"
    shapes = {s.name: s.shape for s in sharding.shards} | {name: tuple(p.shape) for name, p in sharding.frozen.items()}
    for name, here in shapes.items():
        saved = weights.get_slice(name)
        shape, dtype = tuple(saved.get_shape()), DTYPES[saved.get_dtype()]
        if (shape, dtype) != (here, sharding.dtype):
            return f"{name} is {shape} {dtype} there, {here} {sharding.dtype} here (other depth or dtype?)"
    return None


def state_problem(stored: dict[str, list[Stored]], kept: dict[str, Kept], optimizers) -> str | None:
    """The first tensor that this run does not know, or that this rank does not find there, every element exactly once."""
    # Other ranks keep other parameters, of the same kinds of state.
    kinds = tuple(f"{o.kind}.{key}." for o in optimizers for key in o.state) + ("master.",)
    for name in sorted(stored.keys() - kept.keys()):
        if not name.startswith(kinds):
            return f"{name} is only in it (other optimizers?)"
    for name, (start, end, tensor) in kept.items():
        pieces = overlaps(stored.get(name, []), start, end)
        edges = [start, *(edge for low, high, _ in pieces for edge in (low, high)), end]
        if edges[0::2] != edges[1::2]:  # each piece begins where the one before it ends
            return f"{name} is {'not whole in its optimizer files' if pieces else 'only in the run (other optimizers?)'}"
        for _, _, piece in pieces:
            if (dtype := DTYPES[piece.file.get_slice(name).get_dtype()]) != tensor.dtype:
                return f"{name} is {dtype} there, {tensor.dtype} here"
    return None
