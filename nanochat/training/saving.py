"""
Saving in the background: training waits only for a copy to host memory, not for the disk.

    main thread, every rank        wait for the previous save; copy the tensors that this rank writes
    background thread, rank 0      make the folder to fill
    background thread, every rank  write, sync and hash this rank's files
    background thread, rank 0      add meta.json, the tokenizer and the manifest; rename; remove old checkpoints

A failed save is a warning while training goes on, and an error if it was the last. After an error that ends the run on
every rank, the last whole step is saved, unless the error came in mid-update.
"""
import contextlib
import json
import os
import re
import shutil
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TextIO

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nanochat.data.tokenizer import Tokenizer
from nanochat.model.gpt_config import GPTConfig
from nanochat.optim.sharding import Sharding
from nanochat.runtime.collectives import from_rank0, gather_objects, rank_and_size
from nanochat.runtime.console import print0
from nanochat.runtime.distributed import set_timeout
from nanochat.runtime.errors import UserError, one_line
from nanochat.runtime.exits import last_acts
from nanochat.runtime.files import sha256, sync, write_folder_aside
from nanochat.training.checkpoint import (
    MODEL_FILE,
    REPLACED,
    RULES,
    claim,
    launchers,
    list_steps,
    newest_saved,
    read_meta,
    step_dir,
    steps_not_replaced,
)
from nanochat.training.metrics import Metrics
from nanochat.training.resharding import kept_state

# Between checkpoints that no setting asks for: a crash costs at most half an hour. The newest two are kept, as one may
# be damaged.
SAVE_MINUTES = 30
KEPT_BY_TIME = 2
# How long ranks wait for the slowest one's disk. A rank that dies is noticed at once: its connection closes.
SAVE_TIMEOUT = timedelta(minutes=30)
# After an exception: how long to wait for the other ranks to fail, too, and seconds to copy the tensors of a last save.
ALL_FAILED_WITHIN = timedelta(seconds=10)
COPY_TIMEOUT = 120

Files = dict[str, tuple[dict[str, Tensor], dict[str, str]]]  # by name: the tensors of a file, and its metadata


