"""
What a training step needs, measured beside the formulas of nanochat/plan/memory.py: the tensors, counted by PyTorch's
allocator, on one rank and on several; and whole processes of base_train, whose largest resident memory the kernel
notes.

    python -m bench.memory --write     # puts the tables into docs/memory.md; Linux
"""
import os
import subprocess
import sys

from configurator import configure

import torch

from bench.harness import on_ranks, peak_of, scratch_base, show
from nanochat.compiling import set_compile
from nanochat.distributed import gather_objects
from nanochat.errors import UserError
from nanochat.gpt import GPT
from nanochat.gpt_config import GPTConfig, config_from_depth
from nanochat.optimizers import setup_optimizers
from nanochat.pipeline import Pipeline
from nanochat.plan.memory import moments, needed_bytes, step_bytes
from nanochat.plan.probes import set_up_training, train_step
from nanochat.report import markdown_table
from nanochat.tokenizer import get_tokenizer
from nanochat.zero import Sharding

write = False               # into docs/memory.md; else the tables are only printed
configure(globals())

TENSORS = (  # depth, T, rows, dtype, compiled, activation checkpointing; vocabulary 8192; classic, then modern
    (2, 256, 1, "float32", False, False), (2, 256, 4, "float32", False, False), (2, 256, 16, "float32", False, False),
    (4, 256, 8, "float32", False, False), (4, 512, 2, "bfloat16", False, False), (6, 256, 2, "bfloat16", False, False),
    (4, 256, 8, "float32", False, True), (4, 256, 8, "float32", True, False), (2, 512, 16, "bfloat16", True, False),
)
MODERN = (
    (4, 256, 8, "float32", False, False), (4, 256, 8, "float32", True, False), (2, 512, 16, "bfloat16", True, False),
)
RANKS = (  # ranks, ZeRO's stage, pipeline stages, micro-steps; depth 4, T 256, 4 rows each, float32, eager, classic
    *((2, stage, 1, micro_steps) for stage in range(4) for micro_steps in (1, 2)),
    *((4, stage, 1, 2) for stage in range(4)), (2, 1, 2, 4), (4, 1, 2, 4), (4, 1, 4, 4), (4, 1, 4, 8),
)
PROCESSES = (8, False), (32, False), (8, True), (32, True)  # rows, compiled; depth 2, T 256


def peak_of_a_process(rows: int, compiled: bool) -> int:
    """Largest resident bytes of a base_train of four steps; a checkpoint is written in the middle."""
    settings = dict(device_type="cpu", dtype="float32", compile=compiled, depth=2, max_seq_len=256, num_iterations=4,
                    device_batch_size=rows, total_batch_size=2 * rows * 256, save_every=2, eval_every=-1,
                    sample_every=-1, model_tag="bench", overwrite=True)
    command = [sys.executable, "-m", "scripts.base_train", *(f"--{name}={value}" for name, value in settings.items())]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise UserError(f"failed: {' '.join(command)}")
    return usage.ru_maxrss * 1024


def peak_of_a_step(config: GPTConfig, rows: int, dtype: torch.dtype, compiled: bool, checkpointing: bool) -> int:
    """
    Bytes of tensors at the fullest moment of a training step on this CPU, as PyTorch's allocator counts them, beyond
    what is there between two steps (weights, masters, moments).
    """
    training = set_up_training(config, dtype, torch.device("cpu"), compiled=set_compile(compiled, "cpu"))
    training[0].activation_checkpointing = checkpointing
    tokens = torch.randint(0, config.vocab_size, (rows, config.sequence_len + 1))
    train_step(*training, tokens, micro_steps=2)
    return peak_of(lambda: train_step(*training, tokens, micro_steps=2))


