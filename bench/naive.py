"""Data parallelism in ten lines, and the ways in which it goes wrong. bench.data_parallel makes a table of it."""
import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig

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
    return torch.cat([p.detach().flatten() for p in params])


def distances(rank: int, ranks: int, kind: str) -> dict[str, tuple[float, float]]:
    """
    Of every variant, relative to the way travelled by one rank with all rows: how far this rank is from that one, and
    from another.
    """
    start, right = train(0, 1, "right", kind, steps=0), train(0, 1, "right", kind)
    references = {"means": train(0, 1, "masked", kind), "clip": train(0, 1, "clip", kind)}
    found = {}
    for variant in VARIANTS:
        reference, mine = references.get(variant, right), train(rank, ranks, variant, kind)
        others = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(others, mine)
        off, apart = (mine - reference).norm(), max((mine - other).norm() for other in others)
        way = (reference - start).norm()
        found[variant] = ((off / way).item(), (apart / way).item())
    return found