class CheckpointWriter:
    """
    Writes a run's checkpoints into `folder`, one at a time, at least every `save_minutes`, and keeps the newest
    `keep_last` (−1: all). UserError while another run writes there: the folder is this run's until `wait`, or the end
    of the process. Its first checkpoint removes those after start_step (all, if that is 0) if `overwrite` says so.
    COLLECTIVE, as are its methods: every rank calls them in the same order.
    """

    def __init__(self, folder: Path, sharding: Sharding, optimizers, tokenizer: Tokenizer, start_step: int = 0,
                 keep_last: int = -1, overwrite: bool = False, save_minutes: float = SAVE_MINUTES):
        self.folder, self.sharding, self.optimizers = folder, sharding, optimizers
        self.tokenizer, self.keep_last, self.save_minutes = tokenizer, keep_last, save_minutes
        self.start_step, self.overwrite = start_step, overwrite
        self.lock: TextIO | None = None
        self.launchers = launchers()
        # Steps saved only because time was up, also before this run was resumed.
        self.by_time: list[int] = from_rank0(self.take_folder)
        last_acts.append(self.rescue)
        self.began = time.monotonic()  # time of the newest save, or of the run's start
        self.saved = start_step        # the step of the newest save; -1: it failed
        self.state: tuple[int, Metrics, dict] | None = None  # between two steps: step, metrics and meta to save
        self.thread: threading.Thread | None = None
        self.failed: tuple[int, Exception] | None = None  # step and reason, the same on every rank
        # The thread has its own group: its messages must not mix with the main thread's.
        self.group = None
        if rank_and_size()[1] > 1:
            self.group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)

    def take_folder(self) -> list[int]:
        """Rank 0: claim the folder. Returns `by_time` as it was at start_step."""
        self.lock = claim(self.folder)
        begin = step_dir(self.folder, self.start_step)
        return read_meta(begin).get("by_time", []) if begin.exists() else []

    def mark_replaced(self) -> None:
        """
        Rank 0: mark the checkpoints that this run replaces, so that no run resumes from them; `publish` removes them.
        Without `overwrite`, steps after start_step are damaged, at least in a file of the optimizers: they are renamed.
        """
        for step in list_steps(self.folder):
            path = step_dir(self.folder, step)
            if self.start_step and step <= self.start_step:
                (path / REPLACED).unlink(missing_ok=True)
            elif self.overwrite:
                (path / REPLACED).touch()
            elif not (path / REPLACED).exists():
                kept = path.rename(f"{path}.damaged-{time.time():.0f}")
                print0(f"{path} is in the way of this run: its undamaged files are kept in {kept}")

    # --- for the training loop

    def time_is_up(self) -> bool:
        """Whether this rank asks for a checkpoint: on rank 0, `save_minutes` after the last one began."""
        return self.sharding.rank == 0 and time.monotonic() - self.began >= 60 * self.save_minutes

    def set_state(self, step: int, metrics: Metrics, **meta) -> None:
        """
        Between two steps: set the state that `checkpoint` saves. Until `clear_state`, an exception that ends the run
        saves it, too. meta: everything else that a resumed run needs, as JSON values.
        """
        self.state = step, metrics, meta

    def clear_state(self) -> None:
        """Parameters change from here to the next `set_state`: an exception in between saves nothing."""
        self.state = None

    def checkpoint(self, asked_for: bool) -> None:
        """
        Save the state, unless it has been saved: if asked for, or if rank 0 says that `save_minutes` are over. Of the
        checkpoints saved only because time was up, the newest two are kept.
        """
        step, metrics, meta = self.state
        if not (asked_for or metrics.save_requested):
            return
        with metrics.paused():
            metrics.save_requested = False
            if step > self.saved:
                if not asked_for:
                    self.by_time.append(step)
                self.save(step, meta | {"metrics_state": metrics.state, "by_time": self.by_time})

    def wait(self) -> None:
        """
        Wait for the last save, and let other runs have the folder. Raises the save's error on every rank: UserError if
        the disk refused.
        """
        self.state = None
        self.join()
        if self.lock:
            self.lock.close()
            self.lock = None
        failed, self.failed = self.failed, None
        if failed:
            step, error = failed
            if isinstance(error, OSError):
                raise UserError(self.not_saved(step, reason(error))) from error
            raise error

    # --- saving

    def save(self, step: int, meta: dict) -> None:
        """
        Begin to save folder/step_NNNNNN; parameters may change as soon as this returns. meta must be JSON; launchers
        and what `describe` knows are added to it. A kill at any moment damages nothing older.
        """
        self.join()
        self.warn("; training goes on, the next save tries again")
        meta = meta | {"launchers": self.launchers}
        self.began = time.monotonic()
        text = describe(step, self.tokenizer, self.sharding.model.config, meta)
        files = copy_to_host(self.sharding, self.optimizers)
        # Not before: an interrupted copy has saved nothing.
        self.saved = step
        # Not a daemon: when a run fails, the interpreter waits for the thread, instead of killing it in mid-write.
        self.thread = threading.Thread(target=self.write, args=(step, files, text), name="checkpoint")
        self.thread.start()

    def warn(self, consequence: str = "") -> None:
        """Say that the last save failed, if it did."""
        if self.failed:
            step, error = self.failed
            print0("warning: " + self.not_saved(step, reason(error) + consequence))
            self.failed = None

    def not_saved(self, step: int, why: str) -> str:
        return f"step {step} was not saved: {why}; {newest_saved(self.folder)}"

    def join(self, timeout: float | None = None) -> None:
        """Wait for the save under way. UserError if that takes longer than the timeout, in seconds."""
        if self.thread:
            self.thread.join(timeout)
            if self.thread.is_alive():
                raise UserError(f"the save of step {self.saved} is not finished after {timeout / 60:.0f} minutes")
            self.thread = None

    def write(self, step: int, files: Files, meta: str) -> None:
        """The thread: after a failure on one rank all ranks report that failure, and nothing half-made is left."""
        begin = publish = None
        if self.sharding.rank == 0:
            begin, publish = self.begin, self.publish
        try:
            # Rank 0's stack has the folder to fill; closing the stack publishes it.
            with contextlib.ExitStack() as stack:
                # The path is relative: hosts may mount the shared disk in different places.
                aside = self.folder / self.gather_results(begin, step, stack)[0]
                sums = self.gather_results(write_files, aside, files)
                self.gather_results(publish, step, stack, aside, sums, meta)
        # An error on any rank, or a dead rank.
        except Exception as error:
            self.failed = step, error
            self.saved = -1

    def begin(self, step: int, stack: contextlib.ExitStack) -> Path:
        """The folder to fill, within self.folder."""
        aside = stack.enter_context(write_folder_aside(step_dir(self.folder, step)))
        return aside.relative_to(self.folder)

    def publish(self, step: int, stack: contextlib.ExitStack, aside: Path, sums: list[dict], meta: str) -> None:
        """Make the filled folder a checkpoint."""
        complete(aside, sums, self.tokenizer, meta)
        stack.close()
        print0(f"saved {step_dir(self.folder, step)}")
        self.remove_old(step)

    def remove_old(self, step: int) -> None:
        """Rank 0: remove the checkpoints that this run replaces, and those before this step that are too old."""
        current = steps_not_replaced(self.folder)
        too_old = [old for old in list_steps(self.folder) if old not in current]
        steps = [old for old in current if old <= step]
        # Not all of by_time are on the disk: a save can fail.
        too_old += [old for old in self.by_time if old in steps][:-KEPT_BY_TIME]
        if self.keep_last > 0:
            too_old += steps[: -self.keep_last]
        for old in too_old:
            # On NFS a file in use cannot be removed: it is removed at the next save.
            shutil.rmtree(step_dir(self.folder, old), ignore_errors=True)

    def gather_results(self, function: Callable | None, *args) -> list:
        """
        The function's results on all ranks (None: this rank has nothing to do), on every rank. An exception on any
        rank is raised on every rank.
        """
        try:
            result = function(*args) if function else None
        except (OSError, UserError) as error:
            result = error
        # Another rank may not be able to rebuild the class, so only the text travels.
        except Exception:
            result = RuntimeError(traceback.format_exc())
        results = gather_objects(result, self.group)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def rescue(self) -> None:
        """
        After an exception that ends the run: finish the save under way, then save the state. With several ranks, only
        if all get here before the same step, and not on stage 3 of ZeRO, where parameters may be half gathered.
        """
        step = self.state[0] if self.state else -1
        # Ranks that failed at different points of a step may wait for each other when the parameters are copied.
        watchdog = threading.Timer(COPY_TIMEOUT, os._exit, [1])
        watchdog.daemon = True
        try:
            if self.thread and self.thread.is_alive():
                print0(f"finishing the save of step {self.saved} before the run ends")
            self.join(SAVE_TIMEOUT.total_seconds())
            if self.state is None or step == self.saved:
                self.warn()
                return
            if self.group:
                if self.sharding.zero_stage == 3:
                    raise UserError("on zero_stage=3 parameters may be half gathered")
                set_timeout(ALL_FAILED_WITHIN, self.group)
                if set(self.gather_results(lambda: step)) != {step}:
                    raise UserError("other ranks failed in another step")
                set_timeout(SAVE_TIMEOUT, self.group)
                watchdog.start()
            print0(f"saving step {step} before the run ends; --resume=auto continues from there")
            self.checkpoint(asked_for=True)
            # From here everything is in host memory.
            watchdog.cancel()
            self.wait()
        # A second error must not hide the first.
        except BaseException as error:
            why, say = reason(error), print0
            if self.group and not isinstance(error, UserError):
                why += "; that takes all ranks, and some have not failed, or are gone"
                # Rank 0, which usually prints, may be one of them.
                say = partial(print, flush=True)
            # The terminal may be gone.
            with contextlib.suppress(OSError):
                say("warning: " + self.not_saved(max(step, self.saved), why))
        finally:
            watchdog.cancel()


