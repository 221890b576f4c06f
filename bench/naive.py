"""Data parallelism in ten lines, and ways to get it wrong. bench.parallel makes a table of it."""
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from bench.harness import draw_weights, random_tokens
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig
from nanochat.runtime.collectives import gather_objects, rank_and_size

CONFIG = GPTConfig(sequence_len=32, vocab_size=768, n_layer=2, n_embd=64, n_head=2, n_kv_head=2)
ROWS = 8            # rows of a step, over all ranks and micro-steps
MICRO_STEPS = 2
STEPS = 5
CLIP = 0.3          # largest norm of the gradient, in the variant that clips
OPTIMIZERS = {"SGD": (torch.optim.SGD, 0.1), "AdamW": (torch.optim.AdamW, 0.003)}  # and their rates
VARIANTS = (
    "averaged, after the last micro-step",
    "not averaged at all",
    "summed, not averaged",
    "clipped by each rank's own norm, then averaged",
    "what has accumulated is summed in every micro-step, divided once",
    "every rank reads the same rows",
    "every rank draws its own weights",
    "means over unequal numbers of targets averaged",
    "not divided by the micro-steps",
    "cleared before each micro-step: only the last one counts",
    "never cleared",
)
RIGHT, CLIPPED, UNEQUAL = VARIANTS[0], VARIANTS[3], VARIANTS[7]
COLUMNS = [f"{kind}: {what}" for kind in OPTIMIZERS for what in ("off", "ranks apart")]


def batch(step: int, masked: bool) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step, (ROWS, T) each. masked: the later a row, the fewer of its targets count."""
    T = CONFIG.sequence_len
    tokens = 7 * random_tokens(CONFIG.vocab_size // 8, ROWS, T + 1, seed=step)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    if masked:
        for row in range(1, ROWS):
            targets[row, T - 4 * row :] = -1
    return inputs, targets


def train(rank: int, ranks: int, variant: str, kind: str, steps: int = STEPS) -> Tensor:
    """All parameters after the steps, end to end: naive data parallelism, right or wrong in one way."""
    model = GPT(CONFIG)
    draw_weights(model, seed=rank if "own weights" in variant else 0)
    params = list(model.parameters())
    make, rate = OPTIMIZERS[kind]
    optimizer = make(params, lr=rate)

    def all_reduce(divisor: int) -> None:
        for p in params:
            dist.all_reduce(p.grad)
            p.grad /= divisor

    first = 0 if "same rows" in variant else rank * MICRO_STEPS
    cut = ranks * MICRO_STEPS
    for step in range(steps):
        inputs, targets = batch(step, masked=variant == UNEQUAL)
        for micro_step in range(MICRO_STEPS):
            x, y = inputs.chunk(cut)[first + micro_step], targets.chunk(cut)[first + micro_step]
            if "cleared before" in variant:
                optimizer.zero_grad()
            if variant == UNEQUAL and ranks == 1:  # right: the sum over all targets, divided once
                loss = model(x, y, reduction="sum") / (targets >= 0).sum()
            else:
                loss = model(x, y) / (1 if "not divided" in variant else MICRO_STEPS)
            loss.backward()
            if "accumulated" in variant:
                all_reduce(ranks if micro_step == MICRO_STEPS - 1 else 1)
        if variant == CLIPPED:
            clip_grad_norm_(params, CLIP)
        if ranks > 1 and "at all" not in variant and "accumulated" not in variant:
            all_reduce(1 if "summed, not" in variant else ranks)
        optimizer.step()
        if "never" not in variant:
            optimizer.zero_grad()
    return parameters_to_vector(params).detach()


def measure(variant: str) -> list[float]:
    """
    The COLUMNS: distance of this rank's weights from one rank's with all rows, and the largest from another rank's,
    divided by the distance that training moved them.
    """
    rank, ranks = rank_and_size()
    found = []
    for kind in OPTIMIZERS:
        goal = train(0, 1, variant if variant in (CLIPPED, UNEQUAL) else RIGHT, kind)
        mine = train(rank, ranks, variant, kind)
        way = (goal - train(0, 1, RIGHT, kind, steps=0)).norm()
        apart = max(torch.dist(mine, other) for other in gather_objects(mine))
        found += [torch.dist(mine, goal) / way, apart / way]
    return [number.item() for number in found]
