"""
Checkpoints: a folder per step, whole or absent, checked when it is read, and loaded on any number of ranks.

    $NANOCHAT_BASE_DIR/base_checkpoints/<model_tag>/step_000020/
        model.safetensors                    the weights in the compute dtype, whole: what inference needs
        optimizer_rank_00000.safetensors …   masters and moments, as each rank of a shard group kept them
        meta.json                            settings, shapes, positions in data and loop
        tokenizer…                           the tokenizer the weights belong to
        manifest.json                        SHA-256 of each file above; its presence makes the folder a checkpoint

saving.py writes checkpoints, and resharding.py loads the training state. Functions marked COLLECTIVE are called by
every rank, and raise on all or none.
"""
import json
import os
import re
import socket
from pathlib import Path
from typing import TextIO

import torch
from safetensors.torch import load_file

from nanochat.data.tokenizer import FILE_NAME, Tokenizer, tokenizer_dir
from nanochat.model.gpt import GPT, model_without_memory
from nanochat.model.gpt_config import GPTConfig
from nanochat.runtime.collectives import first_problem, from_rank0, rank_and_size
from nanochat.runtime.console import print0
from nanochat.runtime.distributed import hosts_may_change, was_begun
from nanochat.runtime.errors import UserError, first_line
from nanochat.runtime.files import base_dir, locked, recover_folder, sha256
from nanochat.training.records import (
    MODEL_FILE,
    SCRIPTS,
    STAGES,
    latest_checkpoint,
    list_steps,
    newest_step,
    read_meta,
    stage_of,
    step_dir,
    unfinished,
)

# Raise this number with every change of an update rule, a loss or the order of rows: a run that is resumed from another
# number's checkpoint says that its updates may differ. Version 0.1.0 kept none.
RULES = 1
# The beginnings of settings without effect on the weights of a step.
NOT_OF_TRAINING = ("run", "model_tag", "begin_from", "source_step", "overwrite", "resume", "eval_",
                   "sample_every", "save_every", "keep_last")
# An empty file in a step's folder: the run that goes on has begun to replace it. Its first checkpoint removes the step.
REPLACED = "replaced"


def checkpoint_dir(source: str, model_tag: str) -> Path:
    """The folder of all checkpoints of a training stage ("base", "mid", "sft", "rl") and tag."""
    if source not in STAGES:
        raise UserError(f"source={source} is unknown; expected one of {', '.join(STAGES)}")
    if not re.fullmatch(r"[\w.-]*", model_tag) or model_tag.startswith("."):
        raise UserError(f"model_tag={model_tag} cannot name a folder; expected letters, digits, '_', '-' and '.'")
    return base_dir() / f"{source}_checkpoints" / model_tag


def list_tags(folder: Path) -> list[str]:
    """The models of a training stage that have a checkpoint."""
    return sorted(path.name for path in folder.glob("*") if list_steps(path))


def newest_saved(folder: Path) -> str:
    """The end of a message about a failed run or save: the step to go on from."""
    steps = steps_not_replaced(folder)
    return f"the newest saved step is {step_dir(folder, steps[-1])}" if steps else f"no step is saved in {folder}"


# ---- Finding: a checkpoint is verified before it is loaded


def problem_with(checkpoint: Path, training: bool = True) -> str | None:
    """
    The first problem of a checkpoint, naming the file; None if every file matches its checksum in the manifest. Without
    `training` the optimizers' files, which only a resumed run loads, are not read. Each rank reads a share of the
    files: hashing takes as long as reading. COLLECTIVE.
    """
    rank, world_size = rank_and_size()
    name, problem = "manifest.json", None
    try:
        sums = json.loads((checkpoint / name).read_bytes())
        names = [name for name in sorted(sums) if training or not name.startswith("optimizer_rank_")]
        for name in names[rank::world_size]:
            if sha256(checkpoint / name) != sums[name]:
                problem = f"{name} does not match its checksum"
                break
    # A file is missing, or the manifest is not UTF-8 or not JSON.
    except (OSError, ValueError) as error:
        problem = f"{name} cannot be read: {first_line(error)}"
    return first_problem(problem)


