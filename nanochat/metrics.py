"""What a run tells: the console line, metrics.jsonl beside the checkpoints, wandb when asked for. Rank 0 only."""
import json
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.distributed import is_rank0, print0
from nanochat.errors import UserError
from nanochat.files import write_text
from nanochat.flops import Peak
from nanochat.zero import StepStats

EMA_DECAY = 0.9  # of the smoothed loss, per step
MEASURE_EVERY = 120  # seconds at least between measurements of a peak that no datasheet tells; each takes one or two on a CPU


def require_wandb(run: str) -> None:
    """UserError when a run is to be logged to wandb, which is not there or not logged in. Rank 0 only."""
    if run and is_rank0():
        try:
            import wandb

            wandb.login()
        except Exception as error:  # a broken installation may raise anything
            raise UserError(f"run={run} needs wandb, which does not work here: {error}; "
                            "`pip install wandb` and `wandb login`, set WANDB_MODE=offline, or leave out --run") from None


class Metrics:
    """
    StepStats are handed over as they lie on the device and read one step late, when the device is long done with them:
    logging never waits. `pause` reads the one still held back. On a CPU there is nothing to wait for.

    Every rank reads them, so that all know at the same step of `stop_requested`, `save_requested` and `bad_in_a_row`.
    """

    def __init__(self, folder: Path, run: str, config: dict, start_step: int, num_iterations: int,
                 total_batch_size: int, flops_per_token: int, peak: Peak, state: dict | None = None):
        self.path = folder / "metrics.jsonl"
        self.num_iterations, self.total_batch_size = num_iterations, total_batch_size
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        # Of all ranks. What is measured beside another process is too little: the best rate over the run counts.
        self.flops_per_token, self.peak_flops, self.measure = flops_per_token, peak.flops * self.world_size, peak.measure
        self.measured = time.monotonic()
        self.state = state or {"ema": 0.0, "ema_steps": 0, "elapsed": 0.0, "min_val_bpb": None, "skipped": 0}
        self.stop_requested, self.save_requested, self.bad_in_a_row = False, False, 0
        self.pending: tuple[int, Tensor, torch.cuda.Event | None, int, dict] | None = None
        self.clock, self.paused = time.perf_counter(), False
        self.session_steps, self.session_seconds = 0, 0.0
        self.wandb = None
        if is_rank0():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = [record for record in read_metrics(self.path) if record["step"] < start_step] if self.path.exists() else []
            write_text(self.path, "".join(json.dumps(record) + "\n" for record in kept))  # the rest is to come again
            if run:
                import wandb

                self.wandb = wandb.init(project="nanochat", name=run, config=config, id=self.state.get("wandb"), resume="allow")
                self.state["wandb"] = self.wandb.id  # a resumed run goes on there

    def pause(self) -> None:
        """Something else than training follows, until `resume`; every step so far is read and written."""
        self.flush()
        self.paused = True
        if self.measure and time.monotonic() - self.measured >= MEASURE_EVERY:
            self.peak_flops = max(self.peak_flops, self.measure() * self.world_size)
            self.measured = time.monotonic()

    def resume(self) -> None:
        """Training goes on: the time of a pause belongs to no step."""
        if self.paused:
            self.clock, self.paused = time.perf_counter(), False

    def log_step(self, step: int, stats: StepStats, lrm: float, tokens: int | None = None) -> None:
        """A finished optimizer step, of so many tokens over all ranks where they are not those of every step."""
        self.flush()
        now = time.perf_counter()
        values, copied = stats.values, None
        if values.is_cuda:
            # Its own copy and event: reading it later must not wait for the step that was queued behind it.
            values = torch.empty(values.shape, pin_memory=True).copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self.pending = step, values, copied, tokens or self.total_batch_size, {"train/lrm": lrm, "train/dt": now - self.clock}
        self.clock = now
        if copied is None:
            self.flush()

    def flush(self) -> None:
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
        self.bad_in_a_row = 0 if ok else self.bad_in_a_row + 1
        if ok:
            state["ema"] = EMA_DECAY * state["ema"] + (1 - EMA_DECAY) * loss
            state["ema_steps"] += 1
        else:
            state["skipped"] += 1
        state["elapsed"] += dt
        if self.session_steps:  # the first step of a session compiles: it says nothing about the ones to come
            self.session_seconds += dt
        self.session_steps += 1
        tok_per_sec = tokens / dt
        if self.measure and not copied:  # what the run reaches, the device can; beside a GPU a step's time may be off
            self.peak_flops = max(self.peak_flops, self.flops_per_token * tok_per_sec)
        mfu = self.flops_per_token * tok_per_sec / self.peak_flops
        at_most = "at most " * bool(self.measure)
        seen = {"train/loss": loss, "train/grad_norm": norm} if ok else {"train/skipped": state["skipped"]}
        self.write({"step": step, **seen, **record, "train/tok_per_sec": tok_per_sec, "train/mfu_at_most" if at_most else "train/mfu": mfu})
        smoothed = state["ema"] / (1 - EMA_DECAY ** state["ema_steps"]) if state["ema_steps"] else math.nan
        # No forecast from the first step, which compiles.
        left = minutes(self.session_seconds / (self.session_steps - 1) * (self.num_iterations - step - 1)) if self.session_steps > 1 else "?"
        print0(
            f"step {step:05d}/{self.num_iterations:05d} ({100 * (step + 1) / self.num_iterations:5.1f}%) | loss {smoothed:.4f} | "
            f"lrm {record['train/lrm']:.2f} | {1000 * dt:,.0f} ms | {tok_per_sec:,.0f} tok/s | mfu {at_most}{100 * mfu:.1f}% | "
            f"{minutes(state['elapsed'])} done, {left} left"
        )
        if not ok:
            print0(f"step {step:05d}: skipped on every rank, for loss or gradient is not finite ({state['skipped']} skipped so far)")

    def log_validation(self, step: int, bpb: float) -> None:
        best = self.state["min_val_bpb"]
        self.state["min_val_bpb"] = bpb if best is None else min(best, bpb)
        self.log(step, {"val/bpb": bpb})
        print0(f"step {step:05d}/{self.num_iterations:05d} | validation {bpb:.4f} bits per byte")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Anything else that was measured; names are <kind>/<what>, and a step has one record of a kind."""
        self.write({"step": step, **values})

    def write(self, record: dict) -> None:
        if is_rank0():
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            if self.wandb:
                self.wandb.log(record, step=record["step"])

    def close(self) -> None:
        self.flush()
        if self.wandb:
            self.wandb.finish()


def read_metrics(path: Path) -> list[dict]:
    """
    The records of a metrics.jsonl in order of steps. After a resume steps repeat: the later record of a step and kind
    supersedes the earlier. A last line that a kill cut short is left out.
    """
    records: dict[tuple[int, str], dict] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut short by a kill; the resumed run wrote that step again on a line of its own
        kind = next((name.partition("/")[0] for name in record if name != "step"), "")
        records[record["step"], kind] = record
    return [records[key] for key in sorted(records)]


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"
