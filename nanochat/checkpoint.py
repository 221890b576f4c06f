"""
Checkpoints: a folder per step, whole or absent, checked when it is read, and loaded on any number of ranks.

    $NANOCHAT_BASE_DIR/base_checkpoints/<model_tag>/step_000020/
        model.safetensors                    the weights in the compute dtype, whole: what inference needs
        optimizer_rank_00000.safetensors …   masters and moments, as each rank of a shard group kept them
        meta.json                            settings, shapes, where the data and the loop are
        tokenizer…                           the tokenizer the weights belong to
        manifest.json                        SHA-256 of each file above; its presence makes the folder a checkpoint

nanochat.saving writes them, nanochat.resharding loads the state of training. Functions marked COLLECTIVE are called by every rank, and raise on all or none.
"""
import base64
import json
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Literal, TextIO

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nanochat.distributed import from_rank0, print0
from nanochat.errors import UserError, did_you_mean
from nanochat.files import base_dir, locked, previous, recover_folder, sha256
from nanochat.gpt import GPT, GPTConfig
from nanochat.tokenizer import Tokenizer

SCRIPTS = {"base": "scripts.base_train", "mid": "scripts.mid_train", "sft": "scripts.chat_sft", "rl": "scripts.chat_rl"}
STAGES = tuple(SCRIPTS)
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer_rank_{:05d}.safetensors"
LEASE_SECONDS = 120  # for which a file server may keep the locks of a machine that has crashed
UNSEEN = "it is not there on every node; NANOCHAT_BASE_DIR must be on a file system that all nodes share"


def checkpoint_dir(source: str, model_tag: str) -> Path:
    """The folder of all checkpoints of a stage ("base", "mid", "sft", "rl") and tag."""
    if source not in STAGES:
        raise UserError(f"source={source} is unknown; expected one of {', '.join(STAGES)}")
    if not re.fullmatch(r"[\w.-]*", model_tag) or model_tag.startswith("."):
        raise UserError(f"model_tag={model_tag} cannot name a folder; expected letters, digits, '_', '-' and '.'")
    return base_dir() / f"{source}_checkpoints" / model_tag


