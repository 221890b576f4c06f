"""
Saving in the background: training waits until what it changes is copied to host memory, not for the disk.

    main thread, every rank        wait for the save before; copy what this rank writes
    background thread, every rank  write, sync and hash these files; send the sums to rank 0
    background thread, rank 0      add meta.json, the tokenizer and the manifest; rename; prune; tell the others

A save that fails is a warning while training goes on, and an error when it was the last. What ends a run on every rank,
other than in mid-update, is followed by a save of the last whole step.
"""
import contextlib
import json
import os
import re
import shutil
import socket
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from errno import ENOENT
from pathlib import Path
from typing import NoReturn, TextIO

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nanochat.checkpoint import (
    MODEL_FILE, OPTIMIZER_FILE, UNSEEN, claim, discard_after, find_checkpoint, job, list_steps, lock_path, random_states, step_dir,
)
from nanochat.distributed import from_rank0, print0
from nanochat.errors import UserError, last_acts, one_line
from nanochat.files import make_folder_aside, publish_folder, sha256, sync
from nanochat.gpt import GPTConfig
from nanochat.metrics import Metrics
from nanochat.resharding import counters, kept_state
from nanochat.tokenizer import Tokenizer
from nanochat.zero import Sharding

PATIENCE = timedelta(minutes=30)  # with the slowest rank's disk; a rank that dies is noticed at once
# After an exception on this rank, seconds in which the others must have one as well, and in which a save must have
# copied what it writes: what is on its way between ranks then may never arrive.
ALL_FAILED_WITHIN, COPIED_WITHIN = 10, 120
KEPT_BY_TIME = 2  # checkpoints that nothing but `save_minutes` asked for: newer ones take their place

Files = dict[str, tuple[dict[str, Tensor], dict[str, tuple[int, int]]]]  # by file: its tensors, and the pieces they are


