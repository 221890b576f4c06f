"""
Stage 3 of ZeRO, for reading: each rank keeps 1/N of every unit of the model, and a unit is whole only while it is used.
Training uses PyTorch's fully_shard, which gives the same weights. bench.parallel makes a table of it.
"""
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from bench.harness import draw_weights, random_tokens
from bench.sent import Sent, sent_bytes
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig
from nanochat.runtime.collectives import all_gather_single, rank_and_size, reduce_scatter

T, C, UNITS = 32, 64, 8
UNIT = 12 * C**2  # parameters; N must divide them
CONFIG = GPTConfig(T, UNIT // C, n_layer=UNITS - 2, n_embd=C, n_head=2, n_kv_head=2)
VARIANTS = {"a unit is gathered when it is used": False, "the next unit is gathered meanwhile": True}  # prefetch?
STEPS = 3
COLUMNS = "sent in a step", "formula", "all parameters", "most that are whole"


class Unit:
    """The parameters of the embedding, a block or the head, end to end in `flat`, which has no memory between uses."""

    def __init__(self, module: nn.Module):
        rank, ranks = rank_and_size()
        self.params = list(module.parameters())
        self.flat = parameters_to_vector(self.params).detach()
        self.own = nn.Parameter(self.flat.chunk(ranks)[rank].clone())  # for the optimizer
        vector_to_parameters(self.flat, self.params)  # now the parameters are views of it
        self.free()

    def free(self) -> None:
        self.flat.untyped_storage().resize_(0)  # autograd keeps views of it; `gather` gives them memory again
        self.work: Any = None

    def gather(self) -> None:
        if self.work is None:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
            self.work = all_gather_single(self.flat, self.own.detach(), async_op=True)

    def gradient_computed(self, _: Tensor) -> None:
        """A parameter's hook. After the unit's last gradient each rank gets the sum of its own part."""
        if all(p.grad is not None for p in self.params):
            self.own.grad = torch.empty_like(self.own)
            reduce_scatter(self.own.grad, parameters_to_vector(p.grad for p in self.params)).wait()
            for p in self.params:
                p.grad = None
            self.free()


class Stage3:
    def __init__(self, model: GPT, prefetch: bool):
        self.units = [Unit(module) for module in model.units()]
        self.prefetch = prefetch
        self.most = 0  # bytes of whole parameters at the fullest moment
        for i, module in enumerate(model.units()):
            module.register_forward_pre_hook(lambda *_, i=i: self.use(i, i + 1))
            module.register_forward_hook(lambda _module, _inputs, output, i=i: self.leave(i, output))
            for p in module.parameters():
                p.register_post_accumulate_grad_hook(self.units[i].gradient_computed)

    def use(self, i: int, following: int) -> None:
        self.units[i].gather()
        if self.prefetch and 0 <= following < UNITS:
            self.units[following].gather()  # it travels while unit i computes
        self.most = max(self.most, sum(unit.flat.untyped_storage().nbytes() for unit in self.units))
        self.units[i].work.wait()

    def leave(self, i: int, output: Tensor) -> None:
        if i < UNITS - 1:  # the last unit's backward pass follows at once
            self.units[i].free()
        output.register_hook(lambda _grad: self.use(i, i - 1))  # before its backward pass


def train(model: GPT, params: list[Tensor]) -> int:
    """Take STEPS optimizer steps. Returns the bytes that this rank sends in one."""
    rank, ranks = rank_and_size()
    optimizer = torch.optim.AdamW(params, lr=0.01)
    watch = Sent()
    for step in range(STEPS):
        rows = random_tokens(UNIT // C, ranks, 2, 1, T, seed=step)
        with watch:
            (model(*rows[rank]) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return round(watch.sent / STEPS)


def measure(variant: str) -> list[float]:
    model = GPT(CONFIG)
    draw_weights(model)
    stage3 = Stage3(model, VARIANTS[variant])
    sent = train(model, [unit.own for unit in stage3.units])
    total = UNITS * UNIT
    formula = sent_bytes(3, dist.get_world_size(), 1, torch.float32, total, 0, UNIT)
    return [sent, round(formula), 4 * total, stage3.most]
