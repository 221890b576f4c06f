"""
What formulas alone say on the pages, each between marks. test_runs.py compares the pages with it.

    python -m tests.page_formulas                  # prints all of it
    python -m tests.page_formulas links --write    # puts a block into its page; without a name all
    python -m tests.page_formulas --help           # names the blocks
"""
import contextlib
import io
import itertools
import math
import runpy
import sys
from collections import namedtuple
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch

from bench.harness import PageBlock
from nanochat.data.batch_shape import BatchShape
from nanochat.data.dataloader import Span, batches_on_host
from nanochat.model.fp8 import MIN_WIDTH
from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.choice import SIZES, SLOWER, Choice, choose_size, config_of, cost, disk, parse_gpus, pretraining
from nanochat.plan.machines import LINKS, Cluster, Layout, Link, plan_step
from nanochat.plan.memory import GIB, largest_rows, shaped, split_into_stages, state_bytes
from nanochat.plan.step_time import FLASH2, FP8_GPUS, step_time
from nanochat.plan.traffic import Collective, collectives
from nanochat.runtime.errors import did_you_mean
from nanochat.runtime.flops import Gpu, datasheet_gpu
from nanochat.runtime.tables import markdown_table

BF16 = torch.bfloat16
LENGTH = 2048  # tokens of a row
RATE = datasheet_gpu("H100").peak / 2
CONFIGS = {arch: config_from_depth(20, 65536, LENGTH, arch=arch) for arch in ("classic", "modern")}


def links() -> str:
    """
    A row's backward pass is two thirds of its FLOPs. Meanwhile stage 2 sends gradients, 4 bytes of each parameter, and
    stage 3 gathers 2 bytes besides. The 2 bytes that stage 3 gathers during a forward pass take fewer rows.
    """
    lines = []
    for name in ("nvlink5", "nvlink4", "pcie5", "ndr", "eth10"):
        link, line = LINKS[name], [f"`{name}`"]
        for stage in (1, 2, 3):
            step = plan_step(CONFIGS["modern"], Cluster(8, 8, link, link), Layout(stage, 8, 8, 4), RATE, BF16, 2**19)
            line.append(f"{1e3 * step.within / link.bandwidth:,.0f}")
        for config in CONFIGS.values():
            (model,) = split_into_stages(config)
            seconds = sum(model.units) * 7 / 8 / link.bandwidth  # to send a byte of each parameter
            backward = LENGTH * model.flops / RATE * 2 / 3
            line += [math.ceil(n * seconds / backward) for n in (4, 6)]
        lines.append(line)
    return markdown_table(["link", "sends, ms: stage 1", "stage 2", "stage 3", "rows, classic: stage 2", "stage 3",
                           "rows, modern: stage 2", "stage 3"], lines)


def torus() -> str:
    """
    256 ranks, by the planner. A torus of 4 × 8 × 8 is one link of it for rings and one for all-to-alls, by the formulas
    of docs/machines.md. All-to-alls come in pairs: there and back.
    """
    nvlink, ndr = LINKS["nvlink4"], LINKS["ndr"]
    lines = []
    for name, per_host, ring, exchange in (
            ("256 GPUs on one switch of NVLink 4", 256, nvlink, nvlink),
            ("32 hosts of 8: NVLink 4, InfiniBand NDR", 8, nvlink, nvlink), ("256 hosts of one GPU: NDR", 1, ndr, ndr),
            ("TPU v5p, torus of 4 × 8 × 8", 256, Link(600e9, 17e-6 / 255), Link(99.6e9, 1e-5))):
        line = [name]
        for (kind, link), size in itertools.product((("all-gather", ring), ("all-to-all", exchange)), (1e9, 1e6)):
            sent = Cluster(256, per_host, link, ndr).sent(Collective(kind, size, 256))
            seconds = max(sent.within / link.bandwidth, sent.between / ndr.bandwidth) + sent.latency
            line.append(f"{1e3 * seconds:,.2f}")
        lines.append(line)
    columns = ["milliseconds", "all-gather, in a ring: 1 GB", "1 MB", "two all-to-alls: 1 GB", "1 MB"]
    return markdown_table(columns, lines)