def step_dir(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def list_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint folder, rising."""
    names = (re.fullmatch(r"step_(\d+)", path.name) for path in folder.glob("step_*"))
    return sorted(int(match[1]) for match in names if match)  # as numbers: step_1000000 is newer than step_999999


# ---- Finding: every file is verified before anything is loaded from it


def list_tags(folder: Path) -> list[str]:
    """The models of a stage that have a checkpoint."""
    return sorted(path.name for path in folder.glob("*") if list_steps(path))


def problem_with(checkpoint: Path, part: int = 0, parts: int = 1) -> str | None:
    """
    What is wrong with a checkpoint, naming the file; None when every file is there with the sum of its manifest.
    With `parts` only every parts-th file is read, beginning with file `part`.
    """
    if not checkpoint.exists():
        return "there is no such checkpoint"
    try:
        sums = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, not UTF-8, not JSON
        return "manifest.json is missing or damaged"
    for name in sorted(sums)[part::parts]:
        try:
            if sha256(checkpoint / name) != sums[name]:
                return f"{name} does not match its checksum"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def problem_anywhere(checkpoint: Path) -> str | None:
    """`problem_with` on any rank, each file read once per node. COLLECTIVE."""
    if not dist.is_initialized():
        return problem_with(checkpoint)
    local_rank, local_world_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    problem = problem_with(checkpoint, local_rank, local_world_size)
    if not checkpoint.exists() and dist.get_rank() > 0:
        problem = f"{UNSEEN} (rank {dist.get_rank()} on {socket.gethostname()})"
    return first_problem(problem)


def first_problem(problem: str | None) -> str | None:
    """The problem of the first rank that has one, on every rank: what one cannot use, none may use. COLLECTIVE."""
    if not dist.is_initialized():
        return problem
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next(filter(None, problems), None)


def find_checkpoint(folder: Path, step: int | None = None) -> Path:
    """
    The checkpoint of a step, or the newest valid one (step None): a damaged one is named and the one before it used.
    UserError when there is none. COLLECTIVE.
    """
    steps = from_rank0(list_steps, folder)
    for candidate in reversed(steps) if step is None else [step]:
        path = step_dir(folder, candidate)
        problem = problem_anywhere(path)
        if problem is None:
            return path
        print0(f"warning: {path}: {problem}")
    tags = [] if steps else from_rank0(list_tags, folder.parent)
    have = ", ".join(map(str, steps)) or "; ".join(["none", *(f"there is a model {tag}" for tag in tags)])
    advice = "; remove them to start anew" if steps and step is None else ""
    raise UserError(f"no valid checkpoint{'' if step is None else f' of step {step}'} in {folder} (steps there: {have}{advice}){did_you_mean(folder.name, tags)}")


def choose_start(folder: Path, resume: str, resume_from_step: int, overwrite: bool) -> Path | None:
    """
    The checkpoint a run continues from, or None to start anew. UserError where checkpoints would have to go, those of
    another run or newer ones than the step to go back to, unless `overwrite` says so. Nothing is removed here.
    A job that its launcher started again after a failure continues from the newest checkpoint that it has itself
    written, whatever its settings say; without one it begins as they say. COLLECTIVE.
    """
    if problem := from_rank0(why_not_to_write, folder):
        raise UserError(problem)
    steps = from_rank0(list_steps, folder)
    if steps and restarted():
        newest = find_checkpoint(folder)
        if read_meta(newest)["job"] == from_rank0(job):
            return newest
    if resume_from_step >= 0:
        checkpoint = resumable(find_checkpoint(folder, resume_from_step))
        newer = [step for step in steps if step > resume_from_step]
        if newer and not overwrite:
            raise UserError(f"{folder} has newer checkpoints than step {resume_from_step}: {', '.join(map(str, newer))}; --overwrite removes them")
        return checkpoint
    if steps and resume == "auto":
        return resumable(find_checkpoint(folder))
    if steps and not overwrite:
        raise UserError(f"{folder} has checkpoints; continue with --resume=auto, choose another --model_tag, or --overwrite")
    return None


def resumable(checkpoint: Path) -> Path:
    """The checkpoint; UserError for one without a state of training, as an import leaves it. COLLECTIVE."""
    if not from_rank0(has_training_state, checkpoint):
        raise UserError(f"{checkpoint} was imported: it has weights only, and no run can go on from it; "
                        "start the next stage from it, or choose another --model_tag")
    return checkpoint


def has_training_state(checkpoint: Path) -> bool:
    return any(checkpoint.glob("optimizer_rank_*.safetensors"))


def restarted() -> bool:
    """Whether torchrun, given --max-restarts, started this process again after a failure."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return count.isdecimal() and int(count) > 0


def job() -> str:
    """What tells this job from others, and stays the same when torchrun restarts it: torchrun's id, or its process."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run_id if run_id != "none" else f"{socket.gethostname()} {os.getppid()}"


def lock_path(folder: Path) -> Path:
    """Held by the process that writes checkpoints into the folder; it has its host, process and job as text."""
    return folder.with_name(f".{folder.name}.lock")


def claim(folder: Path) -> TextIO:
    """
    Make this process the only one that writes checkpoints into the folder: until the lock, which is returned, is closed
    or the process ends. UserError that names the process which does now; a lock of another host, which a file server
    may keep for a while after that has crashed, is waited for.
    """
    deadline = time.monotonic() + LEASE_SECONDS
    while True:
        try:
            return locked(lock_path(folder), wait=False)
        except BlockingIOError:
            holder = lock_path(folder).read_text(encoding="utf-8")
        if f"host {socket.gethostname()}," in holder or time.monotonic() > deadline:
            raise UserError(f"{folder} is in use by another run ({holder}); wait for it, end it, or choose another --model_tag; "
                            f"if its machine is gone, remove {lock_path(folder)}")
        time.sleep(1)


def why_not_to_write(folder: Path) -> str | None:
    """For a run about to begin: who else writes there, or None. What a kill between two renames left is put back."""
    try:
        if lock_path(folder).exists():
            claim(folder).close()
    except UserError as error:
        return str(error)
    for old in folder.glob(previous(folder / "step_*").name):
        recover_folder(folder / old.name.split(".")[1])
    return None


def discard_after(folder: Path, start_step: int) -> None:
    """Remove the checkpoints of later steps; all of them for a run that starts at 0."""
    for step in list_steps(folder):
        if step > start_step or start_step == 0:
            shutil.rmtree(step_dir(folder, step))


def changed_settings(before: dict, now: dict) -> str:
    """A line for each setting that a resumed run does not share with its checkpoint; it is bit for bit only without."""
    about_resuming = ("run", "overwrite", "resume", "resume_from_step")
    changed = [name for name in now if name not in about_resuming and before.get(name) != now[name]]
    return "".join(f"\n  with another {name}: {before.get(name)} before, {now[name]} now" for name in changed)


def read_meta(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "meta.json").read_text(encoding="utf-8"))


def data_of(meta: dict, model_tag: str) -> str | None:
    """The data set that a model was pretrained on, of which the checkpoints of later stages kept nothing at first; None: unknown."""
    folder = checkpoint_dir("base", model_tag)
    steps = [] if "data" in meta else list_steps(folder)
    return read_meta(step_dir(folder, steps[-1])).get("data") if steps else meta.get("data")


# ---- Loading


def model_dir(source: str, model_tag: str | None) -> Path:
    """The folder of a model's checkpoints; model_tag None is the only one there is, UserError when there are others. COLLECTIVE."""
    folder = checkpoint_dir(source, model_tag or "")
    if model_tag is None:
        tags = from_rank0(list_tags, folder)
        if len(tags) != 1:
            advice = f"{', '.join(tags)}; choose one with --model_tag" if tags else f"python -m {SCRIPTS[source]} makes one"
            raise UserError(f"{len(tags)} models in {folder}: {advice}")
        folder = folder / tags[0]
    return folder


def furthest_stage(model_tag: str | None = None) -> str:
    """The last stage with a checkpoint of a model, or of any (model_tag None). UserError without one. COLLECTIVE."""
    tags = {stage: from_rank0(list_tags, checkpoint_dir(stage, "")) for stage in STAGES}
    found = [stage for stage in STAGES if (tags[stage] if model_tag is None else model_tag in tags[stage])]
    if not found:
        have = ", ".join(sorted(set().union(*tags.values()))) or f"none; python -m {SCRIPTS['base']} makes one"
        raise UserError(f"no model{f' {model_tag}' * bool(model_tag)} in {base_dir()}: there is {have}")
    return found[-1]


def find_model(source: str, model_tag: str | None = None, step: int | None = None) -> Path:
    """A verified checkpoint of a stage; step None is the newest valid one. UserError when there is none. COLLECTIVE."""
    return find_checkpoint(model_dir(source, model_tag), step)


def load_checkpoint(checkpoint: Path, device: torch.device) -> tuple[GPT, Tokenizer, dict]:
    """(model, tokenizer, meta) of a verified checkpoint, in the dtype it was saved in."""
    meta, tokenizer = read_meta(checkpoint), Tokenizer.load(checkpoint)
    if tokenizer.fingerprint != meta["tokenizer"]:
        raise UserError(f"{checkpoint}: the tokenizer there is not the one the model was trained with")
    with torch.device("meta"):
        model = GPT(GPTConfig(**meta["model_config"]))
    model.load_state_dict(load_file(checkpoint / MODEL_FILE, device=str(device)), assign=True)
    return model, tokenizer, meta


def load_model(
    source: str, device: torch.device, phase: Literal["train", "eval"], model_tag: str | None = None, step: int | None = None
) -> tuple[GPT, Tokenizer, dict]:
    """`load_checkpoint` of what `find_model` finds. COLLECTIVE."""
    model, tokenizer, meta = load_checkpoint(find_model(source, model_tag, step), device)
    return model.train(phase == "train"), tokenizer, meta


def random_states() -> dict[str, str]:
    """The generators' states as base64."""
    states = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def restore_random_states(states: dict[str, str]) -> None:
    for name, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if name == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
