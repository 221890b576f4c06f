"""
What formulas alone say on the pages, each between marks. test_runs.py compares the pages with it.

    python -m tests.page_formulas                  # prints all of it, in a minute
    python -m tests.page_formulas links --write    # puts a block into its page; without a name all
"""
import contextlib
import io
import itertools
import math
import re
import runpy
import sys
from collections import namedtuple
from collections.abc import Callable
from unittest.mock import patch

import torch

from bench.harness import PageBlock
from bench.machines import LINKS, Cluster, Layout, collectives, plan_step
from nanochat.data.batch_shape import BatchShape
from nanochat.model.gpt_config import GPTConfig, config_from_depth
from nanochat.plan.memory import GIB, counted, largest_rows, needed_bytes, shaped, state_bytes
from nanochat.plan.step_time import step_time
from nanochat.runtime.errors import UserError
from nanochat.runtime.flops import datasheet_gpu
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
            step = plan_step(CONFIGS["modern"], Cluster(8, 8, link, link), Layout(stage, 8, 8, 4), RATE)
            line.append(f"{1e3 * step.within / link.bandwidth:,.0f}")
        for config in CONFIGS.values():
            seconds = sum(counted(config).units) * 7 / 8 / link.bandwidth  # to send a byte of each parameter
            backward = LENGTH * shaped(config).estimate_flops() / RATE * 2 / 3
            line += [math.ceil(n * seconds / backward) for n in (4, 6)]
        lines.append(line)
    return markdown_table(["link", "sends, ms: stage 1", "stage 2", "stage 3", "rows, classic: stage 2", "stage 3",
                           "rows, modern: stage 2", "stage 3"], lines)


