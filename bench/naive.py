"""Data parallelism in ten lines, and the ways in which it goes wrong. bench.parallel makes a table of it."""
import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig
from nanochat.runtime.collectives import rank_and_size

CONFIG = GPTConfig(sequence_len=32, vocab_size=768, n_layer=2, n_embd=64, n_head=2, n_kv_head=2)
ROWS = 8            # of a step, over all ranks and micro-steps
MICRO_STEPS = 2
STEPS = 5
CLIP = 0.3          # largest norm of the gradient, in the variant that clips
OPTIMIZERS = {"SGD": (torch.optim.SGD, 0.1), "AdamW": (torch.optim.AdamW, 0.003)}  # with their rates
VARIANTS = {
    "averaged, after the last micro-step": "right",
    "not averaged at all": "apart",
    "summed, not averaged": "sum",
    "clipped by each rank's own norm, then averaged": "clip",
    "what has accumulated is summed in every micro-step, divided once": "twice",
    "every rank reads the same rows": "rows",
    "every rank draws its own weights": "seed",
    "means over unequal numbers of targets averaged": "means",
    "not divided by the micro-steps": "undivided",
    "cleared before each micro-step: only the last one counts": "last",
    "never cleared": "never",
}
REFERENCES = {"clip": "clip", "means": "masked"}  # of one rank with all rows; of the other variants "right"
COLUMNS = [f"{kind}: {what}" for kind in OPTIMIZERS for what in ("off", "ranks apart")]


def batch(step: int, masked: bool) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step, (ROWS, T) each. masked: the later a row, the fewer of its targets count."""
    generator = torch.Generator().manual_seed(step)
    T = CONFIG.sequence_len
    tokens = 7 * torch.randint(CONFIG.vocab_size // 8, (ROWS, T + 1), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    if masked:
        for row in range(1, ROWS):
            targets[row, T - 4 * row :] = -1
    return inputs, targets


def train(rank: int, ranks: int, variant: str, kind: str, steps: int = STEPS) -> Tensor:
    """All parameters after the steps, end to end: naive data parallelism, right or wrong in one way."""
    model = GPT(CONFIG)
    model.init_weights(seed=rank if variant == "seed" else 0)
    params = list(model.parameters())
    make, rate = OPTIMIZERS[kind]
    optimizer = make(params, lr=rate)

    def all_reduce(divisor: int) -> None:
        for p in params:
            dist.all_reduce(p.grad)
            p.grad /= divisor

    first = 0 if variant == "rows" else rank
    share = ROWS // ranks // MICRO_STEPS  # rows of a micro-step
    for step in range(steps):
        inputs, targets = batch(step, masked=variant in ("means", "masked"))
        for micro_step in range(MICRO_STEPS):
            start = (first * MICRO_STEPS + micro_step) * share
            x, y = inputs[start : start + share], targets[start : start + share]
            if variant == "last":
                optimizer.zero_grad()
            if variant == "masked":  # one rank's reference for unequal numbers: the sum over all targets, divided once
                loss = model(x, y, reduction="sum") / (targets >= 0).sum()
            else:
                loss = model(x, y) / (1 if variant == "undivided" else MICRO_STEPS)
            loss.backward()
            if variant == "twice":
                all_reduce(ranks if micro_step == MICRO_STEPS - 1 else 1)
        if variant == "clip":
            torch.nn.utils.clip_grad_norm_(params, CLIP)
        if ranks > 1 and variant not in ("apart", "twice"):
            all_reduce(1 if variant == "sum" else ranks)
        optimizer.step()
        if variant != "never":
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in params])


def measure(name: str) -> list[float]:
    """
    The COLUMNS: distance of this rank's weights from one rank's with all rows, and the largest from another rank's, in
    units of the distance that training went.
    """
    rank, ranks = rank_and_size()
    variant, found = VARIANTS[name], []
    for kind in OPTIMIZERS:
        goal = train(0, 1, REFERENCES.get(variant, "right"), kind)
        mine = train(rank, ranks, variant, kind)
        others = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(others, mine)
        way = (goal - train(0, 1, "right", kind, steps=0)).norm()
        found += [(mine - goal).norm() / way, max((mine - other).norm() for other in others) / way]
    return [number.item() for number in found]
