"""
Saving in the background: training waits only for a copy to host memory, not for the disk.

    main thread, every rank        wait for the previous save; copy the tensors that this rank writes
    background thread, every rank  write, sync and hash this rank's files, into a hidden folder
    background thread, rank 0      add meta.json, the tokenizer and the manifest; rename; remove old checkpoints

A failed save is a warning while training goes on, and an error if it was the last. An exception costs what a kill
costs: at most the steps since the last save.
"""
import json
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
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
from nanochat.runtime.errors import FREE_SPACE, UserError, one_line
from nanochat.runtime.files import put_in_place, sha256, sync, write_folder_aside
from nanochat.training.checkpoint import (
    MODEL_FILE,
    REPLACED,
    RULES,
    claim,
    list_steps,
    newest_saved,
    step_dir,
    steps_not_replaced,
)
from nanochat.training.resharding import kept_state

# Between checkpoints that no setting asks for: a crash costs at most half an hour. The newest two are kept, as one may
# be damaged.
SAVE_MINUTES = 30
KEPT_BY_TIME = 2
# How long ranks wait for the slowest one's disk. A rank that dies is noticed at once: its connection closes.
SAVE_TIMEOUT = timedelta(minutes=30)

Files = dict[str, tuple[dict[str, Tensor], dict[str, str]]]  # by name: the tensors of a file, and its metadata


class CheckpointWriter:
    """
    Writes a run's checkpoints into `folder`, one at a time, and keeps the newest `keep_last` (−1: all). UserError while
    another run writes there: the folder is this run's until `wait`, or the end of the process. COLLECTIVE, as are its
    methods: every rank calls them in the same order.

    start_step: 0, or the step that is resumed. by_time: its steps saved only because time was up. overwrite: the first
    checkpoint removes those after start_step (all, if that is 0), see `mark_replaced`.
    """

    def __init__(self, folder: Path, sharding: Sharding, optimizers, tokenizer: Tokenizer, start_step: int = 0,
                 by_time: list[int] | None = None, keep_last: int = -1, overwrite: bool = False):
        self.folder, self.sharding, self.optimizers, self.tokenizer = folder, sharding, optimizers, tokenizer
        self.start_step, self.by_time = start_step, list(by_time or [])
        self.keep_last, self.overwrite = keep_last, overwrite
        self.lock: TextIO | None = None
        from_rank0(self.take_folder)
        self.began = time.monotonic()  # time of the newest save, or of the run's start
        self.saved = start_step        # the step of the newest save; -1: it failed
        # Its thread is no daemon: without torchrun the interpreter of a run that fails waits for it.
        self.executor = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future | None = None
        # The thread has its own group: its messages must not mix with the main thread's.
        self.group = None
        if rank_and_size()[1] > 1:
            self.group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)

    def take_folder(self) -> None:
        self.lock = claim(self.folder)

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

    def time_is_up(self) -> bool:
        """Whether this rank asks for a checkpoint: on rank 0, SAVE_MINUTES after the last one began."""
        return self.sharding.rank == 0 and time.monotonic() - self.began >= 60 * SAVE_MINUTES

    def save(self, step: int, meta: dict, by_time: bool = False) -> None:
        """
        Begin to save folder/step_NNNNNN, unless it is saved; parameters may change as soon as this returns. meta must
        be JSON. by_time: only because time was up; of those the newest two are kept. A kill at any moment damages
        nothing older.
        """
        try:
            self.join()
        except Exception as error:
            print0(f"warning: {error}; training goes on, the next save tries again")
        if step <= self.saved:
            return
        if by_time:
            self.by_time.append(step)
        self.began = time.monotonic()
        text = meta_text(step, self.tokenizer, self.sharding.model.config, meta | {"by_time": self.by_time})
        files = copy_to_host(self.sharding, self.optimizers)
        self.saved = step
        self.writing = self.executor.submit(self.write, step, files, text)

    def wait(self) -> None:
        """Let other runs have the folder, after the last save. Raises what `join` raises."""
        try:
            self.join()
        finally:
            if self.lock:
                self.lock.close()

    def join(self) -> None:
        """Wait for the save under way. If it has failed: UserError if the disk refused, else RuntimeError."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    # --- the thread

    def write(self, step: int, files: Files, meta: str) -> None:
        """After a failure on one rank all ranks know it, and nothing half-made is left."""
        target = step_dir(self.folder, step)
        # All ranks know the name. `claim` has removed what an earlier run left there.
        aside = target.with_name(f".{target.name}.tmp-save")
        try:
            sums = self.results(write_files, aside, files)
            failed = self.results(self.publish, aside, target, sums, meta)[0]
        # A rank has died.
        except Exception as error:
            failed = RuntimeError(error)
        # Checkpoints that the run replaces anyway must not cost it its own.
        if FREE_SPACE in str(failed) and self.results(lambda: self.sharding.rank == 0 and self.remove_old())[0]:
            return self.write(step, files, meta)
        if failed:
            self.saved = -1
            raise type(failed)(f"step {step} was not saved: {failed}; {newest_saved(self.folder)}")

    def publish(self, aside: Path, target: Path, sums: list, meta: str) -> None:
        """Rank 0: make the filled folder a checkpoint, unless a rank has an error instead of its files' sums."""
        if self.sharding.rank != 0:
            return
        try:
            for of_rank in sums:
                if isinstance(of_rank, Exception):
                    raise of_rank
            complete(aside, sums, self.tokenizer, meta)
            put_in_place(aside, target)
        except Exception:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        print0(f"saved {target}")
        self.remove_old()

    def results(self, function: Callable, *args) -> list:
        """What the function returns or raises on each rank, on every rank."""
        try:
            result = function(*args)
        # Another rank may not be able to rebuild the class, so only the text travels.
        except Exception as error:
            line = one_line(error)
            result = UserError(line) if line else RuntimeError(traceback.format_exc())
        return gather_objects(result, self.group)

    def remove_old(self) -> bool:
        """Rank 0: remove the checkpoints that this run replaces, and its own that are too old; whether any went."""
        there, own = list_steps(self.folder), steps_not_replaced(self.folder)
        # Not all of by_time are on the disk: a save can fail.
        too_old = [step for step in self.by_time if step in own][:-KEPT_BY_TIME]
        if self.keep_last > 0:
            too_old += own[: -self.keep_last]
        for step in there:
            if step in too_old or step not in own:
                # On NFS a file in use cannot be removed: it is removed at the next save.
                shutil.rmtree(step_dir(self.folder, step), ignore_errors=True)
        return list_steps(self.folder) != there


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
                 meta_text(step, tokenizer, config, meta))
    return target


def meta_text(step: int, tokenizer: Tokenizer, config: GPTConfig, meta: dict) -> str:
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
    aside.mkdir(parents=True, exist_ok=True)
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
