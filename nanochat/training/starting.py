"""How training begins: from nothing, from the weights of another model, or where an earlier run was interrupted."""
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from nanochat.data.tokenizer import Tokenizer
from nanochat.model.gpt import parameter_shapes
from nanochat.model.gpt_config import GPTConfig, parse_architecture
from nanochat.runtime.collectives import from_rank0
from nanochat.runtime.console import print0
from nanochat.runtime.distributed import was_begun
from nanochat.runtime.errors import UserError
from nanochat.training.checkpoint import (
    checkpoint_dir,
    choose_start,
    find_checkpoint,
    list_steps,
    model_dir,
    read_meta,
)
from nanochat.training.records import describe_checkpoint, unfinished


class Start(NamedTuple):
    """
    Where a run begins. Words: the *source* is the stage of another model, whose weights a new run begins with
    (base_train's setting begin_from names that model); the *origin* is the checkpoint of it that was taken, as the
    run's own checkpoints remember it.
    """

    checkpoints: Path       # the folder of its checkpoints
    weights: Path | None    # the checkpoint to load: of another model, or of an interrupted run; None: they are drawn
    origin: str             # the other model's checkpoint that the run began with, and the sum of its weights
    meta: dict              # of `weights`
    resumed: dict | None    # the same, if an interrupted run is resumed


def find_start(stage: str, source: str, settings: dict, default_tag: str = "") -> Start:
    """
    Where a run of a training stage ("base", "mid", "sft", "rl") begins, by its script's settings. source: the stage of
    the model whose weights a new run begins with; for "base" only if begin_from names a model. UserError if that
    model's run has not reached its end (unless source_step names a step), and if an interrupted run began with other
    weights. COLLECTIVE.
    """
    if stage == "base":
        source_dir = model_dir(source, settings["begin_from"]) if settings["begin_from"] else None
        checkpoints = checkpoint_dir(stage, settings["model_tag"] or default_tag)
        if source_dir == checkpoints:
            raise UserError(f"begin_from={checkpoints.name} needs another --model_tag=…: the name of the new model")
    else:
        source_dir = model_dir(source, settings["model_tag"])
        checkpoints = checkpoint_dir(stage, source_dir.name)
    step = settings["source_step"]
    interrupted = choose_start(checkpoints, settings["resume"], settings["overwrite"],
                               settings.get("resume_from_step", -1))
    origin = ""
    # An interrupted run goes on even if the model that it began with is gone; one that torchrun has restarted, even if
    # that model was trained further.
    if source_dir and not (interrupted and (from_rank0(was_begun) or not from_rank0(list_steps, source_dir))):
        weights = find_checkpoint(source_dir, step, training=False)
        origin = from_rank0(describe_checkpoint, weights)
    if interrupted:
        meta = read_meta(interrupted)
        # Pretraining has it beside its place in the data, later stages in there.
        began_with = meta.get("origin") or meta.get("data_state", {}).get("origin", "")
        if origin and origin != began_with:
            raise UserError(f"the run in {checkpoints} began with {began_with or 'no other model'}, and would begin "
                            f"with {origin} now; choose with --source_step, or start over with --overwrite")
        return Start(checkpoints, interrupted, began_with, meta, meta)
    if settings["resume"] == "auto":
        print0(f"nothing to resume in {checkpoints}: starting from step 0")
    if not source_dir:
        return Start(checkpoints, None, "", {}, None)
    if step is None and (place := unfinished(weights)):
        raise UserError(f"{weights} is {place}: its run was stopped, or is still going on; finish it with "
                        f"--resume=auto, or start from this step with --source_step={read_meta(weights)['step']}")
    print0(f"starting from {weights}")
    return Start(checkpoints, weights, origin, read_meta(weights), None)


def continued_model(start: Start, settings: dict) -> tuple[GPTConfig, Tokenizer]:
    """
    The architecture and tokenizer of a base model that is trained further: the checkpoint's, except for max_seq_len and
    changes in arch that keep the weights' shapes. UserError for settings that would make another model.
    """
    config, arch = GPTConfig(**start.meta["model_config"]), settings["arch"]
    if settings["depth"] not in (-1, config.n_layer):
        raise UserError(f"depth={settings['depth']}, but {start.weights} has {config.n_layer} layers: leave it out")
    name, changes = parse_architecture(arch)
    if settings["max_seq_len"] != -1:
        changes["sequence_len"] = settings["max_seq_len"]

    # head_dim is no field of GPTConfig.
    if name or "head_dim" in changes or parameter_shapes(replace(config, **changes)) != parameter_shapes(config):
        raise UserError(f"arch={arch!r} does not fit the weights of {start.weights}: expected only changes that keep "
                        "their shapes, such as --arch=rope_theta=500000")
    return replace(config, **changes), Tokenizer.load(start.weights)
