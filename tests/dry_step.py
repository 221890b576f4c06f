"""
One rank's optimizer step on the meta device, which has shapes and no memory: bytes alive, collectives, and copies for
which a GPU would be waited for. The other ranks do not exist (torch's fake process group).
"""
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.harness import one_rank_of
from nanochat.model import gpt, loss
from nanochat.model.gpt_config import GPTConfig
from nanochat.plan.step_trial import set_up_training

PHASES = "forward", "backward", "end of pass", "reduce", "adamw", "muon", "gather"
META = torch.device("meta")


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made while it was on, and their peak; also of tensors without memory."""

    def __init__(self):
        super().__init__()
        self.known, self.now, self.peak = set(), 0, 0

    def __torch_dispatch__(self, func: Callable, types, args=(), kwargs=None):
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor)):
            if storage._cdata not in self.known | before:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def freed(self, key: int, count: int) -> None:
        self.known.discard(key)
        self.now -= count


class DryStep(LiveBytes):
    """By phase of a step: peaks, and collectives as (operation, dtype); and copies between devices."""

    def __init__(self):
        super().__init__()
        self.clear("setup")

    def clear(self, phase: str) -> None:
        """Begin counting anew; what is alive stays counted."""
        self.phase, self.peak, self.peaks = phase, self.now, Counter()
        self.collectives: dict[str, Counter] = defaultdict(Counter)
        self.gathered, self.copies = 0, []

    def __torch_dispatch__(self, func: Callable, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peaks[self.phase] = max(self.peaks[self.phase], self.now)
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            largest = max(tensors, key=Tensor.numel)
            self.collectives[self.phase][name, str(largest.dtype).removeprefix("torch.")] += 1
            self.gathered += largest.numel() if self.phase == "gather" else 0
        elif name in ("_to_copy", "copy_") and len({t.device for t in tensors}) > 1:
            self.copies.append(f"{name} in {self.phase}")
        return result


def dry_step(
    ranks: int, config: GPTConfig, rows: int, stage: int, micro_steps: int, checkpointing: bool = False
) -> DryStep:
    """Counts rank 3's optimizer step as in scripts/base_train.py, in bfloat16, after one that is not counted."""
    count, has_varlen = DryStep(), gpt.has_varlen
    gpt.has_varlen, loss.CHUNK_LOGITS["meta"] = lambda *_: True, loss.CHUNK_LOGITS["cuda"]
    with one_rank_of(ranks, min(3, ranks - 1)), count:
        model, sharding, optimizers = set_up_training(config, torch.bfloat16, META, stage)
        model.activation_checkpointing = checkpointing
        tokens = torch.empty(rows, config.sequence_len, dtype=torch.int64, device=META)
        cu_seqlens = torch.empty(4 * rows, dtype=torch.int32, device=META)
        for _ in range(2):
            count.clear("forward")
            for micro_step in range(micro_steps):
                with sharding.accumulate(last=micro_step == micro_steps - 1):
                    count.phase = "forward"
                    mean = model(tokens, tokens, cu_seqlens=cu_seqlens)
                    count.phase = "backward"
                    (mean / micro_steps).backward()
                    count.phase = "end of pass"
            count.phase = "reduce"
            stats = sharding.reduce_and_clip(mean)
            for optimizer in optimizers:
                count.phase = optimizer.kind
                optimizer.step(stats)
            count.phase = "gather"
            sharding.all_gather_params()
    gpt.has_varlen = has_varlen
    del loss.CHUNK_LOGITS["meta"]
    return count
