"""
Checkpoints: a folder per step, whole or absent, checked when it is read.

    $NANOCHAT_BASE_DIR/base_checkpoints/<model_tag>/step_000020/
        model.safetensors                  the weights in the compute dtype: what inference needs
        optimizer_rank_00000.safetensors   masters and moments
        meta.json                          settings, shapes, where the data and the loop are
        tokenizer…                         the tokenizer the weights belong to
        manifest.json                      SHA-256 of each file above; its presence makes the folder a checkpoint
"""
import base64
import json
import os
import re
import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nanochat.distributed import print0
from nanochat.errors import UserError
from nanochat.files import base_dir, recover_folder, sha256, write_folder_aside
from nanochat.gpt import GPT, GPTConfig
from nanochat.tokenizer import Tokenizer

STAGES = ("base", "mid", "sft", "rl")
OPTIMIZER_FILE = "optimizer_rank_00000.safetensors"


def checkpoint_dir(source: str, model_tag: str) -> Path:
    """The folder of all checkpoints of a stage ("base", "mid", "sft", "rl") and tag."""
    if source not in STAGES:
        raise UserError(f"source={source} is unknown; expected one of {', '.join(STAGES)}")
    if not re.fullmatch(r"[\w.-]*", model_tag) or model_tag.startswith("."):
        raise UserError(f"model_tag={model_tag} cannot name a folder; expected letters, digits, '_', '-' and '.'")
    return base_dir() / f"{source}_checkpoints" / model_tag


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizers, tokenizer: Tokenizer, meta: dict, keep_last: int = -1
) -> Path:
    """
    Write folder/step_NNNNNN, then remove all but the newest `keep_last` checkpoints up to it (−1 keeps all).
    meta must be JSON; the random states and the step are added to it. A kill at any moment costs nothing older.
    """
    meta = meta | {"step": step, "rng": random_states(), "model_config": vars(model.config)}
    target = folder / f"step_{step:06d}"
    for debris in folder.glob(".step_*.tmp-*"):  # of a save that was killed
        shutil.rmtree(debris)
    with write_folder_aside(target) as aside:
        write_tensors(model.state_dict(), aside / "model.safetensors")
        write_tensors(optimizer_tensors(model, optimizers), aside / OPTIMIZER_FILE)
        (aside / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        tokenizer.save(aside)
        sums = {file.name: sha256(file) for file in sorted(aside.iterdir())}
        (aside / "manifest.json").write_text(json.dumps(sums, indent=1), encoding="utf-8")
    if keep_last > 0:
        for old in [there for there in list_steps(folder) if there <= step][:-keep_last]:
            shutil.rmtree(folder / f"step_{old:06d}")
    return target


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file of the tensors, from whatever device. OSError when the disk refuses."""
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # hides the system's refusal in its text
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise


def optimizer_tensors(model: nn.Module, optimizers) -> dict[str, Tensor]:
    """State by name. Masters that are the parameters themselves (float32 training) are in model.safetensors already."""
    shared = {p.data_ptr() for p in model.parameters()}
    tensors = {}
    for optimizer in optimizers:
        kind = type(optimizer).__name__.lower()
        tensors |= {f"{kind}.{name}": t for name, t in optimizer.state_tensors().items() if t.data_ptr() not in shared}
    return tensors


def list_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint folder, rising. Finishes what a kill left between two renames."""
    for old in folder.glob("step_*.old"):
        recover_folder(old.with_name(old.name.removesuffix(".old")))
    names = (re.fullmatch(r"step_(\d+)", path.name) for path in folder.glob("step_*"))
    return sorted(int(match[1]) for match in names if match)  # as numbers: step_1000000 is newer than step_999999


def problem_with(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None when every file is there with the sum of its manifest."""
    try:
        sums = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return "manifest.json is missing or damaged"
    for name, expected in sums.items():
        if not (checkpoint / name).exists():
            return f"{name} is missing"
        if sha256(checkpoint / name) != expected:
            return f"{name} does not match its checksum"
    return None


def find_checkpoint(folder: Path, step: int | None = None) -> Path:
    """
    The checkpoint of a step, or the newest valid one (step None): a damaged one is named and the one before it used.
    UserError when there is none.
    """
    steps = list_steps(folder) if step is None else [step]
    for candidate in reversed(steps):
        path = folder / f"step_{candidate:06d}"
        problem = problem_with(path) if path.exists() else "there is no such checkpoint"
        if problem is None:
            return path
        print0(f"warning: {path}: {problem}")
    have = ", ".join(map(str, list_steps(folder))) or "none"
    raise UserError(f"no valid checkpoint{'' if step is None else f' of step {step}'} in {folder} (steps there: {have})")


def choose_start(folder: Path, resume: str, resume_from_step: int, overwrite: bool) -> Path | None:
    """
    The checkpoint a run continues from, or None to start anew. UserError where checkpoints would have to go, those of
    another run or newer ones than the step to go back to, unless `overwrite` says so. Nothing is removed here.
    """
    steps = list_steps(folder)
    if resume_from_step >= 0:
        checkpoint = find_checkpoint(folder, resume_from_step)
        newer = [step for step in steps if step > resume_from_step]
        if newer and not overwrite:
            raise UserError(f"{folder} has newer checkpoints than step {resume_from_step}: {', '.join(map(str, newer))}; --overwrite removes them")
        return checkpoint
    if steps and resume == "auto":
        return find_checkpoint(folder)
    if steps and not overwrite:
        raise UserError(f"{folder} has checkpoints; continue with --resume=auto, choose another --model_tag, or --overwrite")
    return None


def discard_after(folder: Path, start_step: int) -> None:
    """Remove the checkpoints of later steps; all of them for a run that starts at 0."""
    for step in list_steps(folder):
        if step > start_step or start_step == 0:
            shutil.rmtree(folder / f"step_{step:06d}")


def changed_settings(before: dict, now: dict) -> str:
    """A line for each setting that a resumed run does not share with its checkpoint; it is bit for bit only without."""
    about_resuming = ("run", "overwrite", "resume", "resume_from_step")
    changed = [name for name in now if name not in about_resuming and before.get(name) != now[name]]
    return "".join(f"\n  with another {name}: {before.get(name)} before, {now[name]} now" for name in changed)


def read_meta(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "meta.json").read_text(encoding="utf-8"))


def load_training_state(checkpoint: Path, model: nn.Module, optimizers) -> dict:
    """Copy weights, masters and moments of a verified checkpoint into model and optimizers; returns its meta."""
    meta = read_meta(checkpoint)
    copy_by_name(load_file(checkpoint / "model.safetensors"), model.state_dict(), checkpoint)
    copy_by_name(load_file(checkpoint / OPTIMIZER_FILE), optimizer_tensors(model, optimizers), checkpoint)
    restore_random_states(meta["rng"])
    return meta


@torch.no_grad()
def copy_by_name(saved: dict[str, Tensor], live: dict[str, Tensor], checkpoint: Path) -> None:
    """live[name] ← saved[name] for exactly the same names, shapes and dtypes; UserError names the first difference."""
    for name in saved.keys() ^ live.keys():
        raise UserError(f"{checkpoint} does not fit this run: {name} is only in {'it' if name in saved else 'the run'} (other depth or dtype?)")
    for name, tensor in saved.items():
        if (tensor.shape, tensor.dtype) != (live[name].shape, live[name].dtype):
            raise UserError(
                f"{checkpoint} does not fit this run: {name} is {tuple(tensor.shape)} {tensor.dtype} there, "
                f"{tuple(live[name].shape)} {live[name].dtype} here"
            )
        live[name].copy_(tensor)


def load_model(
    source: str, device: torch.device, phase: Literal["train", "eval"], model_tag: str | None = None, step: int | None = None
) -> tuple[GPT, Tokenizer, dict]:
    """
    (model, tokenizer, meta) of a stage's checkpoint, in the dtype it was saved in. model_tag None is the only one
    there is; step None the newest valid one. UserError when the choice is not clear or nothing is there.
    """
    folder = checkpoint_dir(source, model_tag or "")
    if model_tag is None:
        tags = sorted(path.name for path in folder.glob("*") if list_steps(path)) if folder.exists() else []
        if len(tags) != 1:
            raise UserError(f"{len(tags)} models in {folder}: {', '.join(tags) or 'train one first'}" + "; choose one with --model_tag" * bool(tags))
        folder = folder / tags[0]
    checkpoint = find_checkpoint(folder, step)
    meta, tokenizer = read_meta(checkpoint), Tokenizer.load(checkpoint)
    if tokenizer.fingerprint != meta["tokenizer"]:
        raise UserError(f"{checkpoint}: the tokenizer there is not the one the model was trained with")
    with torch.device("meta"):
        model = GPT(GPTConfig(**meta["model_config"]))
    model.load_state_dict(load_file(checkpoint / "model.safetensors", device=str(device)), assign=True)
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