def reason(error: BaseException) -> str:
    return one_line(error) or f"{type(error).__name__}: {error}"


def save_weights(
    folder: Path, step: int, weights: dict[str, Tensor], tokenizer: Tokenizer, config: GPTConfig, meta: dict,
) -> Path:
    """
    Save folder/step_NNNNNN without training state, as an import does. Other stages can begin with it, but no run can
    resume from it. OSError if the disk refuses; a kill at any moment leaves nothing half-made.
    """
    target = step_dir(folder, step)
    with claim(folder), write_folder_aside(target) as aside:
        complete(aside, [write_files(aside, {MODEL_FILE: (weights, {})})], tokenizer,
                 describe(step, tokenizer, config, meta))
    return target


def describe(step: int, tokenizer: Tokenizer, config: GPTConfig, meta: dict) -> str:
    """The text of meta.json: `meta`, and what every checkpoint says. saved: in seconds, UTC."""
    meta = meta | {"step": step, "tokenizer": tokenizer.fingerprint, "model_config": vars(config),
                   "saved": time.time(), "rules": RULES}
    return json.dumps(meta, indent=1)


def copy_to_host(sharding: Sharding, optimizers) -> Files:
    """
    Copies of the tensors that this rank writes: the whole model on rank 0, and in one replica (of each pipeline stage)
    each rank's shards. Copies even tensors in host memory: training changes them in place. Waits for the device once
    per tensor. COLLECTIVE.
    """
    def host_copy(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True).contiguous()

    files: Files = {}
    weights = {}
    # Every rank must iterate: each tensor is gathered from all.
    for name, tensor in sharding.full_tensors():
        if sharding.rank == 0:
            weights[name] = host_copy(tensor)
    if sharding.rank == 0:
        files[MODEL_FILE] = weights, {}
    if sharding.replica == 0:
        number = sharding.pipeline_stage * sharding.shard_count + sharding.shard_rank
        kept = kept_state(sharding, optimizers)
        pieces = {name: (piece.start, piece.end) for name, piece in kept.items()}
        tensors = {name: host_copy(piece.source) for name, piece in kept.items()}
        files[f"optimizer_rank_{number:05d}.safetensors"] = tensors, {"pieces": json.dumps(pieces)}
    return files


def write_files(aside: Path, files: Files) -> dict[str, str]:
    """Write files into the folder and sync them; {file name: SHA-256}. OSError if the disk refuses."""
    sums = {}
    for name, (tensors, metadata) in files.items():
        write_tensors(aside / name, tensors, metadata)
        sync(aside / name)
        sums[name] = sha256(aside / name)
    return sums


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file. OSError if the disk refuses."""
    try:
        save_file(tensors, path, metadata)
    # safetensors hides the system's refusal in its text.
    except SafetensorError as error:
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise
    # safetensors makes files private; a checkpoint is as readable as the data.
    path.chmod(0o644)


def complete(aside: Path, sums: list[dict[str, str]], tokenizer: Tokenizer, meta: str) -> None:
    """Add the files that make a folder of weights a checkpoint. sums: SHA-256 of the files that each rank wrote."""
    (aside / "meta.json").write_text(meta)
    tokenizer.save(aside)
    manifest = {file.name: sha256(file) for file in aside.iterdir() if file.suffix != ".safetensors"}
    for rank_sums in sums:
        manifest |= rank_sums
    (aside / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True))
