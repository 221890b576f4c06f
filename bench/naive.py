"""Data parallelism in ten lines, and the ways in which it goes wrong. bench.data_parallel makes a table of it."""
import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig

CONFIG = GPTConfig(sequence_len=32, vocab_size=768, n_layer=2, n_embd=64, n_head=2, n_kv_head=2)
ROWS = 8            # of a step, over all ranks and micro-steps
MICRO_STEPS = 2
STEPS = 5
CLIP = 0.3          # largest norm of the gradient, in the variant that clips
OPTIMIZERS = {"SGD": (torch.optim.SGD, 0.1), "AdamW": (torch.optim.AdamW, 0.003)}  # with their rates
VARIANTS = {
    "right": "averaged, after the last micro-step",
    "apart": "not averaged at all",
    "sum": "summed, not averaged",
    "clip": "clipped by each rank's own norm, then averaged",
    "twice": "what has accumulated is summed in every micro-step, divided once",
    "rows": "every rank reads the same rows",
    "seed": "every rank draws its own weights",
    "means": "means over unequal numbers of targets averaged",
}


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
            if variant == "masked":  # one rank's reference for unequal numbers: the sum over all targets, divided once
                loss = model(x, y, reduction="sum") / (targets >= 0).sum()
            else:
                loss = model(x, y) / MICRO_STEPS
            loss.backward()
            if variant == "twice":
                all_reduce(ranks if micro_step == MICRO_STEPS - 1 else 1)
        if variant == "clip":
            torch.nn.utils.clip_grad_norm_(params, CLIP)
        if ranks > 1 and variant not in ("apart", "twice"):
            all_reduce(1 if variant == "sum" else ranks)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in params])


def distances(rank: int, ranks: int, kind: str) -> dict[str, tuple[float, float]]:
    """
    {variant: distance of this rank's weights from one rank's with all rows, and from another rank's}, in units of the
    distance that training went.
    """
    start = train(0, 1, "right", kind, steps=0)
    right = train(0, 1, "right", kind)
    references = {"means": train(0, 1, "masked", kind), "clip": train(0, 1, "clip", kind)}
    result = {}
    for variant in VARIANTS:
        goal = references.get(variant, right)
        mine = train(rank, ranks, variant, kind)
        others = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(others, mine)
        apart = max((mine - other).norm() for other in others)
        way = (goal - start).norm()
        result[variant] = (((mine - goal).norm() / way).item(), (apart / way).item())
    return result
