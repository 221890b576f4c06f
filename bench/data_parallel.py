"""
Data parallelism in ten lines, the ways in which it goes wrong, and what ZeRO makes of it: the tables of
docs/data_parallel.md.

    python -m bench.data_parallel            # prints them
    python -m bench.data_parallel --write    # and puts them into the page
"""
import json
import os
import socket
import tempfile
from pathlib import Path

from configurator import configure

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import start_processes

from nanochat.errors import UserError
from nanochat.gpt import GPT, GPTConfig
from bench.pages import put_into_page
from nanochat.report import markdown_table
from bench.zero import measure

CONFIG = GPTConfig(sequence_len=32, vocab_size=768, n_layer=2, n_embd=64, n_head=2, n_kv_head=2)
ROWS, MICRO_STEPS, STEPS = 8, 2, 5  # rows of a step, over all ranks and micro-steps; micro-steps; steps
CLIP = 0.3                           # largest norm of the gradient, in the variant that clips
RATES = {"SGD": 0.1, "AdamW": 0.003}
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
    if masked:
        for row in range(ROWS):
            targets[row, T - 4 * row :] = -1 if row else targets[row, T:]
    return inputs, targets


def train(rank: int, ranks: int, variant: str, kind: str) -> Tensor:
    """All parameters after STEPS steps, end to end: naive data parallelism, right or wrong in one way."""
    model = GPT(CONFIG)
    model.init_weights(seed=rank if variant == "seed" else 0)
    params = list(model.parameters())
    optimizer = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[kind](params, lr=RATES[kind])

    def reduce(divisor: int) -> None:
        for p in params:
            dist.all_reduce(p.grad)
            p.grad /= divisor

    for step in range(STEPS):
        inputs, targets = batch(step, masked=variant in ("means", "masked"))
        share = ROWS // ranks
        own = slice(0, share) if variant == "rows" else slice(rank * share, (rank + 1) * share)
        for micro_step, rows in enumerate(torch.arange(ROWS)[own].chunk(MICRO_STEPS)):
            loss = model(inputs[rows], targets[rows], reduction="sum" if variant == "masked" else "mean")
            (loss / ((targets >= 0).sum() if variant == "masked" else MICRO_STEPS)).backward()
            if variant == "twice":
                reduce(ranks if micro_step == MICRO_STEPS - 1 else 1)
        if variant == "clip":
            torch.nn.utils.clip_grad_norm_(params, CLIP)
        if ranks > 1 and variant not in ("apart", "twice"):
            reduce(1 if variant == "sum" else ranks)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in params])


def rank_main(rank: int, ranks: int, folder: str) -> None:
    """The life of one rank; the first leaves the rows of both tables in the folder."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if "lo" in dict(socket.if_nameindex()).values() else "lo0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    start = GPT(CONFIG)
    start.init_weights(seed=0)
    start = torch.cat([p.detach().flatten() for p in start.parameters()])
    wrong = []
    for variant, words in VARIANTS.items():
        row = [words]
        for kind in RATES:
            mine = train(rank, ranks, variant, kind)
            reference = train(0, 1, {"means": "masked", "clip": "clip"}.get(variant, "right"), kind)  # one rank, all rows
            way = (reference - start).norm()
            others = [torch.empty_like(mine) for _ in range(ranks)]
            dist.all_gather(others, mine)
            row += [(mine - reference).norm().item() / way.item(), max((mine - other).norm().item() for other in others) / way.item()]
        wrong.append(row)
    measured = [measure(rank, ranks, CONFIG, stage, "float32") for stage in range(4)]
    if rank == 0:
        stages = [[sum(m["memory"][key] for key in ("parameters", "gradients", "optimizer")) / len(start), *(s / len(start) for s in m["sent"])] for m in measured]
        Path(folder, "rows.json").write_text(json.dumps([wrong, stages]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = 4               # processes; they divide the eight rows of a step
    write = False           # put the tables into docs/data_parallel.md
    configure(globals())
    if ranks < 2 or ROWS % (ranks * MICRO_STEPS):
        raise UserError(f"ranks={ranks} must be 2 or 4: every rank has the same number of the {ROWS} rows in each of {MICRO_STEPS} micro-steps")

    with tempfile.TemporaryDirectory() as folder:
        start_processes(rank_main, (ranks, folder), nprocs=ranks, start_method="forkserver")
        wrong, stages = json.loads(Path(folder, "rows.json").read_text())
    columns = ["what is done with the gradients", *(f"{kind}: {what}" for kind in RATES for what in ("off", "ranks apart"))]
    text = markdown_table(columns, [[words, *(f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.3g}" for value in values)] for words, *values in wrong])
    naive = ["the ten lines, AdamW", "16.00", *[f"{8 * (ranks - 1) / ranks:.2f}"] * 2]
    rows = [naive, *([f"stage {stage}", *(f"{value:.2f}" for value in values)] for stage, values in enumerate(stages))]
    text += "\n\n" + markdown_table([f"bytes per parameter, {ranks} ranks", "keeps", "sends, 1 micro-step", "sends, 4 micro-steps"], rows)
    print(text)
    if write:
        put_into_page("data_parallel.md", "python -m bench.data_parallel --write", text)
