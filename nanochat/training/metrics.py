"""Logging of a run: the console line, metrics.jsonl beside the checkpoints, and wandb if asked for."""
import contextlib
import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from nanochat.runtime.distributed import Stopped, print0, rank_and_size, vote
from nanochat.runtime.errors import UserError, is_rank0
from nanochat.runtime.files import write_text
from nanochat.runtime.flops import Peak
from nanochat.runtime.step_stats import StepStats
from nanochat.training.checkpoint import newest_saved
from nanochat.training.records import duration, read_metrics

EMA_DECAY = 0.9  # of the smoothed loss, per step
MEASURE_EVERY = 120  # seconds at least between measurements of a peak that no datasheet states; each takes up to 1 s


def require_wandb(run: str) -> None:
    """UserError when a run is to be logged to wandb, which is not there or not logged in. Rank 0 only."""
    if run and is_rank0():
        try:
            import wandb

            wandb.login()
        except Exception as error:  # a broken installation may raise anything
            raise UserError(f"run={run} needs wandb, which does not work here: {error}; `pip install wandb` and "
                            "`wandb login`, set WANDB_MODE=offline, or leave out --run") from None


class Metrics:
    """
    The numbers of a run. `log_step` takes a step's stats as tensors on the device and reads them one step later, when
    the device has computed them: logging never waits for the step that runs. On a CPU it reads them at once.

    Every rank reads the same sums, so every rank knows at the same step that some rank wants the run to stop
    (`stop_requested`), that it is time for a checkpoint (`save_requested`), and how many steps in a row were skipped
    because a loss or gradient was not finite (`bad_steps`). Only rank 0 prints and writes.

    total_batch_size: tokens per step over all ranks. state: `Metrics.state` of a checkpoint, to go on from.
    """

    def __init__(self, folder: Path, run: str, config: dict, start_step: int, num_iterations: int,
                 total_batch_size: int, flops_per_token: int, peak: Peak, state: dict | None = None):
        self.path = folder / "metrics.jsonl"
        self.num_iterations, self.total_batch_size = num_iterations, total_batch_size
        self.world_size = rank_and_size()[1]
        # A rate measured beside other processes is too low: the best one of the run counts.
        self.peak_flops, self.measure = peak.flops * self.world_size, peak.measure
        self.flops_per_token = flops_per_token
        self.measured = -math.inf  # soon again: the first time may have been a busy moment
        self.state = state or {"ema": 0.0, "ema_steps": 0, "elapsed": 0.0, "min_val_bpb": None, "skipped": 0}
        self.stop_requested, self.save_requested, self.bad_steps = False, False, 0
        self.pending: tuple[int, Tensor, torch.cuda.Event | None, int, dict] | None = None
        self.clock = time.perf_counter()
        self.session_steps, self.session_seconds = 0, 0.0
        self.wandb = None
        self.unwritten = ""  # records that the disk has refused so far
        if start_step >= num_iterations:
            print0(f"nothing is left to train: the checkpoint is at step {start_step} of {num_iterations}")
        if is_rank0():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            records = read_metrics(self.path) if self.path.exists() else []
            kept = [record for record in records if record["step"] < start_step]  # later steps will be logged again
            write_text(self.path, "".join(json.dumps(record) + "\n" for record in kept))
            if run:
                import wandb  # optional, and slow to import

                id_before = self.state.get("wandb")  # a resumed run continues there
                self.wandb = wandb.init(project="nanochat", name=run, config=config, id=id_before, resume="allow")
                self.state["wandb"] = self.wandb.id

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training: all steps are read and written before it, and its time counts for no step."""
        self.flush()
        yield
        self.clock = time.perf_counter()

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """
        Around what changes no parameters, such as an evaluation: all ranks leave it, and know it by `stop_requested`,
        once one of them is asked to stop. COLLECTIVE at its end.
        """
        try:
            yield
            vote(finished=True)
        except Stopped:
            self.stop_requested = True

    def log_step(self, step: int, stats: StepStats, lrm: float, tokens: int | None = None) -> None:
        """A finished optimizer step. tokens: of all ranks, where they differ from step to step."""
        self.flush()
        now = time.perf_counter()
        values, copied = stats.values, None
        if values.is_cuda:
            # A copy and an event of its own: reading them must not wait for the step that is queued behind them.
            values = torch.empty(values.shape, pin_memory=True).copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        record = {"train/lrm": lrm, "train/dt": now - self.clock}
        self.pending = step, values, copied, tokens or self.total_batch_size, record
        self.clock = now
        if copied is None:
            self.flush()
            if self.measure and time.monotonic() - self.measured >= MEASURE_EVERY:
                self.peak_flops = max(self.peak_flops, self.measure() * self.world_size)
                self.measured = time.monotonic()
                self.clock = time.perf_counter()

    def flush(self) -> None:
        """Read, print and write the step that is still pending, if there is one. Waits for the device to finish it."""
        if self.pending is None:
            return
        step, values, copied, tokens, record = self.pending
        self.pending = None
        if copied:
            copied.synchronize()  # waits for the step before the one the device is at
        loss, norm, ok, stops, saves = values.tolist()  # on the CPU by now
        state, dt = self.state, record["train/dt"]
        self.stop_requested |= stops > 0
        self.save_requested |= saves > 0
        self.bad_steps = 0 if ok else self.bad_steps + 1
        if ok:
            state["ema"] = EMA_DECAY * state["ema"] + (1 - EMA_DECAY) * loss
            state["ema_steps"] += 1
        else:
            state["skipped"] += 1
        state["elapsed"] += dt
        if self.session_steps:  # the first step of a session compiles: its time says nothing about later ones
            self.session_seconds += dt
        self.session_steps += 1
        tok_per_sec = tokens / dt
        if self.measure and not copied:  # what the run reaches, the device can; beside a GPU a step's time may be off
            self.peak_flops = max(self.peak_flops, self.flops_per_token * tok_per_sec)
        mfu = self.flops_per_token * tok_per_sec / self.peak_flops
        at_most = "at most " * bool(self.measure)
        seen = {"train/loss": loss, "train/grad_norm": norm} if ok else {"train/skipped": state["skipped"]}
        speed = {"train/tok_per_sec": tok_per_sec, "train/mfu_at_most" if at_most else "train/mfu": mfu}
        self.write({"step": step, **seen, **record, **speed})
        smoothed = state["ema"] / (1 - EMA_DECAY ** state["ema_steps"]) if state["ema_steps"] else math.nan
        left = "?"  # nothing can be said after the first step
        if self.session_steps > 1:
            left = duration(self.session_seconds / (self.session_steps - 1) * (self.num_iterations - step - 1))
        print0(
            f"step {step:05d}/{self.num_iterations:05d} ({100 * (step + 1) / self.num_iterations:5.1f}%) | "
            f"loss {smoothed:.4f} | lrm {record['train/lrm']:.2f} | {1000 * dt:,.0f} ms | {tok_per_sec:,.0f} tok/s | "
            f"mfu {at_most}{100 * mfu:.1f}% | {duration(state['elapsed'])} done, {left} left"
        )
        if not ok:
            skipped = f"({state['skipped']} so far)"
            print0(f"step {step:05d}: skipped on every rank: loss or gradient is not finite {skipped}")

    def log_validation(self, step: int, bpb: float) -> None:
        best = self.state["min_val_bpb"]
        self.state["min_val_bpb"] = bpb if best is None else min(best, bpb)
        self.log(step, {"val/bpb": bpb})
        print0(f"step {step:05d}/{self.num_iterations:05d} | validation {bpb:.4f} bits per byte")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Any other measurement; names are <kind>/<what>, and a step has one record of a kind."""
        self.write({"step": step, **values})

    def write(self, record: dict) -> None:
        if is_rank0():
            warned = bool(self.unwritten)
            self.unwritten += json.dumps(record) + "\n"
            try:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(self.unwritten)
                self.unwritten = ""
            except OSError as error:  # a full disk, most often, where a line is worth less than the run
                if not warned:
                    print0(f"warning: {self.path} cannot be written: {error.strerror}; the run goes on, and writes it "
                           f"when it can; {newest_saved(self.path.parent)}")
                    self.unwritten = "\n" + self.unwritten  # part of it may be there: a line of its own
            if self.wandb:
                self.wandb.log(record, step=record["step"])

    def close(self) -> None:
        self.flush()
        print0(f"peak memory: {peak_memory():.1f} GiB")
        if self.wandb:
            self.wandb.finish()


def peak_memory() -> float:
    """The most GiB that this process has held so far: of its GPU, what the allocator took; else of host memory."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
