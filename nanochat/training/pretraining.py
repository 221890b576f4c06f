"""How pretraining begins: from nothing, from the weights of another base model, or from where it was interrupted."""
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from nanochat.data.tokenizer import Tokenizer
from nanochat.model.gpt import model_without_memory
from nanochat.model.gpt_config import GPTConfig, parse_architecture
from nanochat.runtime.collectives import from_rank0
from nanochat.runtime.console import print0
from nanochat.runtime.errors import UserError
from nanochat.training.checkpoint import checkpoint_dir, choose_start, model_dir, read_meta
from nanochat.training.finetuning import find_source
from nanochat.training.records import describe_checkpoint


class Beginning(NamedTuple):
    """Where a run of pretraining begins."""

    checkpoints: Path           # the folder of its checkpoints
    resumed: Path | None        # the one to resume from, if the run was interrupted
    weights: Path | None        # the checkpoint with the initial weights; None: they are drawn
    origin: str                 # if the run began with the weights of another model: that checkpoint and its sum


def find_beginning(settings: dict, default_tag: str) -> Beginning:
    """
    Where a run begins, as the settings of scripts/base_train.py say; default_tag: if they name no model_tag. A
    resumed run does not need the model that it began from. COLLECTIVE.
    """
    begin_from, model_tag = settings["begin_from"], settings["model_tag"]
    if begin_from and model_tag in ("", begin_from):
        raise UserError(f"begin_from={begin_from} needs another --model_tag=…: the name of the new model")
    checkpoints = checkpoint_dir("base", model_tag or default_tag)
    resumed = choose_start(checkpoints, settings["resume"], settings["overwrite"], settings["resume_from_step"])
    if resumed:
        origin = read_meta(resumed).get("origin", "")
        if begin_from and origin.split("/")[1:2] != [begin_from]:
            raise UserError(f"begin_from={begin_from}, but the run in {checkpoints} was begun from "
                            f"{origin or 'no model'}; leave it out to go on, or choose another --model_tag")
        return Beginning(checkpoints, resumed, resumed, origin)
    if settings["resume"] == "auto":
        print0(f"nothing to resume in {checkpoints}: starting from step 0")
    if not begin_from:
        return Beginning(checkpoints, None, None, "")
    source = find_source(model_dir("base", begin_from), settings["source_step"])
    return Beginning(checkpoints, None, source, from_rank0(describe_checkpoint, source))


def continued_model(checkpoint: Path, settings: dict) -> tuple[GPTConfig, Tokenizer]:
    """
    The architecture and tokenizer of a model that is trained further: the checkpoint's, except for max_seq_len and
    changes in arch that keep the weights' shapes. UserError for settings that would make another model.
    """
    config, depth, arch = GPTConfig(**read_meta(checkpoint)["model_config"]), settings["depth"], settings["arch"]
    name, changes = parse_architecture(arch)
    if depth not in (-1, config.n_layer):
        raise UserError(f"depth={depth}, but {checkpoint} has {config.n_layer} layers, which cannot change: leave out "
                        "--depth")
    if name or "head_dim" in changes:
        raise UserError(f"arch={arch!r}, but {checkpoint} has its own architecture, which cannot change: expected only "
                        "changes that keep its weights' shapes, such as --arch=rope_theta=500000")
    if settings["max_seq_len"] != -1:
        changes["sequence_len"] = settings["max_seq_len"]
    changed = replace(config, **changes)
    before, now = ({name: p.shape for name, p in model_without_memory(c).named_parameters()} for c in (config, changed))
    if differing := [name for name in {**before, **now} if before.get(name) != now.get(name)]:
        raise UserError(f"arch={arch!r} does not fit {checkpoint}: {differing[0]} would be "
                        f"{now.get(differing[0], 'gone')}, and is {before.get(differing[0], 'not there')}")
    return changed, Tokenizer.load(checkpoint)
