"""Logging of a run: the console line, metrics.jsonl beside the checkpoints, and wandb if asked for."""
import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat.runtime.collectives import from_rank0, rank_and_size
from nanochat.runtime.console import is_rank0, print0
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir, write_text
from nanochat.runtime.stopping import Stopped, vote
from nanochat.training.checkpoint import newest_saved
from nanochat.training.records import duration, read_metrics

# Decay per step of the smoothed loss: a mean over about ten steps.
EMA_DECAY = 0.9
# A run ends after this many steps in a row without a finite loss and gradient: it will not recover.
MAX_BAD_STEPS = 10


class Metrics:
    """
    The numbers of a run. `log_step` takes a step's numbers as a tensor on the device and reads it one step later, when
    the device has computed it: logging never waits for the running step. On a CPU it reads the tensor at once.

    Every rank reads the same sums, so every rank knows at the same step that some rank wants the run to stop
    (`stop_requested`), that it is time for a checkpoint (`save_requested`), and how many steps in a row were skipped
    because a loss or gradient was not finite (`bad_steps`). Only rank 0 prints and writes.

    total_batch_size: tokens per step over all ranks. state: `Metrics.state` of a checkpoint to resume. UserError
    for a checkpoint beyond the run's end: its results would belong to no run. Until `begin_file` records are only
    collected: a run that fails at its start leaves the log of the run before.
    """

    def __init__(self, folder: Path, config: dict, start_step: int, num_iterations: int,
                 total_batch_size: int, flops_per_token: int, peak_flops: float, state: dict | None = None):
        self.path = folder / "metrics.jsonl"
        self.num_iterations, self.total_batch_size = num_iterations, total_batch_size
        self.peak_flops = peak_flops * rank_and_size()[1]
        self.flops_per_token = flops_per_token
        self.state = state or {"ema": 0.0, "elapsed": 0.0, "min_val_bpb": None, "skipped": 0}
        self.stop_requested = self.save_requested = False
        self.bad_steps = 0
        self.pending: tuple[int, Tensor, torch.cuda.Event | None, dict] | None = None
        self.clock = time.perf_counter()
        self.wandb: Any = None
        self.unwritten = ""   # lines of the log that are not in its file so far
        self.begun = False    # `begin_file` was called
        self.replaced = False  # the file is this run's
        if start_step > num_iterations:
            raise UserError(f"this run would have {num_iterations} steps, but the checkpoint is at step {start_step}: "
                            f"--num_iterations={start_step} takes it as finished; --overwrite without --resume starts "
                            "over")
        if start_step == num_iterations:
            print0(f"nothing is left to train: the checkpoint is at step {start_step} of {num_iterations}")
        from_rank0(self.open, start_step, config)

    def open(self, start_step: int, config: dict) -> None:
        """Rank 0: read the log that a resumed run continues, and begin wandb's."""
        records = read_metrics(self.path) if self.path.exists() else []
        # Later steps will be logged again.
        self.unwritten = "".join(json.dumps(record) + "\n" for record in records if record["step"] < start_step)
        if run := config["run"]:
            try:
                import wandb  # optional, and slow to import

                # A resumed run continues under its id.
                self.wandb = wandb.init(project="nanochat", name=run, config=config, id=self.state.get("wandb"),
                                        resume="allow", dir=os.environ.get("WANDB_DIR") or base_dir())
            # A broken installation may raise anything.
            except Exception as error:
                raise UserError(f"run={run} needs wandb, which does not work here: {error}; `pip install wandb` and "
                                "`wandb login`, set WANDB_MODE=offline, or leave out --run") from None
            self.state["wandb"] = self.wandb.id

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around saves and evaluations: all steps are logged first, and the time inside counts for no step."""
        self.flush()
        yield
        self.clock = time.perf_counter()

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """
        Around an evaluation, which changes no parameters: once one rank is asked to stop, all ranks leave it, and
        `stop_requested` is set. COLLECTIVE at its end.
        """
        try:
            yield
            vote(finished=True)
        except Stopped:
            self.stop_requested = True

    def raise_if_diverged(self, step: int) -> None:
        """UserError on every rank after MAX_BAD_STEPS bad steps in a row: it names the last good checkpoint."""
        if self.bad_steps >= MAX_BAD_STEPS:
            raise UserError(f"loss or gradient not finite in {MAX_BAD_STEPS} steps in a row, up to step {step}; "
                            f"{newest_saved(self.path.parent)}; try lower learning rates or a longer warmup")

    def log_step(self, step: int, values: Tensor, lrm: float, tokens: int = 0) -> None:
        """
        Log a finished optimizer step. values: (5,) mean loss, gradient norm, 1 if both are finite, ranks that ask to
        stop and to save. tokens: over all ranks, if they differ from step to step.
        """
        self.flush()
        now = time.perf_counter()
        copied = None
        if values.is_cuda:
            # A copy and an event for each step: reading must not wait for the step that is queued behind them.
            values = torch.empty(values.shape, pin_memory=True).copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        dt = now - self.clock
        tokens = tokens or self.total_batch_size
        # In fine-tuning an upper bound: padding counts, and on a CPU what the last block leaves out (`GPT.forward`).
        rate = self.flops_per_token * tokens / dt
        # No device exceeds its peak. A peak measured beside other processes was too low: from here the run's best rate
        # counts. So the MFU shown on a CPU is an upper bound.
        self.peak_flops = max(self.peak_flops, rate)
        record = {"train/steps": self.num_iterations, "train/lrm": lrm, "train/dt": dt,
                  "train/tok_per_sec": tokens / dt, "train/mfu": rate / self.peak_flops}
        self.pending = step, values, copied, record
        self.clock = now
        if copied is None:
            self.flush()

    def flush(self) -> None:
        """Read, print and write the step that is still pending, if there is one. Waits for the device to finish it."""
        if self.pending is None:
            return
        step, values, copied, record = self.pending
        self.pending = None
        if copied:
            # Waits for the step before the one that the device computes now.
            copied.synchronize()
        loss, norm, ok, stops, saves = values.tolist()  # on the CPU by now
        state, dt = self.state, record["train/dt"]
        self.stop_requested |= stops > 0
        self.save_requested |= saves > 0
        state["elapsed"] += dt
        if ok:
            self.bad_steps = 0
            state["ema"] = EMA_DECAY * state["ema"] + (1 - EMA_DECAY) * loss
            record |= {"train/loss": loss, "train/grad_norm": norm}
        else:
            self.bad_steps += 1
            state["skipped"] += 1
            record["train/skipped"] = state["skipped"]
            print0(f"step {step:05d}: skipped on every rank: loss or gradient is not finite "
                   f"({state['skipped']} so far)")
        self.log(step, record)
        # The average began at zero; without any finite loss it is still unknown.
        weight = 1 - EMA_DECAY ** (step + 1 - state["skipped"])
        smoothed = state["ema"] / weight if weight else math.nan
        # Too long at first: the first step compiles.
        left = state["elapsed"] / (step + 1) * (self.num_iterations - step - 1)
        print0(
            f"step {step:05d}/{self.num_iterations:05d} ({100 * (step + 1) / self.num_iterations:5.1f}%) | "
            f"smoothed loss {smoothed:.4f} | lrm {record['train/lrm']:.2f} | {1000 * dt:,.0f} ms | "
            f"{record['train/tok_per_sec']:,.0f} tok/s | mfu {100 * record['train/mfu']:.1f}% | "
            f"{duration(state['elapsed'])} done, {duration(left)} left"
        )

    def log_validation(self, step: int, bpb: float, floor: float | None = None) -> None:
        """floor: entropy of the corpus in bits per byte, if known."""
        self.state["min_val_bpb"] = min(self.state["min_val_bpb"] or math.inf, bpb)
        values = {"val/bpb": bpb}
        if floor:
            values["val/floor"] = floor
        self.log(step, values, f"validation {bpb:.4f} bits per byte")

    def log(self, step: int, values: dict[str, Any], line: str = "") -> None:
        """Log measurements; names are <kind>/<what>, and a step has one record per kind. line: printed after them."""
        if line:
            print0(f"step {step:05d}/{self.num_iterations:05d} | {line}")
        if not is_rank0():
            return
        self.unwritten += json.dumps({"step": step, "time": time.time()} | values) + "\n"
        if self.begun:
            self.write()
        if self.wandb:
            self.wandb.log(values, step=step)

    def write(self) -> None:
        """Append what is not in the file so far. A full disk does not end the run: the next record tries again."""
        try:
            if self.replaced:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(self.unwritten)
            else:
                write_text(self.path, self.unwritten)
            self.unwritten, self.replaced = "", True
        except OSError as error:
            if not self.unwritten.startswith("\n"):
                print0(f"warning: {self.path} cannot be written: {error.strerror}; the run goes on, and writes it "
                       f"when it can; {newest_saved(self.path.parent)}")
                # Part of it may be in the file: the next try begins a new line.
                self.unwritten = "\n" + self.unwritten

    def begin_file(self) -> None:
        """Rank 0: from here the file is the log of this run."""
        self.begun = True
        self.write()

    def results(self) -> dict[str, float | str]:
        """The rows of a training stage in the summary of the report."""
        rows = {"training minutes": self.state["elapsed"] / 60, "peak memory, GiB": peak_memory()}
        if self.state["min_val_bpb"] is not None:
            rows["best validation bits per byte"] = self.state["min_val_bpb"]
        return rows

    def close(self) -> None:
        self.flush()
        print0(f"peak memory: {peak_memory():.1f} GiB")
        if self.wandb:
            self.wandb.finish()


def peak_memory() -> float:
    """The most GiB that this process has held so far: on a GPU, taken by the allocator; else of host memory."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved() / 2**30
    # macOS counts bytes, Linux KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
