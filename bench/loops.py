"""
Short runs of a small model on bytes of the embedded world, one question each: AdamW against Muon, and what a larger
batch buys.

    python -m bench.loops --idea=batch --write    # without --write it is only printed
"""
from typing import Literal

from configurator import configure

idea: Literal["optimizers", "batch"] = "batch"
write = False               # put the table into docs/two_loops.md (batch), docs/ablations.md (optimizers)
configure(globals())

import itertools
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from bench.harness import PageBlock
from nanochat.corpus.tinyworld import generate
from nanochat.model.gpt_config import GPTConfig
from nanochat.optim.adamw import DistAdamW
from nanochat.plan.step_trial import set_up_training, train_step, whole_rows
from nanochat.runtime.tables import markdown_table

block = PageBlock("ablations.md" if idea == "optimizers" else "two_loops.md", f"bench.loops --idea={idea}", write)

torch.set_num_threads(1)    # a second thread has little to do, and on a busy machine one waits for the other
CONFIG = GPTConfig(sequence_len=64, vocab_size=256, n_layer=2, n_embd=64, n_head=2, n_kv_head=2)
T, ROWS, STEPS = CONFIG.sequence_len, 8, 100    # bytes of a row, rows of a step, steps
RATES = {"AdamW": 0.008, "Muon": 0.04}          # the best of rates that double
BATCHES = 4, 8, 16, 32, 64, 128                 # rows of a step
GOAL = 2.2                                      # bits per byte


def text(documents: range) -> Tensor:
    """Documents of the embedded world as rows of bytes, (rows, T + 1)."""
    data = "\n".join(generate(0, number).text for number in documents).encode()
    return torch.tensor(list(data)).unfold(0, T + 1, T + 1)


TRAIN, HELD_OUT = text(range(1000)), text(range(10**6, 10**6 + 20))


def training(kind: str, rate: float, rows: int, scale: float = 1.0) -> Iterator[Callable[[], float]]:
    """
    Trains forever: Muon or AdamW updates matrices with this rate, AdamW all else with its default rates. scale: factor
    of all rates. Yields before each step a function that measures bits per byte of held-out documents.
    """
    model, sharding, (adamw, matrices) = set_up_training(CONFIG, torch.float32, torch.device("cpu"))
    if kind == "AdamW":
        matrices = DistAdamW([{"shards": matrices.param_groups[0]["shards"], "lr": rate}])
    matrices.param_groups[0]["lr"] = rate
    for group in adamw.param_groups + matrices.param_groups:
        group["lr"] *= scale

    @torch.no_grad()
    def bits() -> float:
        return model(HELD_OUT[:, :-1], HELD_OUT[:, 1:]).item() / np.log(2)

    for start in itertools.count(0, rows):
        yield bits
        tokens = TRAIN[torch.arange(start, start + rows) % len(TRAIN)]
        train_step(model, sharding, (adamw, matrices), [whole_rows(tokens)])


def optimizers(name: str) -> list:
    kind, rate = name.split()
    run = training(kind, float(rate), ROWS)
    bits = next(itertools.islice(run, STEPS, None))
    return [f"{bits():.2f}"]


def batch(name: str) -> list:
    """Steps and bytes to GOAL, checked after each 5% more steps. Rates grow with the square root of the batch."""
    rows, due = int(name), 0
    for steps, bits in enumerate(training("Muon", RATES["Muon"], rows, (rows / ROWS) ** 0.5)):
        if steps == due:
            if bits() <= GOAL:
                break
            due += 1 + steps // 20
    return [steps, f"{steps * rows * T:,}"]


names, columns, line = {
    "optimizers": ([f"{kind} {RATES[kind] * factor:g}" for kind in ("AdamW", "Muon") for factor in (0.25, 0.5, 1, 2)],
                   ["the matrices' optimizer, its rate", "bits per byte"], optimizers),
    "batch": (list(map(str, BATCHES)), ["rows of a step", f"steps to {GOAL} bits per byte", "bytes"], batch),
}[idea]
lines = []
for name in names:
    print(f"{columns[0]}: {name} ...", file=sys.stderr, flush=True)
    lines.append([name, *line(name)])
note = ""
if idea == "batch":  # McCandlish et al. 2018, arXiv:1812.06162
    steps = np.array([steps for _, steps, _ in lines])
    slope, fewest = np.polyfit(1 / np.array(BATCHES), steps, 1, w=1 / steps)
    note = f"\n\nsteps ≈ {fewest:.0f} + {slope:,.0f} / rows, so the critical batch is {slope / fewest:.0f} rows."
block.show(markdown_table(columns, lines) + note)