def find_checkpoint(
    folder: Path, step: int | None = None, training: bool = True, among: list[int] | None = None,
) -> Path:
    """
    The checkpoint of a step, or the newest valid one (step None), of all or `among` these: damaged ones are reported
    and passed over. training: as for `problem_with`. UserError if there is none. COLLECTIVE.
    """
    there = from_rank0(list_steps, folder)
    wanted = among or there
    if step is not None:
        wanted = [step]
    for candidate in reversed(there):
        if candidate in wanted:
            path = step_dir(folder, candidate)
            problem = problem_with(path, training)
            if problem is None:
                return path
            print0(f"warning: {path}: {problem}")
    if not there:
        others = ", ".join(from_rank0(list_tags, folder.parent)) or "none"
        raise UserError(f"no valid checkpoint in {folder}; other models: {others}")
    raise UserError(f"no valid checkpoint of step {', '.join(map(str, wanted))} in {folder} "
                    f"(steps there: {', '.join(map(str, there))})")


def model_dir(source: str, model_tag: str | None) -> Path:
    """The folder of a model's checkpoints. UserError for model_tag None unless there is exactly one. COLLECTIVE."""
    folder = checkpoint_dir(source, model_tag or "")
    if model_tag is not None:
        return folder
    tags = from_rank0(list_tags, folder)
    if len(tags) != 1:
        have = ", ".join(tags) or f"python -m scripts.{SCRIPTS[source]} makes one"
        raise UserError(f"{len(tags)} models in {folder}: {have}; --model_tag chooses one")
    return folder / tags[0]


def find_model(source: str, model_tag: str | None = None, step: int | None = None) -> Path:
    """
    `find_checkpoint` for a training stage, verified for inference; source "auto": the stage trained last. Prints a note
    if the newest checkpoint is not from the run's end. COLLECTIVE.
    """
    if source == "auto":
        latest = from_rank0(latest_checkpoint, STAGES, model_tag)
        # If there is none, the error is about base models.
        source = stage_of(latest) if latest else "base"
    checkpoint = find_checkpoint(model_dir(source, model_tag), step, training=False)
    if step is None and (place := unfinished(checkpoint)):
        print0(f"note: {checkpoint} is {place}: its run was stopped, or is still going on")
    return checkpoint


def tasks_of(stage: str, model_tag: str) -> str:
    """The tasks that a model was trained on in this stage and in the stages before it, the latest first."""
    specs = []
    for earlier in reversed(STAGES[: STAGES.index(stage) + 1]):
        newest = newest_step(checkpoint_dir(earlier, model_tag))
        config = read_meta(newest).get("config", {}) if newest else {}
        specs += [config[name] for name in ("task", "tasks") if config.get(name)]
    return ", ".join(specs)


def load_checkpoint(checkpoint: Path, device: torch.device) -> tuple[GPT, Tokenizer, dict]:
    """(model, tokenizer, meta) of a verified checkpoint, in the dtype it was saved in; on "meta" without weights."""
    meta, tokenizer = read_meta(checkpoint), Tokenizer.load(checkpoint)
    model = model_without_memory(GPTConfig(**meta["model_config"]))
    if device.type != "meta":
        model.load_state_dict(load_file(checkpoint / MODEL_FILE, device=str(device)), assign=True)
    return model, tokenizer, meta


# ---- Starting a run


def choose_start(folder: Path, resume: str, overwrite: bool, resume_from_step: int = -1) -> Path | None:
    """
    The checkpoint a run continues from, or None to start from zero. UserError as for `steps_to_resume`. No checkpoint
    is removed here. COLLECTIVE.
    """
    steps = from_rank0(steps_to_resume, folder, resume, overwrite, resume_from_step)
    if not steps:
        return None
    checkpoint = find_checkpoint(folder, among=steps)
    if not any(checkpoint.glob("optimizer_rank_*.safetensors")):
        raise UserError(f"{checkpoint} has weights only, like an import: no run can go on from it; start the next "
                        "stage from it, or choose another --model_tag")
    return checkpoint