class CheckpointWriter:
    """
    Writes the checkpoints of a run into `folder`, one at a time, keeping the newest `keep_last` (−1: all); one at least
    every `save_minutes` (−1: only when asked for). UserError while another run writes there: the folder is this one's
    until `wait`, or the end of the process.
    COLLECTIVE, as are its methods: every rank calls each of them in the same order.
    """

    def __init__(self, folder: Path, sharding: Sharding, optimizers, tokenizer: Tokenizer, start_step: int = 0,
                 keep_last: int = -1, save_minutes: float = -1, overwrite: bool = False):
        self.folder, self.sharding, self.optimizers = folder, sharding, optimizers
        self.tokenizer, self.keep_last, self.save_minutes = tokenizer, keep_last, save_minutes
        self.lock: TextIO | None = None
        self.owner = f"host {socket.gethostname()}, process {os.getpid()}, job {job()}"
        if problem := from_rank0(self.why_not_ours):
            raise UserError(problem)
        if overwrite:
            from_rank0(discard_after, folder, start_step)
        last_acts.append(self.rescue)
        self.began = time.monotonic()     # the newest save, or the run
        self.saved = start_step           # the step of the newest save
        self.by_time: list[int] = []
        self.whole: tuple[int, Metrics, dict] | None = None  # what `stand_by` was told, until `begin_update`
        self.thread: threading.Thread | None = None
        self.failed: tuple[int, Exception] | None = None  # step and reason, the same on every rank
        # A group for the thread alone: in a shared one its messages would mix with those of the main thread.
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if several else None

    def why_not_ours(self) -> str | None:
        """Rank 0: take the folder, or make sure of it; who has it instead."""
        path = lock_path(self.folder)
        try:
            if self.lock is None or not path.exists():
                self.lock = claim(self.folder)
                self.lock.truncate(0)
                self.lock.write(self.owner)
                self.lock.flush()
        except UserError as error:
            return str(error)
        there = path.read_text(encoding="utf-8")  # where locks do not work, another run may have come and written
        return None if there == self.owner else f"{self.folder} was taken over by another run ({there}); this one can save nothing there any more"

    def time_is_up(self) -> bool:
        """Whether this rank asks for a checkpoint: on rank 0, `save_minutes` after the last one began."""
        return self.sharding.rank == 0 and 0 < self.save_minutes <= (time.monotonic() - self.began) / 60

    def stand_by(self, step: int, metrics: Metrics, meta: dict) -> None:
        """
        Between two steps: what `checkpoint` saves. From here to `begin_update` an exception that ends the run saves it, too.
        meta: what JSON can hold, to continue from.
        """
        self.whole = step, metrics, meta

    def checkpoint(self, by_time: bool = False) -> None:
        """
        Save what `stand_by` was told, unless it has been saved. by_time: `save_minutes` alone asks for it; the newest two of
        those are kept.
        """
        step, metrics, meta = self.whole
        metrics.save_requested = False
        if step > self.saved:
            if by_time:
                self.by_time.append(step)
            self.save(step, meta | {"metrics_state": metrics.state})

    def begin_update(self) -> None:
        """Parameters change from here to the next `stand_by`: an exception in between saves nothing."""
        self.whole = None

    def give_up(self, reason: str) -> NoReturn:
        """UserError on every rank, once the save under way is finished: the reason, and where the last good checkpoint is."""
        self.wait()
        there = from_rank0(list_steps, self.folder)
        good = f"the last good checkpoint is {find_checkpoint(self.folder)}" if there else "there is no checkpoint yet"
        raise UserError(f"{reason}; {good}; try lower learning rates, a longer warmup or grad_clip=1")

    def rescue(self) -> None:
        """
        For a run that an exception ends: finish the save under way, then save what `stand_by` was told. Nothing if
        another rank has no exception, or where ranks stopped in the middle of gathering parameters (stage 3).
        """
        try:
            if self.thread:
                self.thread.join(timeout=20 if self.group else None)  # nearly written, perhaps
            if self.whole is None or self.whole[0] == self.saved and not self.failed:
                return
            if self.group and (self.sharding.stage == 3 or self.thread and self.thread.is_alive()):
                return
            step, metrics, meta = self.whole
            watchdog = threading.Timer(COPIED_WITHIN, os._exit, [1])
            if self.group:
                watchdog.daemon = True
                watchdog.start()
                try:  # monitored_barrier would heed its timeout on rank 0 only
                    dist.barrier(self.group, async_op=True).wait(timedelta(seconds=ALL_FAILED_WITHIN))
                except RuntimeError:
                    watchdog.cancel()
                    raise UserError("that takes all ranks, and some have not failed, or are gone") from None
            steps = self.gather(step)
            if self.broadcast(set(steps) if self.sharding.rank == 0 else None) != {step}:
                return
            print0(f"saving step {step} before the run ends")
            metrics.flush()
            self.save(step, meta | {"metrics_state": metrics.state})
            watchdog.cancel()
            self.wait()
        except BaseException as error:  # a second one must not hide the first
            with contextlib.suppress(OSError):
                print(f"warning: step {self.whole[0] if self.whole else 0} was not saved: {reason(error)}", flush=True)

    def save(self, step: int, meta: dict) -> None:
        """
        Begin to save folder/step_NNNNNN; what is saved may change as soon as this returns. meta must be JSON; step,
        model and random states are added to it. A kill at any moment costs nothing older.
        """
        self.join()
        if self.failed:
            print0(f"warning: step {self.failed[0]} was not saved: {reason(self.failed[1])}; training goes on, the next save tries again")
            self.failed = None
        meta = meta | {"step": step, "job": job(), "rng": random_states(), "model_config": vars(self.sharding.model.config)}
        self.began = time.monotonic()
        aside = self.broadcast(outcome(self.make_room, step) if self.sharding.rank == 0 else None)
        if isinstance(aside, Exception):
            self.saved = step  # an attempt that `rescue` repeats only where the disk refused
            if isinstance(aside, UserError):
                raise aside
            self.failed = step, aside
            return
        files = copy_to_host(self.sharding, self.optimizers)
        # Not a daemon: at the end of a run that fails the interpreter waits for it, instead of killing it in mid-write.
        self.thread = threading.Thread(target=self.write, args=(step, aside, files, json.dumps(meta, indent=1)), name="checkpoint")
        self.thread.start()
        self.saved = step  # not before: what interrupts the copy has saved nothing

    def wait(self) -> None:
        """
        Return when the last save is finished, and let other runs have the folder. Raises on every rank what made it
        fail: OSError when the disk refused.
        """
        self.join()
        if self.lock:
            self.lock.close()
            self.lock = None
        if self.failed:
            (_, error), self.failed = self.failed, None
            raise error

    def join(self) -> None:
        if self.thread:
            self.thread.join()
            self.thread = None

    def write(self, step: int, aside: Path, files: Files, meta: str) -> None:
        """The thread: whatever happens on one rank, all end with the same outcome, and without debris."""
        result = outcome(write_files, aside, files)
        try:
            gathered = self.gather(result)
            failure = self.broadcast(outcome(self.publish, step, aside, gathered, meta) if self.sharding.rank == 0 else None)
        except Exception as error:  # the connection is lost: another rank has died
            failure = error
        if self.sharding.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)  # it has its final name by now, unless something failed
        self.failed = (step, failure) if failure else None

    def make_room(self, step: int) -> Path:
        """Rank 0: the folder to fill. UserError where another run has taken over."""
        if problem := self.why_not_ours():
            raise UserError(problem)
        return make_room(step_dir(self.folder, step))

    def publish(self, step: int, aside: Path, gathered: list[dict[str, str] | Exception], meta: str) -> None:
        """Rank 0: make the filled folder a checkpoint, then remove all but the newest `keep_last` up to this one."""
        sums: dict[str, str] = {}
        for part in gathered:
            if isinstance(part, Exception):
                raise part
            sums |= part
        complete(aside, sums, self.tokenizer, meta)
        if problem := self.why_not_ours():
            raise UserError(problem)
        publish_folder(aside, step_dir(self.folder, step))
        too_old = [there for there in list_steps(self.folder) if there <= step][: -self.keep_last] if self.keep_last > 0 else []
        by_time = [there for there in self.by_time if step_dir(self.folder, there).exists()]  # a save can have failed
        for old in (*too_old, *by_time[:-KEPT_BY_TIME]):
            shutil.rmtree(step_dir(self.folder, old), ignore_errors=True)  # what is in use (NFS) goes next time
        print0(f"saved {step_dir(self.folder, step)}")

    def gather(self, result) -> list:
        """Every rank's result, on rank 0."""
        if self.group is None:
            return [result]
        gathered = [None] * self.sharding.world_size if self.sharding.rank == 0 else None
        dist.gather_object(result, gathered, dst=0, group=self.group)
        return gathered

    def broadcast(self, result):
        """Rank 0's result, on every rank."""
        box = [result]
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


