"""
Checkpoints: a folder per step, whole or absent, checked when it is read, and loaded on any number of ranks.

    $NANOCHAT_BASE_DIR/base_checkpoints/<model_tag>/step_000020/
        model.safetensors                    the weights in the compute dtype, whole: what inference needs
        optimizer_rank_00000.safetensors …   masters and moments, as each rank of a shard group kept them
        meta.json                            settings, shapes, where the data and the loop are
        tokenizer…                           the tokenizer the weights belong to
        manifest.json                        SHA-256 of each file above; its presence makes the folder a checkpoint

saving.py writes them, resharding.py loads the state of training. Functions marked COLLECTIVE are called by
every rank, and raise on all or none.
"""
import contextlib
import json
import os
import re
import socket
import time
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nanochat.data.tokenizer import Tokenizer
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig, without_retired
from nanochat.runtime.collectives import first_problem, from_rank0, gather_objects, require_same
from nanochat.runtime.console import is_rank0, print0
from nanochat.runtime.errors import UserError, did_you_mean
from nanochat.runtime.files import base_dir, locked, previous, recover_folder, sha256
from nanochat.training.records import MODEL_FILE, list_steps, newest_step, replaced_origin, step_dir

SCRIPTS = {"base": "scripts.base_train", "mid": "scripts.mid_train", "sft": "scripts.chat_sft", "rl": "scripts.chat_rl"}
RETIRED_SETTINGS = {"softmax_share": 1.0, "reduce_dtype": "float32"}  # of older versions: what this one computes with
STAGES = tuple(SCRIPTS)
LEASE_SECONDS = 120  # for which a file server may keep the locks of a machine that has crashed
APART = "every host needs all files, on a disk that all share or copied to each"


def checkpoint_dir(source: str, model_tag: str) -> Path:
    """The folder of all checkpoints of a stage ("base", "mid", "sft", "rl") and tag."""
    if source not in STAGES:
        raise UserError(f"source={source} is unknown; expected one of {', '.join(STAGES)}")
    if not re.fullmatch(r"[\w.-]*", model_tag) or model_tag.startswith("."):
        raise UserError(f"model_tag={model_tag} cannot name a folder; expected letters, digits, '_', '-' and '.'")
    return base_dir() / f"{source}_checkpoints" / model_tag


def list_tags(folder: Path) -> list[str]:
    """The models of a stage that have a checkpoint."""
    return sorted(path.name for path in folder.glob("*") if list_steps(path))


def newest_saved(folder: Path) -> str:
    """The end of a message about a save that failed: what is left to go on from."""
    newest = newest_step(folder)
    return f"the newest saved step is {newest}" if newest else f"no step is saved in {folder}"


def has_training_state(checkpoint: Path) -> bool:
    """Whether a run can go on from it: an import has weights only, and so may the last save on a full disk."""
    return any(checkpoint.glob("optimizer_rank_*.safetensors"))


def read_meta(checkpoint: Path) -> dict:
    meta = json.loads((checkpoint / "meta.json").read_text(encoding="utf-8"))
    return meta | {"model_config": without_retired(meta["model_config"], checkpoint)}


# ---- Finding: what is loaded is verified before


def problem_with(checkpoint: Path, training: bool = True) -> str | None:
    """
    What is wrong with a checkpoint, naming the file; None when every file has its checksum of the manifest. Without
    `training` the optimizers' files, which only a resumed run loads, are not read. Each file is read once per node.
    COLLECTIVE.
    """
    part, parts = 0, 1
    if dist.is_initialized():
        part, parts = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return first_problem(damaged_file(checkpoint, training, part, parts))


def damaged_file(checkpoint: Path, training: bool, part: int, parts: int) -> str | None:
    """The part of `problem_with` that this rank reads: every parts-th file, beginning with file `part`."""
    if not checkpoint.exists():
        return f"it is not there on {socket.gethostname()}; {APART}"
    try:
        sums = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, not UTF-8, not JSON
        return "manifest.json is missing or damaged"
    names = sorted(name for name in sums if training or not name.startswith("optimizer_rank_"))
    for name in names[part::parts]:
        try:
            if sha256(checkpoint / name) != sums[name]:
                return f"{name} does not match its checksum"
        except FileNotFoundError:
            return f"{name} is missing on {socket.gethostname()}; {APART}"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def find_checkpoint(folder: Path, step: int | None = None, training: bool = True, to_resume: bool = False) -> Path:
    """
    The checkpoint of a step, or the newest valid one (step None): a damaged one is named and the one before it used.
    training: as for `problem_with`. to_resume: only one that a run can go on from. UserError when there is none.
    COLLECTIVE.
    """
    steps = from_rank0(list_steps, folder)
    for candidate in reversed(steps):
        if step in (None, candidate):
            path = step_dir(folder, candidate)
            problem = problem_with(path, training)
            if to_resume and problem is None and not from_rank0(has_training_state, path):
                problem = "it has weights only"
            if problem is None:
                require_same("has another checkpoint", {path.name: sha256(path / "manifest.json")}, APART)
                return path
            print0(f"warning: {path}: {problem}")
    tags = [] if steps else from_rank0(list_tags, folder.parent)
    models = [f"a model {tag}" for tag in tags]
    if not steps and not tags:
        found = [(stage, tag) for stage in STAGES for tag in from_rank0(list_tags, checkpoint_dir(stage, ""))]
        models = [f"a model {tag} of stage {stage}" for stage, tag in found]
    have = ", ".join(map(str, steps)) or "; ".join(["none", *(f"there is {model}" for model in models)])
    advice = "; remove them to start anew" if steps and step is None else ""
    of_step = "" if step is None else f" of step {step}"
    raise UserError(f"no valid checkpoint{of_step} in {folder} (steps there: {have}{advice})"
                    + did_you_mean(folder.name, tags))