def hosts() -> str:
    """2 hosts with 4 GPUs each, AdamW only, 4 micro-steps: what a parameter costs."""
    lines = []
    cluster = Cluster(8, 4, LINKS["nvlink4"], LINKS["ndr"])
    for stage in (1, 2, 3):
        line = []
        for shards in (8, 4):
            sent = [(c.times, cluster.sent(c)) for c in collectives(stage, shards, 8 // shards, 4, BF16, 1, 0, 0)]
            line += [sum(state_bytes(stage, shards, BF16, 1, 0)), *(sum(n * s[i] for n, s in sent) for i in (0, 1))]
        lines.append([stage, *(f"{n:.2f}" for n in line)])
    return markdown_table(["stage", "all 8 ranks: keeps", "sends within", "between", "shard_size=4: keeps",
                           "sends within", "between"], lines)


def ranks() -> str:
    """The numbers of the ranks on the same hosts, and their groups with --shard_size=4."""
    lines, mesh = [], torch.arange(8).view(2, 4)  # (replica, shard)
    for rank in range(8):
        host, local_rank = divmod(rank, 4)
        groups = [" ".join(map(str, group.tolist())) for group in (mesh[host], mesh[:, local_rank])]
        lines.append([rank, local_rank, host, f"`cuda:{local_rank}`", *groups])
    return markdown_table(["rank", "local rank", "host", "device", "with `--shard_size=4` it shares a copy with",
                           "and adds gradients with"], lines, (3, 4, 5))


def example() -> str:
    """GB of a rank for 7.5 billion parameters. The paper's column is its figure 1."""
    counts, lines = (1, 4, 16, 64, 256, 1024), []
    for stage, paper in enumerate((16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64)):  # arXiv:1910.02054
        ours = [7.5 * sum(state_bytes(stage, ranks, BF16, 1, 0)) for ranks in counts]
        lines.append([stage, *(f"{n:.1f}" for n in (*ours, 7.5 * paper))])
    return markdown_table(["stage", "1 rank", *counts[1:], "paper, 64"], lines)


def rows() -> str:
    """The rows of a step of eight, as the loader gives them to ranks and micro-steps."""
    lines = []
    for ranks, micro_steps, size in ((1, 1, 8), (1, 2, 4), (2, 1, 4), (2, 2, 2), (4, 1, 2), (4, 2, 1)):
        line = [""] * 4
        for rank in range(ranks):
            shape = BatchShape(size, 1, rank, ranks)
            own = [shape.of_this_rank(step) for step in shape.micro_steps([*"01234567"])]
            line[rank] = " / ".join(map(" ".join, own))
        lines.append([f"{ranks} × {micro_steps} × {size}", *line])
    return markdown_table(["ranks × micro-steps × rows", *(f"rank {rank}" for rank in range(4))], lines, range(5))


def rows_in(memory: float, config: GPTConfig, checkpointing: bool) -> int:
    return largest_rows(64, lambda rows: needed_bytes(config, rows, BF16, 1, checkpointing) <= memory * GIB)


def fits() -> str:
    configs = {depth: config_from_depth(depth, 32768, LENGTH, arch="modern") for depth in (12, 16, 20, 24)}
    lines = []
    for size in (12, 24, 80, 141):
        line = [f"{size} GB"]
        for config in configs.values():
            rows, more = (rows_in(size, config, twice) or "none" for twice in (False, True))
            line.append(f"{rows} ({more})")
        lines.append(line)
    columns = [f"depth {depth} ({sum(counted(config).units) / 1e6:,.0f} M parameters)"
               for depth, config in configs.items()]
    return markdown_table(["GPU memory", *columns], lines)


def printed_by(module: str, *settings: str) -> str:
    """What a command prints, or its error."""
    printed = io.StringIO()
    argv, hook = patch("sys.argv", [module, *settings]), patch("sys.excepthook")
    with argv, hook, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        try:
            runpy.run_module(module, run_name="__main__")
        except UserError as error:
            return str(error)
    return printed.getvalue()


def one_gpu() -> str:
    lines = []
    for name in ("H100", "A100,80", "A100,40", "RTX PRO 6000", "RTX A6000", "RTX 4090", "RTX 3090", "L4", "V100", "T4"):
        line = [name, f"{datasheet_gpu(name).price:.2f}"]
        for hours in (1, 2, 4):
            printed = printed_by("scripts.plan", "--gpus=1", f"--gpu={name}", f"--hours={hours}")
            too_long = re.search(r"takes up to ([\d.]+)", printed)
            if too_long:
                line.append(f"({too_long[1]})")
                continue
            depth, steps = re.findall(r"DEPTH=(\d+) .* RL=(\d+)", printed)[0]
            least, most = re.findall(r"in all ([\d.]+)–([\d.]+) hours", printed)[0]
            dollars = re.findall(r"cost .* to (\S+)", printed)[0]
            no_rl = "*" if steps == "0" else ""
            line.append(f"{depth}{no_rl}: {least}–{most}, {dollars}")
        lines.append(line)
    return markdown_table(["GPU", "$ an hour", "`--hours=1`", "`--hours=2`", "`--hours=4`"], lines, range(5))


def costs() -> str:
    """Hours of each stage on eight GPUs, and dollars."""
    printed = printed_by("scripts.plan", "--gpus=8", "--gpu=H100")
    return "\n".join(["```", *re.findall("^(?:in all|cost) .*", printed, re.MULTILINE), "```"])


# Steps on eight H100: a run or pull request, depth, vocabulary, rows, seconds.
PUBLISHED = (("nanochat, run 6", 24, 32768, 16, 1.066), ("nanochat 733", 22, 32768, 16, 0.882),
             ("nanochat 830", 22, 49152, 32, 0.924))


def published() -> str:
    lines = []
    for name, depth, vocab_size, rows, seconds in PUBLISHED:
        config = config_from_depth(depth, vocab_size, LENGTH, arch="modern")
        step = step_time(config, rows, 64 // rows, 8, datasheet_gpu("H100"), True)
        parts = [f"{1e3 * part:.0f}" for part in step]
        lines.append([name, depth, f"{vocab_size:,}", rows, *parts, f"{step.seconds:.3f}", f"{seconds:.3f}",
                      f"{step.seconds / seconds - 1:+.1%}"])
    return markdown_table(["run", "depth", "vocabulary", "rows", "ms: products", "attention", "passes", "launches",
                           "Muon", "here, estimated, s", "published, s", "difference"], lines)


RULES = (
    ("Take the lowest of stages 1 to 3 that fits: each keeps less and sends more. They need {1.needs}, {2.needs}, "
     "{3.needs} GB, and send {1.sends}, {2.sends}, {3.sends} a step.", "--gpus=8 --depth=24"),
    ("With Muon never stage 0, where every rank repeats all products: a step of {0.step} s, on stage 1 {2.step}.",
     "--gpus=64 --depth=24"),
    ("NVLink hides every stage: with only 2 rows stages 1 to 3 wait {1.waits}, {2.waits}, {3.waits} s of {3.step}.",
     "--gpus=8 --depth=24 --device_batch_size=2"),
    ("PCIe takes rows, or stage 1, which sends once a step: with 2 rows stages 1 to 3 wait {1.waits}, {2.waits}, "
     "{3.waits} s.", "--gpus=8 --depth=24 --device_batch_size=2 --link=pcie5"),
    ("Deep models hide stage 3 best: it waits {3.waits} of {3.step} s, and needs {3.needs} GB, stage 1 {1.needs}.",
     "--gpus=8 --depth=48 --device_batch_size=4"),
    ("If that does not fit, recompute activations: {7.needs} GB for {6.needs}, {7.step} s for {6.step}.",
     "--gpus=16 --depth=88"),
    ("A few hosts share one copy, and so Muon's products: {2.step} s a step, shared by a host {1.step}.",
     "--gpus=64 --depth=24"),
    ("Many hosts share it in parts, as a ring through all has too many messages: over 256 GPUs stage 1 waits {2.waits} "
     "s, over {7.shards} {7.waits}.",
     "--gpus=256 --depth=24 --device_batch_size=2"),
    ("A link that hides nothing wants a pipeline: {7.pipeline} stages wait {7.waits} s and idle {7.bubble}, one waits "
     "{2.waits}. Or a better link: MFU is {7.mfu}.", "--gpus=64 --depth=32 --between=eth10"),
    ("The batch ends it: with a row for each of 512 GPUs MFU is {7.mfu} at best.",
     "--gpus=512 --depth=24 --device_batch_size=1"),
)
Line = namedtuple("Line", "stage shards rows micro_steps recompute pipeline needs sends between waits bubble step mfu")


def rules() -> str:
    """Each rule with numbers of the table that its command prints, by line and column."""
    lines = []
    for rule, settings in RULES:
        printed = printed_by("bench.layouts", *settings.split())
        rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
        lines.append([rule.format(*itertools.starmap(Line, rows[2:])), f"`python -m bench.layouts {settings}`"])
    return markdown_table(["rule", "command"], lines, range(2))


FORMULAS = {links: "machines.md", hosts: "machines.md", ranks: "machines.md", example: "zero.md", rows: "two_loops.md",
            fits: "memory.md", costs: "gpus.md", one_gpu: "renting.md", published: "gpus.md", rules: "many_gpus.md"}


def blocks(write: bool = False) -> dict[str, tuple[PageBlock, Callable[[], str]]]:
    """By name: each block, and what makes the text that belongs there."""
    found = {}
    for formula, page in FORMULAS.items():
        name = formula.__name__
        found[name] = PageBlock(page, f"tests.page_formulas {name}", write), formula
    return found


if __name__ == "__main__":
    made = blocks("--write" in sys.argv)
    names = [word for word in sys.argv[1:] if word != "--write"]
    if unknown := set(names) - set(made):
        sys.exit(f"error: {', '.join(unknown)}: expected one of {', '.join(made)}")
    for name in names or made:
        block, formula = made[name]
        block.show(formula())