def make_room(target: Path) -> Path:
    """A folder to fill beside the target; what killed saves left there is removed."""
    for debris in target.parent.glob(".step_*.tmp-*"):
        shutil.rmtree(debris)
    return make_folder_aside(target)


def complete(aside: Path, sums: dict[str, str], tokenizer: Tokenizer, meta: str) -> None:
    """Add to the weights in a folder what makes it a checkpoint. sums: SHA-256 of the files that were already hashed."""
    (aside / "meta.json").write_text(meta, encoding="utf-8")
    tokenizer.save(aside)
    sums = sums | {file.name: sha256(file) for file in aside.iterdir() if file.name not in sums}
    (aside / "manifest.json").write_text(json.dumps(sums, indent=1, sort_keys=True), encoding="utf-8")


def save_weights(folder: Path, step: int, weights: dict[str, Tensor], tokenizer: Tokenizer, config: GPTConfig, meta: dict) -> Path:
    """
    Save folder/step_NNNNNN without a state of training: what an import leaves. The other stages can begin with it,
    no run can go on from it. OSError when the disk refuses; a kill at any moment leaves nothing half-made.
    """
    target = step_dir(folder, step)
    # No job wrote it, and no run that is restarted shall take it for its own.
    meta = meta | {"step": step, "job": "", "tokenizer": tokenizer.fingerprint, "model_config": vars(config)}
    with claim(folder):
        aside = make_room(target)
        try:
            complete(aside, write_files(aside, {MODEL_FILE: (weights, {})}), tokenizer, json.dumps(meta, indent=1))
            publish_folder(aside, target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    return target


def copy_to_host(sharding: Sharding, optimizers) -> Files:
    """
    Copies of what this rank writes: the whole model on rank 0, and in one replica each rank's slices. COLLECTIVE.
    Waits for the device once per tensor; training goes on when all of them are in host memory.
    """
    files: Files = {}
    whole = {name: host_copy(tensor) for name, tensor in sharding.whole_tensors() if sharding.rank == 0}  # all ranks iterate
    if sharding.rank == 0:
        files[MODEL_FILE] = whole, {}
    if sharding.replica == 0:
        kept = kept_state(sharding, optimizers) | (counters(optimizers) if sharding.shard_rank == 0 else {})
        tensors = {name: host_copy(part.tensor) for name, part in kept.items()}
        files[OPTIMIZER_FILE.format(sharding.shard_rank)] = tensors, {name: (part.start, part.end) for name, part in kept.items()}
    return files


def host_copy(tensor: Tensor) -> Tensor:
    """A copy also of what is in host memory already: training goes on and changes it in place."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def write_files(aside: Path, files: Files) -> dict[str, str]:
    """Write what `copy_to_host` returned into the folder, to the disk; {file name: SHA-256}. OSError when the disk refuses."""
    if not aside.exists():
        raise FileNotFoundError(ENOENT, UNSEEN, str(aside))
    sums = {}
    for name, (tensors, pieces) in files.items():
        write_tensors(aside / name, tensors, {"pieces": json.dumps(pieces)})
        sync(aside / name)
        sums[name] = sha256(aside / name)
    return sums


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file. OSError when the disk refuses."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # hides the system's refusal in its text
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise
    path.chmod(0o644)  # safetensors makes files private; a checkpoint is as readable as what it was trained on


def outcome(function: Callable, *args):
    """What the function returns, or its exception: a value that can be sent to the other ranks."""
    try:
        return function(*args)
    except (OSError, UserError) as error:
        return error
    except Exception as error:  # of any class, which another rank may not be able to rebuild
        failure = RuntimeError(f"{type(error).__name__}: {error}")
        failure.add_note(traceback.format_exc())
        return failure


def reason(error: BaseException) -> str:
    return one_line(error) or f"{type(error).__name__}: {error}"
