"""
What a rank keeps and sends in a few steps of ZeRO, measured: memory is the storage of all live tensors, traffic the
bytes that collectives send. bench.zero makes tables of it.
"""
import gc
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.harness import random_tokens
from bench.machines import collectives
from nanochat.model.gpt_config import GPTConfig
from nanochat.plan.memory import counted, state_bytes
from nanochat.plan.step_trial import set_up_training, train_step, whole_rows
from nanochat.runtime.collectives import gather_objects, rank_and_size
from nanochat.training.resharding import kept_state

STAGES, MICRO_STEPS = (0, 1, 2, 3), (1, 4)
KEPT = ("parameters", "gradients", "optimizer")  # the fields of StateBytes


def storages(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    """{address: bytes} of the tensors' storages, each once; of sharded tensors only this rank's part."""
    found = {}
    for t in tensors:
        if t is not None:
            storage = (t.to_local() if isinstance(t, DTensor) else t).untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def sent_bytes(zero_stage: int, ranks: int, micro_steps: int, dtype: torch.dtype, *parameters: int) -> float:
    """
    Bytes that a rank sends in an optimizer step, on average over the ranks of one group. parameters: the model's,
    Muon's, the head's.

    In elements, times (N − 1)/N, with A micro-steps: stages 0 and 1 send 2Ψ, stage 2 (A + 1)Ψ, stage 3 A(3Ψ − Ψ_head),
    and stages 1 to 3 about 2Ψ_muon/N more, for matrices on their way to the rank that orthogonalizes them, and back.
    """
    shards = 1 if zero_stage == 0 else ranks
    sent = collectives(zero_stage, shards, ranks // shards, micro_steps, dtype, *parameters)
    return sum(c.bytes * c.times for c in sent)


def sent_in(name: str, args: tuple, rank: int, ranks: int) -> float:
    """Bytes that a rank sends in a collective, as in docs/data_parallel.md; args: PyTorch's arguments."""
    match name:
        case "allreduce_":  # (tensors, group, …)
            return 2 * (ranks - 1) / ranks * sum(tensor.nbytes for tensor in args[0])
        case "_allgather_base_":  # (output, input, group, …)
            return (ranks - 1) * args[1].nbytes
        case "_reduce_scatter_base_":  # (output, input, group, …)
            return (ranks - 1) * args[0].nbytes
        case "alltoall_base_":  # (output, input, group, output sizes, input sizes, …): all but the part for itself
            tensor, sizes = args[1], args[4]
            own = sizes[rank] * tensor.stride(0) * tensor.element_size() if sizes else tensor.nbytes / ranks
            return tensor.nbytes - own
        case "send":  # (tensors, group, …)
            return sum(tensor.nbytes for tensor in args[0])
        case "recv_" | "barrier":
            return 0.0
    raise NotImplementedError(f"bytes that a rank sends in {name}")


class Sent(TorchDispatchMode):
    """
    While active, counts the bytes that this rank sends in every collective, by the formulas of docs/data_parallel.md.
    All of PyTorch's collectives pass here, FSDP's too; those without a formula are refused.
    """

    def __init__(self):
        super().__init__()
        self.sent = 0.0  # bytes

    def __torch_dispatch__(self, func: Any, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.sent += sent_in(func._schema.name.removeprefix("c10d::"), args, *rank_and_size())
        return func(*args, **(kwargs or {}))


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """While active, notes what autograd keeps for the backward pass."""

    def __init__(self):
        super().__init__(self.note, lambda kept: kept)
        self.found = {}  # {address: bytes}

    def note(self, kept: Tensor) -> Tensor:
        self.found |= storages([kept])
        return kept

    def bytes(self, module: nn.Module) -> int:
        """All but the module's parameters."""
        return sum((self.found | dict.fromkeys(storages(module.parameters()), 0)).values())


class Watch(Sent):
    """Counts what a model that is trained on a stage of ZeRO sends and keeps."""

    def __init__(self, config: GPTConfig, stage: int, dtype: torch.dtype):
        super().__init__()
        self.model, self.sharding, self.optimizers = set_up_training(config, dtype, torch.device("cpu"), stage)
        # Stage 3 has neither.
        self.buckets = getattr(self.sharding, "buckets", [])
        self.sending = getattr(self.sharding, "in_flight", ())
        self.passes = 0  # forward passes of this optimizer step
        self.model.register_forward_pre_hook(self.between, prepend=True)
        self.whole = 0  # most bytes of whole gradients at any moment of a backward pass; not measured on stage 3
        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(self.look)

    def look(self, _: Tensor) -> None:
        """Stages 0 to 2: whole gradients that parameters have, or that are being sent."""
        if self.buckets:
            sending = [whole for *_, whole, _ in self.sending]
            found = storages([*(p.grad for p in self.model.parameters()), *sending])
            self.whole = max(self.whole, sum(found.values()))

    def in_flight(self) -> list[Tensor | None]:
        """What unfinished collectives read and fill; gloo's sums receive into one buffer more."""
        found = []
        for _, work, own, whole, _ in self.sending:
            found += [own, whole, getattr(work, "received", None)]
        for bucket in self.buckets:
            found += [source for _work, source in bucket.pending]
        return found

    def census(self) -> dict[str, int]:
        """Bytes alive here, by purpose. A storage counts once: in float32 a master is its parameter's memory."""
        params = list(self.model.parameters())
        shards = self.sharding.shards
        alive = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
        purposes = {
            "parameters": params,
            "gradients": [t.grad for t in params + self.buckets + shards],
            "optimizer": [piece.source for piece in kept_state(self.sharding, self.optimizers).values()],
            "in flight": self.in_flight(),
            # All other tensors that Python knows of and that were made since `measure` began: leaks show here.
            "rest": [t for t in alive if not isinstance(t, DTensor) and t.is_cpu],
        }
        seen: dict[int, int] = {}
        result = {}
        for purpose, tensors in purposes.items():
            new = storages(tensors)
            result[purpose] = sum(new[address] for address in new.keys() - seen)
            seen |= new
        return result

    def between(self, *_) -> None:
        """Before a forward pass: a census after the second micro-step, when stage 2 has received all it will keep."""
        self.passes += 1
        if self.passes == 3:
            time.sleep(0.3)  # gloo's threads release received tensors a moment later
            gc.collect()
            self.memory = self.census()


def measure(config: GPTConfig, stage: int, dtype: torch.dtype) -> tuple[dict[str, int], int, list[float]]:
    """
    On this rank, in bytes: a census between micro-steps; the most whole gradients during a backward pass; what it sends
    in an optimizer step, for each of MICRO_STEPS.
    """
    gc.collect()
    gc.freeze()  # a later census skips what is alive now
    watch = Watch(config, stage, dtype)
    rows = whole_rows(random_tokens(config.vocab_size, 1, config.sequence_len + 1, seed=dist.get_rank()))
    sent = []
    for micro_steps in MICRO_STEPS:
        watch.sent, watch.passes = 0.0, 0
        with watch:
            train_step(watch.model, watch.sharding, watch.optimizers, [rows] * micro_steps)
            watch.sharding.wait_for_params()  # base_train leaves that to the next forward pass
        sent.append(watch.sent)
    return watch.memory, watch.whole, sent


def measure_all(rank: int, ranks: int, config: GPTConfig, dtype: str) -> list[dict]:
    """Each stage: memory of the fullest rank, traffic as the mean over ranks, and both by the formulas."""
    results = []
    model = counted(config)
    counts = model.adamw + model.muon, model.muon, config.padded_vocab_size * config.n_embd
    kind = getattr(torch, dtype)
    for stage in STAGES:
        memory, whole, sent = zip(*gather_objects(measure(config, stage, kind)))
        results.append({
            "stage": stage,
            "memory": {part: max(of_rank[part] for of_rank in memory) for part in memory[0]},
            "whole": max(whole),
            "sent": [sum(column) / ranks for column in zip(*sent)],
            "expected sent": [sent_bytes(stage, ranks, m, kind, *counts) for m in MICRO_STEPS],
            "expected": state_bytes(stage, ranks, kind, model.adamw, model.muon)._asdict(),
        })
        if rank == 0:
            print(f"stage {stage} on {ranks} rank(s): measured", flush=True)
    return results