def peaks_on_ranks(
    rank: int, ranks: int, config: GPTConfig, rows: int, stage: int, pipeline_stages: int, micro_steps: int
) -> list[int]:
    """The same as `peak_of_a_step`, in float32 and eager, on each rank."""
    set_compile(False, "cpu")
    with torch.device("meta"):
        model = GPT(config)
    pipeline = Pipeline(model, pipeline_stages, stage, rank, ranks)
    model.to_empty(device="cpu")
    model.init_weights(0)
    cpu = torch.device("cpu")
    sharding = Sharding(model, model.units(), cpu, torch.float32, stage, pipeline_stages=pipeline_stages)
    training = model, sharding, setup_optimizers(model, sharding)
    pipeline.connect(sharding, micro_steps, rows)
    in_flight = micro_steps if pipeline_stages > 1 else 1
    tokens = torch.randint(config.vocab_size, (in_flight * rows, config.sequence_len + 1))

    def step() -> None:
        train_step(*training, tokens, micro_steps // in_flight, pipeline, in_flight)
        sharding.wait_for_params()  # base_train leaves that to the next forward pass

    step()
    return gather_objects(peak_of(step))


processes, tensors, of_ranks = [], [], []
with scratch_base(vocab_size=8192):  # processes first: one that is started by a larger one begins as large
    config = config_from_depth(2, get_tokenizer("tinyworld").get_vocab_size(), 256, arch="modern")
    for rows, compiled in PROCESSES:
        peak = peak_of_a_process(rows, compiled)
        step = sum(step_bytes(config, rows, torch.float32, "cpu", compiled))
        asked = needed_bytes(config, rows, torch.float32, "cpu", compiled)
        processes.append([rows, "compiled" if compiled else "eager", f"{peak / 1e6:,.0f}",
                          f"{step / 1e6:,.0f}", f"{asked / 1e6:,.0f}", f"{peak / asked:.0%}"])
for arch, (depth, length, rows, dtype, compiled, checkpointing) in [
    *(("classic", setting) for setting in TENSORS), *(("modern", setting) for setting in MODERN),
]:
    config, kind = config_from_depth(depth, 8192, length, arch=arch), getattr(torch, dtype)
    formula = step_bytes(config, rows, kind, "cpu", compiled, checkpointing)
    predicted = sum(formula) - formula.kept - formula.saving
    measured = peak_of_a_step(config, rows, kind, compiled, checkpointing)
    how = f"{arch}, {'compiled' if compiled else 'eager'}{', checkpointing' * checkpointing}"
    tensors.append([depth, length, rows, dtype, how, f"{measured / 1e6:,.1f}", f"{predicted / 1e6:,.1f}",
                    f"{predicted / measured - 1:+.1%}"])
config = config_from_depth(4, 8192, 256, arch="classic")
for ranks, stage, stages, micro_steps in RANKS:
    peaks = on_ranks(ranks, peaks_on_ranks, config, 4, stage, stages, micro_steps)
    for number in range(stages):
        measured = max(peaks[ranks // stages * number : ranks // stages * (number + 1)])
        found = moments(config, 4, torch.float32, "cpu", False, stage=stage, ranks=ranks // stages,
                        micro_steps=micro_steps, pipeline=(number, stages))
        predicted = max(sum(moment) - moment.kept - moment.saving for moment in found.values())
        of_ranks.append([ranks, stage, f"{number + 1} of {stages}", micro_steps, f"{measured / 1e6:,.1f}",
                         f"{predicted / 1e6:,.1f}", f"{predicted / measured - 1:+.1%}"])
show("\n\n".join([
    f"torch {torch.__version__}, one thread; MB are 10⁶ bytes.",
    "### Tensors: the fullest moment of a step, beyond what is there between two steps",
    markdown_table(["depth", "T", "rows", "dtype", "", "measured, MB", "formula, MB", "formula off by"],
                   tensors, (3, 4)),
    "### The same on several ranks: the fullest rank of each pipeline stage; depth 4, T 256, 4 rows, classic, eager",
    markdown_table(["ranks", "zero_stage", "pipeline stage", "micro-steps", "measured, MB", "formula, MB",
                    "formula off by"], of_ranks, (0, 1, 2, 3)),
    "### Whole processes of base_train, depth 2, T 256, float32: largest resident memory",
    markdown_table(["rows", "", "measured, MB", "of them tensors, formula", "what the doctor asks for",
                    "measured / asked for"], processes, (1,)),
]), "memory.md", "bench.memory", write)