def model_dir(source: str, model_tag: str | None) -> Path:
    """The folder of a model's checkpoints. UserError for model_tag None unless there is exactly one. COLLECTIVE."""
    folder = checkpoint_dir(source, model_tag or "")
    if model_tag is None:
        tags = from_rank0(list_tags, folder)
        if len(tags) != 1:
            several = f"{', '.join(tags)}; choose one with --model_tag"
            raise UserError(f"{len(tags)} models in {folder}: "
                            + (several if tags else f"python -m {SCRIPTS[source]} makes one"))
        folder = folder / tags[0]
    return folder


def find_model(source: str, model_tag: str | None = None, step: int | None = None, training: bool = False) -> Path:
    """`find_checkpoint` among those of a stage, verified for inference unless `training` says more. COLLECTIVE."""
    return find_checkpoint(model_dir(source, model_tag), step, training)


def furthest_stage(model_tag: str | None = None) -> tuple[str, str]:
    """
    The last stage with a checkpoint of a model, or of any (model_tag None), that was not made from a checkpoint which
    has been replaced; and words that name later stages, which were, or "". UserError without one. Rank 0 only.
    """
    tags = {stage: list_tags(checkpoint_dir(stage, "")) for stage in STAGES}
    found = [stage for stage in STAGES if (tags[stage] if model_tag is None else model_tag in tags[stage])]
    if not found:
        known = sorted(set().union(*tags.values()))
        have = ", ".join(known) or f"none; python -m {SCRIPTS['base']} makes one"
        nearest = did_you_mean(model_tag or "", known)
        raise UserError(f"no model{f' {model_tag}' * bool(model_tag)} in {base_dir()}: there is {have}{nearest}")
    older = ""
    for stage in reversed(found):
        chosen = [tag for tag in tags[stage] if model_tag in (None, tag)]
        origin = replaced_origin(newest_step(checkpoint_dir(stage, chosen[0]))) if len(chosen) == 1 else ""
        if not origin:
            return stage, older
        older += f"; the {stage} model was made from {origin}, which has been replaced: --source={stage} takes it"


def tasks_of(stage: str, model_tag: str) -> str:
    """The tasks that a model of this stage was trained on, and those of the stages before: the latest first."""
    specs = []
    for earlier in reversed(STAGES[: STAGES.index(stage) + 1]):
        folder = checkpoint_dir(earlier, model_tag)
        config = read_meta(newest_step(folder)).get("config", {}) if list_steps(folder) else {}
        specs += [config[name] for name in ("task", "tasks") if config.get(name)]
    return ", ".join(specs)


def say_how_to_talk(checkpoints: Path) -> None:
    """How to try the model of a run that has ended, and which later ones were made from what it has replaced."""
    if is_rank0():
        tag, stage = checkpoints.name, checkpoints.parent.name.removesuffix("_checkpoints")
        older = furthest_stage(tag)[1]
        print0(f"talk to it: python -m scripts.chat_cli --source={stage} --model_tag={tag}{older}")


def load_checkpoint(checkpoint: Path, device: torch.device) -> tuple[GPT, Tokenizer, dict]:
    """(model, tokenizer, meta) of a verified checkpoint, in the dtype it was saved in; on "meta" without weights."""
    meta, tokenizer = read_meta(checkpoint), Tokenizer.load(checkpoint)
    if tokenizer.fingerprint != meta["tokenizer"]:
        raise UserError(f"{checkpoint}: the tokenizer there is not the one the model was trained with")
    with torch.device("meta"):
        model = GPT(GPTConfig(**meta["model_config"]))
    if device.type != "meta":
        model.load_state_dict(load_file(checkpoint / MODEL_FILE, device=str(device)), assign=True)
    return model, tokenizer, meta


# ---- Starting a run


