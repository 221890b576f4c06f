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
from bench.machines import LINKS, Cluster, Layout, plan_step
from nanochat.model.gpt_config import GPTConfig, config_from_depth
from nanochat.plan.memory import GIB, counted, largest_rows, needed_bytes, shaped
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


def rows_in(memory: float, config: GPTConfig, most: int, *settings) -> int:
    return largest_rows(most, lambda rows: needed_bytes(config, rows, BF16, *settings) <= memory * GIB)


def fits() -> str:
    configs = {depth: config_from_depth(depth, 32768, LENGTH, arch="modern") for depth in (12, 16, 20, 24)}
    lines = []
    for size in (12, 24, 80, 141):
        line = [f"{size} GB"]
        for config in configs.values():
            rows, more = (rows_in(size, config, 64, 1, twice) or "none" for twice in (False, True))
            line.append(f"{rows} ({more})")
        lines.append(line)
    sizes = {depth: sum(counted(config).units) / 1e6 for depth, config in configs.items()}
    columns = [f"depth {depth} ({size:,.0f} M parameters)" for depth, size in sizes.items()]
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
            least, most = re.findall(r"in all ([\d.]+) to ([\d.]+) hours", printed)[0]
            dollars = re.findall(r"cost .* to (\S+)", printed)[0]
            no_rl = "*" if steps == "0" else ""
            line.append(f"{depth}{no_rl}: {least}–{most}, {dollars}")
        lines.append(line)
    return markdown_table(["GPU", "$ an hour", "`--hours=1`", "`--hours=2`", "`--hours=4`"], lines, range(5))


def costs() -> str:
    """The lines from depth 22 to 12."""
    printed = printed_by("scripts.plan", "--gpus=8", "--gpu=H100")
    lines = [line for line in printed.splitlines() if line.startswith("--depth")]
    return "\n".join(["```", *lines[:6], "```"])


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


FORMULAS = {links: "machines.md", fits: "memory.md", costs: "gpus.md", one_gpu: "renting.md", published: "gpus.md",
            rules: "many_gpus.md"}


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
    for name in names or made:
        block, formula = made[name]
        block.show(formula())
