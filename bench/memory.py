"""
What a training step needs, measured beside the formulas of nanochat/plan/memory.py: the tensors, counted by PyTorch's
allocator, and whole processes of base_train, whose largest resident memory the kernel notes.

    python -m bench.memory --write     # puts the tables into docs/memory.md; Linux
"""
import os
import subprocess
import sys

from configurator import configure

import torch

from bench.harness import peak_of, scratch_base, show
from nanochat.compiling import set_compile
from nanochat.errors import UserError
from nanochat.gpt import GPTConfig, config_from_depth
from nanochat.plan.memory import needed_bytes, step_bytes
from nanochat.plan.probes import set_up_training, train_step
from nanochat.report import markdown_table
from nanochat.tokenizer import get_tokenizer

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


processes, tensors = [], []
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
show("\n\n".join([
    f"torch {torch.__version__}, one thread; MB are 10⁶ bytes.",
    "### Tensors: the fullest moment of a step, beyond what is there between two steps",
    markdown_table(["depth", "T", "rows", "dtype", "", "measured, MB", "formula, MB", "formula off by"],
                   tensors, (3, 4)),
    "### Whole processes of base_train, depth 2, T 256, float32: largest resident memory",
    markdown_table(["rows", "", "measured, MB", "of them tensors, formula", "what the doctor asks for",
                    "measured / asked for"], processes, (1,)),
]), "memory.md", "bench.memory", write)