def steps_to_resume(folder: Path, resume: str, overwrite: bool, resume_from_step: int) -> list[int]:
    """
    The steps whose newest valid checkpoint a run continues from; [] to start from zero. UserError, unless `overwrite`
    is set, if checkpoints of another run, or newer than resume_from_step, are in the way. Checkpoints that an
    interrupted run was about to replace (REPLACED) count only for resume_from_step; if there are no others, that is a
    UserError, too, because a new run's first checkpoint would remove them. Rank 0 only.

    torchrun restarts ranks after a failure with the same settings. Once the first attempt has begun to train, they
    continue from its checkpoints. An elastic run cannot know whether it was begun, so --resume=auto must say it.
    """
    # A run that will be refused leaves nothing, not even the lock.
    if folder.exists():
        claim(folder).close()
    steps, current = list_steps(folder), steps_not_replaced(folder)
    if was_begun():
        return current
    if hosts_may_change() and (resume != "auto" or resume_from_step >= 0):
        raise UserError("a run whose hosts come and go starts again each time with the same settings: "
                        "it needs --resume=auto, and no --resume_from_step")
    if resume_from_step >= 0:
        newer = [step for step in current if step > resume_from_step]
        if newer and not overwrite:
            raise UserError(f"{folder} has newer checkpoints than step {resume_from_step}: "
                            f"{', '.join(map(str, newer))}; --overwrite removes them")
        return [resume_from_step]
    if steps and not current and not overwrite:
        raise UserError(f"step {', '.join(map(str, steps))} in {folder} was about to be replaced by a run with "
                        f"--overwrite that saved none: --resume_from_step={steps[-1]} (base_train), or after "
                        f"rm {folder}/step_*/{REPLACED} --resume=auto, goes on with it; --overwrite starts over")
    if resume == "auto":
        return current
    if steps and not overwrite:
        raise UserError(f"{folder} has checkpoints; continue with --resume=auto, choose another --model_tag, or "
                        "--overwrite")
    return []


def require_same_model(checkpoint: Path, meta: dict, config: GPTConfig, tokenizer: Tokenizer, data: str) -> None:
    """UserError if the model or the tokenizer of the checkpoint that a run resumes from (meta) is not the run's."""
    if meta["tokenizer"] != tokenizer.fingerprint:
        put_back = f"cp {checkpoint / FILE_NAME} {tokenizer_dir(data)}"
        raise UserError(f"{checkpoint} was trained with another tokenizer than the one of data {data!r}; "
                        f"put back its own, {put_back}, or choose another --model_tag")
    # Configs are compared: pieces without parameters leave no trace in the weights, and a default may have changed.
    if differing := dict(vars(GPTConfig(**meta["model_config"])).items() - vars(config).items()):
        raise UserError(f"{checkpoint} does not fit this run: its model has {differing}; "
                        "say so with --depth and --arch=modern,NAME=VALUE, or choose another --model_tag")


def steps_not_replaced(folder: Path) -> list[int]:
    """Steps without the mark of a run that is to replace them; the mark goes with the step's folder."""
    return [step for step in list_steps(folder) if not (step_dir(folder, step) / REPLACED).exists()]


def changed_settings(meta: dict, now: dict) -> str:
    """
    A line for each setting that changes the training and differs from the checkpoint's (meta), and one if the code
    does. A resumed run is exact only if there are none. A setting that is newer than the checkpoint is not compared:
    its default keeps the old behaviour.
    """
    text, before = "", meta["config"]
    if meta.get("rules") != RULES:
        text = "\n  saved by an older version: updates may differ"
    for name, value in now.items():
        if not name.startswith(NOT_OF_TRAINING) and before.get(name, value) != value:
            text += f"\n  with another {name}: {before[name]} before, {value} now"
    return text


def claim(folder: Path) -> TextIO:
    """
    Make this process the only one that writes checkpoints into the folder, until the lock that is returned is closed or
    the process ends. Remains of killed saves are removed; a step that was being replaced comes back. The UserError
    names the process that writes there now.
    """
    path = folder.with_name(f".{folder.name}.lock")
    try:
        lock = locked(path, wait=False)
    except BlockingIOError:
        holder = path.read_text(encoding="utf-8")
        raise UserError(f"{folder} is in use by another run ({holder}); wait for it, end it, or choose another "
                        f"--model_tag; if its machine is gone, remove {path}") from None
    lock.truncate(0)
    lock.write(f"host {socket.gethostname()}, process {os.getpid()}")
    lock.flush()
    for left in folder.glob(".step_*"):
        recover_folder(folder / left.name.split(".")[1])
    return lock
