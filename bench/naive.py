"""Data parallelism in ten lines, and the ways in which it goes wrong. bench.data_parallel makes tables of it."""
import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.gpt import GPT, GPTConfig

CONFIG = GPTConfig(sequence_len=32, vocab_size=768, n_layer=2, n_embd=64, n_head=2, n_kv_head=2)
ROWS, MICRO_STEPS, STEPS = 8, 2, 5  # rows of a step, over all ranks and micro-steps; micro-steps; steps
CLIP = 0.3                          # largest norm of the gradient, in the variant that clips
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
    T = CONFIG.sequence_len
    tokens = torch.randint(CONFIG.vocab_size // 8, (ROWS, T + 1), generator=torch.Generator().manual_seed(step)) * 7
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    for row in range(1, ROWS if masked else 0):
        targets[row, T - 4 * row :] = -1
    return inputs, targets


def flat(model: GPT) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


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

    for step in range(steps):
        inputs, targets = batch(step, masked=variant in ("means", "masked"))
        share = ROWS // ranks
        own = slice(0, share) if variant == "rows" else slice(rank * share, (rank + 1) * share)
        for micro_step, rows in enumerate(torch.arange(ROWS)[own].chunk(MICRO_STEPS)):
            loss = model(inputs[rows], targets[rows], reduction="sum" if variant == "masked" else "mean")
            (loss / ((targets >= 0).sum() if variant == "masked" else MICRO_STEPS)).backward()
            if variant == "twice":
                all_reduce(ranks if micro_step == MICRO_STEPS - 1 else 1)
        if variant == "clip":
            torch.nn.utils.clip_grad_norm_(params, CLIP)
        if ranks > 1 and variant not in ("apart", "twice"):
            all_reduce(1 if variant == "sum" else ranks)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def distances(rank: int, ranks: int, variant: str, kind: str) -> tuple[float, float]:
    """Relative to the way travelled by one rank with all rows: how far this rank is from that one, and from another."""
    reference = train(0, 1, {"means": "masked", "clip": "clip"}.get(variant, "right"), kind)
    mine, way = train(rank, ranks, variant, kind), (reference - train(0, 1, "right", kind, steps=0)).norm()
    others = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(others, mine)
    return ((mine - reference).norm() / way).item(), max(((mine - other).norm() / way).item() for other in others)


def all_distances(rank: int, ranks: int) -> dict[str, list[float]]:
    """Of every variant, by SGD and by AdamW, as `distances`."""
    found = {}
    for variant in VARIANTS:
        found[variant] = [number for kind in OPTIMIZERS for number in distances(rank, ranks, variant, kind)]
    return found
