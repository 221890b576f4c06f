"""
Real training steps: how long one takes, and how many rows fit.

    python -m nanochat.plan.step_trial JSON      # as `try_steps` runs it; prints what it returns

A step may kill its process (out of memory, a segmentation fault, a CUDA error that poisons the context), so each trial
runs in its own process, which ends itself after TIMEOUT.
"""
import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nanochat.data.batch_shape import document_offsets
from nanochat.model.compile import compile_model
from nanochat.model.gpt import GPT, model_without_memory
from nanochat.model.gpt_config import LARGE_DEPTH, GPTConfig
from nanochat.optim.optimizers import setup_optimizers
from nanochat.optim.recipe import LONG_RUN, Recipe
from nanochat.optim.sharding import Sharding
from nanochat.optim.zero import shard_model
from nanochat.plan.memory import largest_rows
from nanochat.runtime.compiling import set_compile
from nanochat.runtime.console import print0
from nanochat.runtime.devices import synchronize
from nanochat.runtime.distributed import compute_cleanup, set_up
from nanochat.runtime.errors import UserError
from nanochat.runtime.exits import install_one_line_errors

# Seconds: every rank compiles a whole model, perhaps with an empty cache.
TIMEOUT = 900
STEPS = 9
# Share of a GPU's free memory that a trial may take: a long run fragments more memory.
FREE_SHARE = 0.95


# ---- A step, as base_train makes it

def set_up_training(
    config: GPTConfig, dtype: torch.dtype, device: torch.device, zero_stage: int = 2, recipe: Recipe | None = None,
) -> tuple[GPT, Sharding, tuple]:
    """(model, sharding, optimizers), not compiled; `device` may be "meta". recipe: None: that of a long run."""
    model = model_without_memory(config)
    weights = None if device.type == "meta" else partial(model.draw, seed=0)
    sharding = shard_model(model, model.units(), device, dtype, zero_stage, weights=weights)
    recipe = recipe or (LONG_RUN if config.n_layer >= LARGE_DEPTH else Recipe())
    return model, sharding, setup_optimizers(model, sharding, recipe.unembedding_lr, recipe.embedding_lr,
                                             weight_decay=recipe.weight_decay, ema_nesterov=recipe.ema_nesterov)


def whole_rows(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A batch of `train_step` from (rows, T + 1) tokens. Each row is one document: masks take their usual time."""
    inputs = tokens[:, :-1].contiguous()
    return inputs, tokens[:, 1:].contiguous(), document_offsets([], *inputs.shape).to(inputs.device)


def train_step(model: GPT, sharding: Sharding, optimizers: Iterable, batches: Sequence[tuple]) -> None:
    """One optimizer step. batches: (inputs, targets, cu_seqlens, …) of each micro-step, as a loader gives them."""
    for number, (inputs, targets, cu_seqlens, *_) in enumerate(batches, 1):
        with sharding.accumulate(last=number == len(batches)):
            loss = model(inputs, targets, cu_seqlens=cu_seqlens)
            (loss / len(batches)).backward()
    stats = sharding.reduce_and_clip(loss)
    for optimizer in optimizers:
        optimizer.step(stats)
    sharding.all_gather_params()


# ---- In a process of its own

def try_steps(
    config: GPTConfig, rows: int, checkpointing: bool = False, ranks: int = 1, micro_steps: int = 1
) -> float:
    """
    Milliseconds of a training step with `rows` rows on each rank: on this machine's best device, in the dtype that
    suits it, compiled if it can be. UserError, in one line, if it fails.
    """
    settings = [dataclasses.asdict(config), rows, checkpointing, micro_steps]  # of `main`
    launcher = []
    if ranks > 1:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"]
    command = [sys.executable, "-m", *launcher, "nanochat.plan.step_trial", json.dumps(settings)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    if done.returncode == 0:
        return float(done.stdout.split()[-1])
    lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]  # negative: the number of a signal
    # torchrun writes more after the error of a rank
    errors = [line for line in lines if "out of memory" in line or "SIGKILL" in line or line.startswith("error: ")]
    problem = (errors or lines)[-1].removeprefix("error: ")
    if done.returncode == -signal.SIGKILL or "SIGKILL" in problem:
        problem = "out of memory: the system ended it"
    raise UserError(f"a training step with device_batch_size={rows} fails: {problem}")


def rows_that_train(most: int, config: GPTConfig, checkpointing: bool, ranks: int) -> int:
    """
    The largest power of two of rows up to `most` with which training steps do not run out of memory here, by trial; 0:
    none. UserError if a step fails for another reason.
    """
    def fit(rows: int) -> bool:
        try:
            # In the second micro-step the memory also holds the first one's gradients.
            try_steps(config, rows, checkpointing, ranks, micro_steps=2)
        except UserError as error:
            if "out of memory" not in str(error):
                raise
            return False
        return True

    return largest_rows(most, fit)


def main(config: dict, rows: int, checkpointing: bool, micro_steps: int) -> None:
    """Run STEPS steps; the first one compiles. Prints the milliseconds of the fastest of the others."""
    _, _, device, dtype = set_up("", "auto")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(FREE_SHARE * free / total)
    model, sharding, optimizers = set_up_training(GPTConfig(**config), dtype, device)
    model.activation_checkpointing = checkpointing
    if set_compile(True, device.type):
        compile_model(model)
    tokens = torch.randint(0, model.config.vocab_size, (rows, model.config.sequence_len + 1), device=device)
    batches = [whole_rows(tokens)] * micro_steps
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        train_step(model, sharding, optimizers, batches)
        synchronize(device)
        times.append(time.perf_counter() - began)
    print0(1000 * min(times[1:]))
    compute_cleanup()


if __name__ == "__main__":
    signal.alarm(TIMEOUT)
    settings = json.loads(sys.argv[1])
    install_one_line_errors({"device_batch_size": settings[1]})
    main(*settings)
