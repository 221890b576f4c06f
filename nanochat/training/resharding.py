"""
Ranges of flattened tensors, from the files of the ranks that saved them to the memory of the ranks that need them: how
a checkpoint of N ranks is loaded on M, and that of one stage of ZeRO on another.
"""
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from nanochat.optim.zero import Sharding
from nanochat.runtime.errors import UserError
from nanochat.training.checkpoint import MODEL_FILE, first_problem


class Part(NamedTuple):
    """Elements [start, end) of a flattened tensor: in memory, (end − start,), or in an open file under its name."""

    start: int
    end: int
    source: Tensor | safe_open


def kept_state(sharding: Sharding, optimizers) -> dict[str, Part]:
    """
    What this rank keeps beyond the weights, by name: `master.<parameter>`, `adamw.exp_avg.<parameter>`, … Masters that
    are the weights themselves (float32) are in the model's file already. What an optimizer has in `state` is cut like
    the parameters; what it has in `owned` is whole, on one rank of the shard group.
    """
    shards = {s.name: s for s in sharding.shards}
    tensors = {f"{o.kind}.{key}": by_name for o in optimizers for key, by_name in o.state.items()}
    if sharding.separate_masters:
        tensors["master"] = {name: s.master for name, s in shards.items()}
    return {
        f"{key}.{name}": Part(shards[name].start, shards[name].end, tensor)
        for key, by_name in tensors.items() for name, tensor in by_name.items()
    } | {
        f"{o.kind}.{key}.{name}": Part(0, tensor.numel(), tensor)
        for o in optimizers for key, by_name in o.owned.items() for name, tensor in by_name.items()
    }


def counters(optimizers) -> dict[str, Part]:
    """What every rank has alike, such as `adamw.steps`."""
    return {f"{o.kind}.{name}": Part(0, t.numel(), t.view(-1)) for o in optimizers for name, t in o.counters.items()}


@torch.no_grad()
def load_training_state(checkpoint: Path, sharding: Sharding, optimizers) -> None:
    """
    Copy weights, masters and moments of a verified checkpoint into model and optimizers, each rank what it keeps.
    UserError, before anything is changed, when it does not fit the run. COLLECTIVE.
    """
    kept = kept_state(sharding, optimizers) | counters(optimizers)
    paths = checkpoint / MODEL_FILE, *sorted(checkpoint.glob("optimizer_rank_*.safetensors"))
    with ExitStack() as stack:
        weights, *files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        saved = index_of(files)
        if problem := first_problem(next(mismatches(weights, saved, sharding, kept, optimizers), None)):
            raise UserError(f"{checkpoint} does not fit this run: {problem}")
        if sharding.zero_stage < 3:
            for name, _ in sharding.model.named_parameters():
                sharding.load_whole(name, weights.get_tensor(name))
        elif not sharding.separate_masters:
            for s in sharding.shards:
                s.master.copy_(weights.get_tensor(s.name).flatten()[s.start : s.end])
        for name, (start, end, tensor) in kept.items():
            for low, high, part in overlaps(saved.get(name, []), start, end):
                stored = part.source.get_slice(name)[low - part.start : high - part.start]
                tensor[low - start : high - start].copy_(stored)


def index_of(files: Iterable[safe_open]) -> dict[str, list[Part]]:
    """Where the elements of each tensor are, in rising order."""
    index: dict[str, list[Part]] = {}
    for file in files:
        for name, (start, end) in json.loads(file.metadata()["pieces"]).items():
            index.setdefault(name, []).append(Part(start, end, file))
    return {name: sorted(parts, key=lambda part: part[:2]) for name, parts in index.items()}


def overlaps(parts: list[Part], start: int, end: int) -> list[tuple[int, int, Part]]:
    """(low, high, part) for each part that holds some of [start, end): [low, high) is what it holds of it."""
    found = [(max(part.start, start), min(part.end, end), part) for part in parts]
    return [(low, high, part) for low, high, part in found if low < high]


def mismatches(
    weights: safe_open, saved: dict[str, list[Part]], sharding: Sharding, kept: dict[str, Part], optimizers,
) -> Iterator[str]:
    """Every way in which a checkpoint does not fit what this rank keeps; all ranks together keep everything."""
    here = {name: f"{shape} {sharding.dtype}" for name, (_, shape) in sharding.homes.items()}
    slices = {name: weights.get_slice(name) for name in weights.keys()}
    there = {name: f"{tuple(s.get_shape())} {s[:0].dtype}" for name, s in slices.items()}
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            found = f"{name} is {there.get(name, 'not')} there, but {here.get(name, 'not')} here"
            yield f"{found} (other depth, arch or dtype?)"
    kinds = tuple(f"{o.kind}.{key}." for o in optimizers for key in (*o.state, *o.owned)) + ("master.",)
    for name in sorted(saved.keys() - kept.keys()):
        if not name.startswith(kinds):  # else another rank keeps it
            yield f"{name} is not here (other optimizers?)"
    for name, (start, end, tensor) in kept.items():
        parts = overlaps(saved.get(name, []), start, end)
        edges = [start, *(edge for low, high, _ in parts for edge in (low, high)), end]
        if edges[0::2] != edges[1::2]:  # each element once: a part begins where the one before it ends
            yield f"{name} is not whole in its optimizer files"
        for _, _, part in parts:
            if (dtype := part.source.get_slice(name)[:0].dtype) != tensor.dtype:
                yield f"{name} is {dtype} there, but {tensor.dtype} here"
