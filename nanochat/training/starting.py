"""How training begins: from nothing, from the weights of another model, or where an earlier run was interrupted."""
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from nanochat.data.conversation_loader import PackedRows, RenderedConversations
from nanochat.data.tokenizer import Tokenizer
from nanochat.model.gpt import GPT, parameter_shapes
from nanochat.model.gpt_config import GPTConfig, parse_architecture
from nanochat.optim.optimizers import setup_optimizers
from nanochat.optim.sharding import Sharding
from nanochat.optim.zero import shard_model
from nanochat.runtime.collectives import from_rank0
from nanochat.runtime.console import print0
from nanochat.runtime.distributed import was_begun
from nanochat.runtime.errors import UserError
from nanochat.training.checkpoint import (
    changed_settings,
    checkpoint_dir,
    choose_start,
    find_checkpoint,
    list_steps,
    load_checkpoint,
    model_dir,
    read_meta,
)
from nanochat.training.records import describe_checkpoint, origin_of, unfinished
from nanochat.training.resharding import load_training_state, stored_weights


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
        began_with = origin_of(meta)
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


# ---- Pretraining


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


# ---- The stages after it


def load_training(
    start: Start, settings: dict, device: torch.device, dtype: torch.dtype,
) -> tuple[GPT, Tokenizer, Sharding, tuple]:
    """
    (model, tokenizer, sharding, optimizers) of a run. For an interrupted run, masters and moments are loaded, too;
    otherwise the optimizers start from zero. settings: of the script; those that a resumed run has changed are printed.
    COLLECTIVE.
    """
    model, tokenizer, _ = load_checkpoint(start.weights, torch.device("meta"))
    # The weights come unit by unit, in the dtype they were saved in: no rank holds more than one whole unit beside its
    # shards.
    sharding = shard_model(model, model.units(), device, dtype, settings["zero_stage"],
                           weights=stored_weights(start.weights))
    model.activation_checkpointing = settings["activation_checkpointing"]
    optimizers = setup_optimizers(model, sharding, settings["unembedding_lr"], settings["embedding_lr"],
                                  settings["matrix_lr"], lr_scale=settings["init_lr_frac"])
    if start.resumed:
        load_training_state(start.weights, sharding, optimizers)
        print0(f"resuming from {start.weights}{changed_settings(start.meta, settings)}")
    return model, tokenizer, sharding, optimizers


def require_same_data(start: Start, data_state: dict) -> None:
    """UserError if an interrupted run would go on with other rows than it began with."""
    before = start.resumed["data_state"] if start.resumed else data_state
    for key, value in data_state.items():
        if before.get(key) != value:
            raise UserError(f"cannot continue exactly: {key} was {before.get(key)} when the checkpoint was saved "
                            f"and is {value} now; --overwrite starts over")


# Fine-tuning on a user's few conversations, from six on. Measured with models of depth 2 and 4: a rate of 0.1 taught
# next to nothing; a rate of 1, in fewer steps, cost earlier tasks 5 points even with replay. Not measured with large
# models.
FEW = 3_000       # rows
FEW_RATE = 0.3
# nanochat's rate, for 23,000 conversations.
LEAST_RATE = 0.02


def choose_epochs_and_rate(conversations: int, num_epochs: int, init_lr_frac: float) -> tuple[int, float]:
    """
    How often each conversation is seen, and the fraction of the learning rates to begin with; −1: chosen here. FEW
    rows, 32 a step, are learned at FEW_RATE, so six conversations are seen 500 times. The more rows there are, the
    lower the rate, because learning depends on the sum of a run's rates.
    """
    if num_epochs == -1:
        num_epochs = max(round(FEW / conversations), 1)
    if init_lr_frac == -1:
        init_lr_frac = min(max(FEW_RATE * FEW / (conversations * num_epochs), LEAST_RATE), FEW_RATE)
    return num_epochs, init_lr_frac


def row_length(max_seq_len: int, meta: dict) -> int:
    """Tokens of a row: the setting, or for −1 the model's limit (meta: of a checkpoint). UserError if longer."""
    longest = meta["model_config"]["sequence_len"]
    if max_seq_len > longest:
        raise UserError(f"max_seq_len={max_seq_len} must be within 1 and the model's {longest}, or -1 for that")
    return longest if max_seq_len == -1 else max_seq_len


def plan_steps(
    start: Start, settings: dict, conversations: RenderedConversations, steps: list[PackedRows], per_step: int,
    max_seq_len: int,
) -> tuple[int, dict]:
    """
    (optimizer steps, data_state) of a run over these steps, each of per_step rows (of fine-tuning: conversations): all
    once, or the first num_iterations. data_state: everything the rows depend on; UserError as in `require_same_data`.
    """
    data_state = {"origin": start.origin, "conversations": conversations.fingerprint, "seed": settings["seed"],
                  "max_seq_len": max_seq_len, "rows_per_step": per_step}
    require_same_data(start, data_state)
    num_iterations = len(steps)
    if settings["num_iterations"] != -1:
        num_iterations = min(settings["num_iterations"], len(steps))
    print0(f"{num_iterations:,} steps of {per_step} rows")
    return num_iterations, data_state