def hosts() -> str:
    lines = []
    cluster = Cluster(8, 4, LINKS["nvlink4"], LINKS["ndr"])
    for stage in (1, 2, 3):
        line = []
        for shards in (8, 4):
            within = between = 0.0
            for c in collectives(stage, shards, 8 // shards, 4, BF16, 1, 0, 0):
                sent = cluster.sent(c)
                within += c.times * sent.within
                between += c.times * sent.between
            line += [sum(state_bytes(stage, shards, BF16, 1, 0)), within, between]
        lines.append([stage, *(f"{n:.2f}" for n in line)])
    return markdown_table(["stage", "all 8 ranks: keeps", "sends within", "between", "shard_size=4: keeps",
                           "sends within", "between"], lines)


def example() -> str:
    counts, lines = (1, 4, 16, 64, 256, 1024), []
    for stage, paper in enumerate((16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64)):  # arXiv:1910.02054, figure 1
        ours = [7.5 * sum(state_bytes(stage, ranks, BF16, 1, 0)) for ranks in counts]
        lines.append([stage, *(f"{n:.1f}" for n in (*ours, 7.5 * paper))])
    return markdown_table(["stage", "1 rank", *counts[1:], "paper, 64"], lines)


class NumberedRows:
    """For the loader, instead of a text: every token of row n is n."""

    def __init__(self):
        self.rows = itertools.count()

    def state(self) -> dict:
        return {}

    def next_row(self) -> list[Span]:
        return [(np.full(1, next(self.rows)), 0, 1)]


def rows() -> str:
    lines = []
    for ranks, micro_steps, size in ((1, 1, 8), (1, 2, 4), (2, 1, 4), (2, 2, 2), (4, 1, 2), (4, 2, 1)):
        line = []
        for rank in range(ranks):
            loader = batches_on_host(NumberedRows(), BatchShape(size, 1, rank, ranks), 8, 10**6)
            batches = [next(loader).inputs.flatten().tolist() for _ in range(micro_steps)]
            line.append(" / ".join(" ".join(map(str, batch)) for batch in batches))
        lines.append([f"{ranks} × {micro_steps} × {size}", *line, *[""] * (4 - ranks)])
    return markdown_table(["ranks × micro-steps × rows", *(f"rank {rank}" for rank in range(4))], lines, range(5))


def mfu() -> str:
    lines = []
    for name, config in {**CONFIGS, "depth 4 of the table": config_from_depth(4, 8192, 512)}.items():
        model = shaped(config)
        flops = model.estimate_flops()
        numbers = [model.count_parameters(*roles) for roles in (("embedding",), ("embedding", "value_embedding"))]
        without = 6 * model.count_parameters("matrix", "head")
        lines.append([name, *(f"{1 + 6 * n / flops:.2f}" for n in numbers), f"{without / flops:.2f}"])
    return markdown_table(["MFU comes out … times as high", "embedding counted", "all tables counted",
                           "attention left out"], lines)


def streams() -> str:
    lines = []
    for arch, config in CONFIGS.items():
        (model,) = split_into_stages(config)
        size = sum(model.units)
        stream = 16 * LENGTH * config.n_embd * config.streams * BF16.itemsize
        sent = sum(c.bytes for c in collectives(3, 8, 1, 1, BF16, size, 0, model.units[-1]))
        lines.append([arch, f"{size / 1e9:.2f}", config.streams, f"{stream / 1e6:.0f}", f"{sent / 1e9:.1f}"])
    return markdown_table(["depth 20", "billion parameters", "streams", "pipeline: MB there, and as many back",
                           "stage 3: GB, × (N − 1)/N"], lines)


def fits() -> str:
    configs = {depth: config_from_depth(depth, 32768, LENGTH, arch="modern") for depth in (12, 16, 20, 24)}
    lines = []
    for size in (12, 24, 80, 141):
        line = [f"{size} GB"]
        for config in configs.values():
            rows, more = (largest_rows(size * GIB, 64, config, BF16, "cuda", True, checkpointing=twice) or "none"
                          for twice in (False, True))
            line.append(f"{rows} ({more})")
        lines.append(line)
    sizes = {depth: sum(split_into_stages(config)[0].units) / 1e6 for depth, config in configs.items()}
    columns = [f"depth {depth} ({size:,.0f} M parameters)" for depth, size in sizes.items()]
    return markdown_table(["GPU memory", *columns], lines)


MACHINES = "8,H100,80", "1,H100,80", "8,A100,40", "1,A100,80", "1,RTX 4090,24", "1,RTX 3090,24"


def planned(plan: str) -> tuple[int, Gpu, Choice]:
    """As scripts.choose_size does for GPUs that are not here."""
    ranks, name, memory = parse_gpus(plan)
    gpu = datasheet_gpu(name)

    def rows_that_fit(most: int, depth: int, checkpointing: bool) -> int:
        how = config_of(depth), BF16, "cuda", True, ranks
        return largest_rows(memory * GIB, most, *how, checkpointing=checkpointing)

    return ranks, gpu, choose_size(ranks, gpu, rows_that_fit)


def costs() -> str:
    lines = []
    for plan in MACHINES:
        ranks, gpu, choice = planned(plan)
        whole = cost(choice, ranks, gpu)
        lines.append([plan, choice.depth, choice.rows, f"{whole.rate:,.0f}", f"{whole.mfu:.0%}",
                      f"{whole.hours:.1f} to {SLOWER * whole.hours:.1f}",
                      f"{whole.least:.0f} to {whole.most:.0f}", whole.dollars(ranks, 2.5), disk(choice.depth)])
    return markdown_table(["`--plan`", "depth", "rows", "tokens/s", "MFU", "hours: pretraining", "all stages",
                           "cost at $2.5 per GPU and hour", "GiB of disk"], lines)


def published() -> str:
    lines = []
    for name, depth, vocab_size, rows, seconds in (
            ("nanochat, run 6", 24, 32768, 16, 1.066), ("nanochat 733", 22, 32768, 16, 0.882),
            ("nanochat 830", 22, 49152, 32, 0.924)):
        config = config_from_depth(depth, vocab_size, LENGTH, arch="modern")
        step = step_time(config, rows, 64 // rows, 8, datasheet_gpu("H100"), True)
        parts = [f"{1e3 * part:.0f}" for part in step]
        lines.append([name, depth, f"{vocab_size:,}", rows, *parts, f"{step.seconds:.3f}", f"{seconds:.3f}",
                      f"{step.seconds / seconds - 1:+.1%}"])
    return markdown_table(["run", "depth", "vocabulary", "rows", "ms: products", "attention", "passes", "launches",
                           "Muon", "here, estimated, s", "published, s", "difference"], lines)


def minutes() -> str:
    columns = []
    for plan in (MACHINES[0], MACHINES[1], MACHINES[3], MACHINES[4]):
        ranks, gpu, choice = planned(plan)
        config = config_of(choice.depth)
        run = pretraining(config, ranks, choice.rows, SIZES[choice.depth].ratio)
        fast = gpu.name in FP8_GPUS
        eight = fast and config.n_embd >= MIN_WIDTH
        seconds = []
        for fp8, flash in ((False, FLASH2), (eight, FLASH2), (eight, 1.0)):
            step = step_time(config, choice.rows, run.micro_steps, ranks, gpu, fp8)
            seconds.append(step.seconds + step.attention * (1 / flash - 1) * fast)
        column = [run.steps * step / 60 for step in seconds]
        for factor in (1.04, 1.014, 99 / 97.4):
            column.append(column[-1] / factor)
        columns.append(column)
    names = ["bfloat16, FlashAttention 2 (fitted to a step with FlashAttention 4)",
             "8 bits in blocks and head",
             "FlashAttention 4, from Hopper on (fitted to two steps)",
             "offset keys: 0 to 4% fewer steps (here 4; see below)",
             "EMA-Nesterov: 1.4% fewer steps (modded-nanogpt 309, n = 16)", "documents apart, 1.6% (nanochat 663)"]
    lines = [[name, *(f"{n:,.1f}" for n in values)] for name, values in zip(names, zip(*columns))]
    return markdown_table(["minutes of pretraining, after each line", "8 × H100", "1 × H100", "1 × A100, 80 GB",
                           "1 × RTX 4090"], lines)


RULES = (
    ("Take the lowest of stages 1 to 3 that fits: each keeps less and sends more. They need {1.needs}, {2.needs}, "
     "{3.needs} GB, and send {1.sends}, {2.sends}, {3.sends} a step.", "--depth=24 --gpus=8"),
    ("With Muon never stage 0, where every rank repeats all products: a step of {0.step} s, on stage 1 {2.step}.",
     "--depth=24 --gpus=64"),
    ("NVLink hides every stage: with only 2 rows stages 1 to 3 wait {1.waits}, {2.waits}, {3.waits} s of {3.step}.",
     "--depth=24 --gpus=8 --device_batch_size=2"),
    ("PCIe takes rows, or stage 1, which sends once a step: with 2 rows stages 1 to 3 wait {1.waits}, {2.waits}, "
     "{3.waits} s.", "--depth=24 --gpus=8 --device_batch_size=2 --link=pcie5"),
    ("Deep models hide stage 3 best: it waits {3.waits} of {3.step} s, and needs {3.needs} GB, stage 1 {1.needs}.",
     "--depth=48 --gpus=8 --device_batch_size=4"),
    ("If that does not fit, recompute activations: {7.needs} GB for {6.needs}, {7.step} s for {6.step}.",
     "--depth=88 --gpus=16"),
    ("A few hosts share one copy, and so Muon's products: {2.step} s a step, shared by a host {1.step}.",
     "--depth=24 --gpus=64"),
    ("Many hosts share it in parts, as a ring through all has too many messages: over 256 GPUs stage 1 waits {2.waits} "
     "s, over {7.shards} {7.waits}.", "--depth=24 --gpus=256 --device_batch_size=2 --total_batch_size=1048576"),
    ("A link that hides nothing wants a pipeline: {7.pipeline} stages wait {7.waits} s and idle {7.bubble}, one waits "
     "{2.waits}. Or a better link: MFU is {7.mfu}.", "--depth=32 --gpus=64 --between=eth10"),
    ("The batch ends it: with a row for each of 512 GPUs MFU is {7.mfu} at best.",
     "--depth=24 --gpus=512 --device_batch_size=1 --total_batch_size=1048576"),
)
Line = namedtuple("Line", "stage shards pipeline rows needs sends between waits bubble step mfu hours")


def rules() -> str:
    """Each rule with numbers of the table that its command prints, by line and column."""
    lines = []
    for rule, settings in RULES:
        printed = io.StringIO()
        argv, hook = patch("sys.argv", ["plan", *settings.split()]), patch("sys.excepthook")
        with argv, hook, contextlib.redirect_stdout(printed):
            runpy.run_module("scripts.plan", run_name="__main__")
        rows = [line.split(" | ") for line in printed.getvalue().splitlines() if line.startswith("| ")]
        lines.append([rule.format(*itertools.starmap(Line, rows[2:])), f"`python -m scripts.plan {settings}`"])
    return markdown_table(["rule", "command"], lines, range(2))


FORMULAS = {"gpus.md": (costs, published, minutes), "machines.md": (links, torus, hosts), "zero.md": (example,),
            "memory.md": (mfu, fits), "pipeline.md": (streams,),
            "many_gpus.md": (rules,), "two_loops.md": (rows,)}


def blocks(write: bool = False) -> dict[str, tuple[PageBlock, Callable[[], str]]]:
    """By name: each block, and what makes the text that belongs there."""
    found = {}
    for page, formulas in FORMULAS.items():
        for formula in formulas:
            name = formula.__name__
            found[name] = PageBlock(page, f"tests.page_formulas {name}", write), formula
    return found


if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if word != "--write"]
    made = blocks("--write" in sys.argv)
    if {"-h", "--help"} & set(names):
        print(f"{__doc__}\nblocks: {', '.join(made)}")
        sys.exit(0)
    for name in names:
        if name not in made:
            print(f"error: no block {name}; there is {', '.join(made)}{did_you_mean(name, made)}", file=sys.stderr)
            sys.exit(2)
    for name in names or made:
        block, formula = made[name]
        block.show(formula())
