"""
What a training step needs, measured beside the formulas of nanochat/plan/memory.py: the tensors, counted by PyTorch's allocator,
and whole processes of base_train, whose largest resident memory the kernel notes.

    python -m bench.memory --write     # puts the tables into docs/memory.md; Linux
"""
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from configurator import configure

import torch

from nanochat.corpus.make_dataset import ensure_dataset
from nanochat.errors import UserError
from nanochat.files import base_dir
from nanochat.gpt import config_from_depth
from nanochat.plan.memory import HEAP_WASTE, WASTE, parameter_counts, process_bytes, state_bytes, step_bytes
from bench.pages import put_into_page
from nanochat.report import markdown_table
from nanochat.plan.probes import peak_of_a_step
from nanochat.corpus.learn_tokenizer import ensure_tokenizer

write = False               # into docs/memory.md; else the tables are only printed
configure(globals())

if sys.platform != "linux":
    raise UserError("the largest resident memory is read from /proc: Linux only")

STEPS = 4  # optimizer steps of a process; a checkpoint is written in the middle
AT_ONCE = 2  # processes beside each other: their memory does not depend on it
TENSORS = (  # depth, T, rows, dtype, compiled, activation checkpointing; vocabulary 8192
    (2, 256, 1, "float32", False, False), (2, 256, 4, "float32", False, False), (2, 256, 16, "float32", False, False),
    (4, 256, 8, "float32", False, False), (4, 512, 2, "bfloat16", False, False), (6, 256, 2, "bfloat16", False, False),
    (4, 256, 8, "float32", False, True), (4, 256, 8, "float32", True, False), (2, 512, 16, "bfloat16", True, False),
)
PROCESSES = (  # the same, and the environment of the process
    (2, 256, 8, "float32", False, False, {}), (2, 256, 32, "float32", False, False, {}),
    (2, 256, 8, "float32", False, False, {"MALLOC_MMAP_THRESHOLD_": "1048576"}), (2, 256, 32, "float32", False, False, {"MALLOC_MMAP_THRESHOLD_": "1048576"}),
    (2, 256, 32, "float32", True, False, {}),
)
NAMES, WORDS = ["depth", "T", "rows", "dtype", ""], (3, 4)  # of the first columns; which of them are not numbers


def names(depth: int, T: int, rows: int, dtype: str, compiled: bool, checkpointing: bool) -> list:
    return [depth, T, rows, dtype, f"{'compiled' if compiled else 'eager'}{', checkpointing' * checkpointing}"]


def shown(line: list) -> list:
    print(*line, sep="  ", flush=True)
    return line


def tensors(depth: int, T: int, rows: int, dtype: str, compiled: bool, checkpointing: bool) -> list:
    model, kind = config_from_depth(depth, 8192, T), getattr(torch, dtype)
    formula = step_bytes(model, rows, kind, "cpu", compiled, checkpointing)
    predicted = state_bytes(2, 1, kind, *parameter_counts(model)).gradients + formula.activations + formula.transient
    measured = peak_of_a_step(model, rows, kind, compiled, checkpointing)
    return shown([*names(depth, T, rows, dtype, compiled, checkpointing), f"{measured / 1e6:,.1f}", f"{predicted / 1e6:,.1f}", f"{predicted / measured - 1:+.1%}"])


def process(run: tuple) -> list:
    *shape, environment = run
    depth, T, rows, dtype, compiled, checkpointing = shape
    with tempfile.TemporaryDirectory() as scratch:  # data and tokenizer are those of the base folder, checkpoints go
        for part in ("data", "tokenizer"):
            os.symlink(base_dir().absolute() / part, Path(scratch) / part)
        command = [
            sys.executable, "-m", "scripts.base_train", f"--depth={depth}", f"--max_seq_len={T}", f"--device_batch_size={rows}",
            f"--total_batch_size={2 * rows * T}", f"--dtype={dtype}", f"--compile={compiled}", f"--activation_checkpointing={checkpointing}",
            f"--num_iterations={STEPS}", "--save_every=2", "--eval_every=-1", "--sample_every=-1", "--device_type=cpu",
        ]
        started = subprocess.Popen(command, env=os.environ | environment | {"NANOCHAT_BASE_DIR": scratch, "OMP_NUM_THREADS": "1"},
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        peak = 0
        while started.poll() is None:
            try:
                found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{started.pid}/status").read_text())
            except OSError:
                found = None
            peak = int(found[1]) * 1024 if found else peak
            time.sleep(0.02)
    if started.returncode:
        raise UserError(f"{' '.join(command)} failed")
    tokens = ensure_tokenizer("tinyworld").get_vocab_size()
    step = step_bytes(config_from_depth(depth, tokens, T), rows, getattr(torch, dtype), "cpu", compiled, checkpointing, saving=True).total
    own, pinned = process_bytes("resident", "cpu", compiled), "MALLOC_MMAP_THRESHOLD_" in environment
    asked = own + (WASTE if compiled or pinned else HEAP_WASTE["resident"]) * step  # all tensors of these runs are small ones
    setting = "".join(f"`{key}={value}`" for key, value in environment.items()) or "-"
    return shown([*names(*shape), setting, f"{peak / 1e6:,.0f}", f"{step / 1e6:,.0f}", f"{asked / 1e6:,.0f}", f"{peak / asked:.0%}"])


ensure_dataset("tinyworld")
ensure_tokenizer("tinyworld")
text = "\n\n".join([
    f"torch {torch.__version__}, one thread; MB are 10⁶ bytes.",
    "### Tensors: the fullest moment of a step, beyond what is there between two steps",
    markdown_table([*NAMES, "measured, MB", "formula, MB", "formula off by"], [tensors(*shape) for shape in TENSORS], WORDS),
    "### Whole processes of base_train: largest resident memory",
    markdown_table([*NAMES, "environment", "measured, MB", "of them tensors, formula", "what the doctor asks for", "measured / asked for"],
          list(ThreadPoolExecutor(AT_ONCE).map(process, PROCESSES)), (*WORDS, 5)),
])
print(f"\n{text}")
if write:
    put_into_page("memory.md", "python -m bench.memory --write", text)