def choose_start(folder: Path, resume: str, resume_from_step: int, overwrite: bool) -> Path | None:
    """
    The checkpoint a run continues from, or None to start anew. UserError where checkpoints would have to go, those of
    another run or newer ones than the step to go back to, unless `overwrite` says so. Nothing is removed here.
    What torchrun started again, after a failure or with other hosts, continues from the newest checkpoint that it has
    itself written, whatever its settings say; without one it begins as they say. COLLECTIVE.
    """
    from_rank0(recover_steps, folder)
    steps = from_rank0(list_steps, folder)
    own = launchers()
    if from_rank0(has_written, own, folder):
        newest = find_checkpoint(folder)
        if wrote(own, read_meta(newest)):
            return newest
    if resume_from_step < 0 and not (steps and resume == "auto"):
        if steps and not overwrite:
            raise UserError(f"{folder} has checkpoints; continue with --resume=auto, "
                            "choose another --model_tag, or --overwrite")
        return None
    paths = [step_dir(folder, step) for step in steps]
    if steps and not any(from_rank0(has_training_state, path) for path in paths):
        cause = "saved on a full disk" if "launchers" in from_rank0(read_meta, paths[-1]) else "imported"
        raise UserError(f"{paths[-1]} was {cause}: it has weights only, and no run can go on from it; "
                        "start the next stage from it, or choose another --model_tag")
    checkpoint = find_checkpoint(folder, resume_from_step if resume_from_step >= 0 else None, to_resume=True)
    newer = [step for step in steps if step > resume_from_step >= 0]
    if newer and not overwrite:
        raise UserError(f"{folder} has newer checkpoints than step {resume_from_step}: {', '.join(map(str, newer))}; "
                        "--overwrite removes them")
    return checkpoint


def launcher() -> str:
    """
    The torchrun that has started this process, "" without one: its host and the folder of its logs, which has a random
    name. It stays the same when ranks are started again; torchrun's count of restarts does not tell, as it leaves out
    those for hosts that come and go, nor does its run id, which a later run may have as well.
    """
    logs, _, _ = os.environ.get("TORCHELASTIC_ERROR_FILE", "").rpartition("/attempt_")
    return f"{socket.gethostname()} {logs}" if logs else ""


def launchers() -> list[str]:
    """Those of all ranks. Of an elastic run some stay when hosts come and go. COLLECTIVE."""
    return sorted(set(gather_objects(launcher())) - {""})


def wrote(launchers: list[str], meta: dict) -> bool:
    """Whether a checkpoint is from ranks that one of these launchers started."""
    return not set(launchers).isdisjoint(meta.get("launchers", []))


def has_written(launchers: list[str], folder: Path) -> bool:
    """Whether the folder has a checkpoint of these launchers, damaged or not."""
    for step in list_steps(folder):
        with contextlib.suppress(OSError, ValueError):  # meta.json is damaged
            if wrote(launchers, read_meta(step_dir(folder, step))):
                return True
    return False


def changed_settings(before: dict, now: dict) -> str:
    """A line for each setting that a resumed run does not share with its checkpoint; it is bit for bit only without."""
    before, now = RETIRED_SETTINGS | before, now | RETIRED_SETTINGS
    about_resuming = ("run", "overwrite", "resume", "resume_from_step")
    changed = [name for name in now if name not in about_resuming and before.get(name) != now[name]]
    return "".join(f"\n  with another {name}: {before.get(name)} before, {now[name]} now" for name in changed)


def lock_path(folder: Path) -> Path:
    """Locked by the process that writes checkpoints into the folder; it has its host, process and launcher as text."""
    return folder.with_name(f".{folder.name}.lock")


def claim(folder: Path, lock: TextIO | None = None, sign: bool = True) -> TextIO:
    """
    Make this process the only one that writes checkpoints into the folder, until the lock that is returned is closed or
    the process ends. lock: from an earlier call, to make sure of it. sign=False: only see whether the folder is free.
    UserError that names the process that writes there now. The lock of another host is waited for: a file server may
    keep it for a while after that host has crashed. Where locks do not work, the text in the file is compared.
    """
    path, deadline = lock_path(folder), time.monotonic() + LEASE_SECONDS
    me = f"host {socket.gethostname()}, process {os.getpid()}, launcher {launcher() or 'none'}"
    if lock and path.exists():  # else somebody has removed it with the folder
        holder = path.read_text(encoding="utf-8")
        if holder != me:
            raise UserError(f"{folder} was taken over by another run ({holder}); "
                            "this one can save nothing there any more")
        return lock
    while True:
        try:
            lock = locked(path, wait=False)
            break
        except BlockingIOError:
            holder = path.read_text(encoding="utf-8")
        if f"host {socket.gethostname()}," in holder or time.monotonic() > deadline:
            raise UserError(f"{folder} is in use by another run ({holder}); wait for it, end it, or choose another "
                            f"--model_tag; if its machine is gone, remove {path}")
        time.sleep(1)
    if sign:
        lock.truncate(0)
        lock.write(me)
        lock.flush()
    return lock


def recover_steps(folder: Path) -> None:
    """Put back the step that a run was replacing when it was killed. UserError while another run writes there."""
    if not folder.exists() and not lock_path(folder).exists():
        return  # a run that will be refused leaves nothing
    with claim(folder, sign=False):
        for old in folder.glob(previous(folder / "step_*").name):
            recover_folder(folder / old.name.split(".")[1])
