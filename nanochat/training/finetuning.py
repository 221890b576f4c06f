"""How the stages after pretraining begin: from the model of the stage before, or from where an interrupted run was."""
import math
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from nanochat.data.tokenizer import Tokenizer
from nanochat.model.gpt import GPT
from nanochat.optim.optimizers import setup_optimizers
from nanochat.optim.zero import Sharding
from nanochat.runtime.collectives import from_rank0, require_same
from nanochat.runtime.console import print0
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir
from nanochat.training.checkpoint import (
    changed_settings,
    checkpoint_dir,
    choose_start,
    find_checkpoint,
    launchers,
    list_steps,
    load_checkpoint,
    model_dir,
    read_meta,
    wrote,
)
from nanochat.training.records import MODEL_FILE, describe_checkpoint
from nanochat.training.resharding import load_training_state

# Fine-tuning on a user's few conversations. Measured with models of depth 4; a rate of 0.1 taught next to nothing.
FEW, FEW_RATE, MOST_EPOCHS = 3_000, 0.3, 20
LEAST_RATE = 0.02  # nanochat's, for 23,000 conversations


class Start(NamedTuple):
    """Where a run of a stage begins."""

    checkpoints: Path       # the folder of its checkpoints
    origin: str             # the checkpoint of the stage before that it all began with, and the sum of its weights
    data: str | None        # the data set that the base model was trained on, as far as checkpoints say
    step: int               # the first optimizer step to take
    meta: dict | None       # of the interrupted run that goes on


def begin_stage(
    stage: str, config: dict, device: torch.device, dtype: torch.dtype, compiling: bool,
) -> tuple[GPT, Tokenizer, Sharding, tuple, Start]:
    """
    (model, tokenizer, sharding, optimizers, start) of a stage ("mid", "sft", "rl"), ready to train. config: the
    settings of its script, of which this takes the sections Model, Sharding and Optimizers, activation_checkpointing,
    dry_run, and those about resuming.
    Weights of the stage before are taken in the dtype they were saved in; an interrupted run goes on with its masters
    and moments. COLLECTIVE.
    """
    source = model_dir(config["source"], config["model_tag"])
    checkpoints = checkpoint_dir(stage, source.name)
    checkpoint = None  # of an interrupted run; a dry run looks for none
    if not config.get("dry_run"):
        checkpoint = choose_start(checkpoints, config["resume"], config["resume_from_step"], config["overwrite"])
    begin = checkpoint or find_checkpoint(source, config["source_step"], training=False)
    model, tokenizer, meta = load_checkpoint(begin, torch.device("meta"))  # weights come unit by unit
    model.activation_checkpointing = config["activation_checkpointing"]
    with safe_open(begin / MODEL_FILE, framework="pt") as stored:
        sharding = Sharding(model, model.units(), device, dtype, config["zero_stage"], config["shard_size"],
                            weights=stored.get_tensor)
    rates = (config[name] for name in ("unembedding_lr", "embedding_lr", "matrix_lr", "weight_decay"))
    optimizers = setup_optimizers(model, sharding, *rates, lr_scale=config["init_lr_frac"])
    if compiling:
        model.compile_blocks()
    data = meta.get("data")
    if checkpoint is None:
        print0(f"starting from {begin}")
        start = Start(checkpoints, from_rank0(describe_checkpoint, begin), data, 0, None)
    else:
        load_training_state(checkpoint, sharding, optimizers)
        print0(f"resuming from {checkpoint}{changed_settings(meta['config'], config)}")
        origin = origin_of_resumed(meta, source, config["source_step"])
        start = Start(checkpoints, origin, data, meta["step"], meta)
    return model, tokenizer, sharding, optimizers, start


def origin_of_resumed(meta: dict, source: Path, step: int | None) -> str:
    """
    What the run would begin with now, for `require_same_data` to compare: what it did begin with where that is gone,
    and after a restart in the middle, which has no reason to stop if the source has been trained on. COLLECTIVE.
    """
    if wrote(launchers(), meta) or not from_rank0(list_steps, source):
        return meta["data_state"]["origin"]
    return from_rank0(describe_checkpoint, find_checkpoint(source, step, training=False))


def require_same_data(meta: dict | None, data_state: dict) -> None:
    """
    UserError where an interrupted run would go on from another model, or with other rows, than it began with, and where
    a rank would train on others than rank 0. COLLECTIVE.
    """
    require_same("has other data", data_state, "copy rank 0's")
    for key, value in data_state.items():
        before = value if meta is None else meta["data_state"].get(key)
        if before != value:
            raise UserError(f"cannot continue exactly: {key} was {before} when the checkpoint was saved "
                            f"and is {value} now; --overwrite starts anew")


def tasks_before(origin: str) -> str:
    """The tasks that a checkpoint was trained on, by the name that `describe_checkpoint` gives it; "" if unknown."""
    try:
        return read_meta(base_dir() / origin.split()[0])["config"].get("tasks", "")
    except (OSError, ValueError, KeyError):  # gone, or imported
        return ""


def choose_epochs_and_rate(conversations: int, num_epochs: int, init_lr_frac: float) -> tuple[int, float]:
    """
    How often each conversation is seen, and the part of the learning rates to begin with; −1: chosen here. FEW rows,
    32 a step, teach what is in them at FEW_RATE; so few hundred conversations are seen several times. The more rows
    there are, the lower the rate, as what a run learns goes with the sum of its rates.
    """
    if num_epochs == -1:
        num_epochs = min(max(round(FEW / conversations), 1), MOST_EPOCHS)
    if init_lr_frac == -1:
        init_lr_frac = min(max(FEW_RATE * FEW / (conversations * num_epochs), LEAST_RATE), FEW_RATE)
    return num_epochs, init_lr_frac


def row_length(max_seq_len: int, model: GPT) -> int:
    """Tokens of a row: the setting, or for −1 the model's. UserError for rows that the model was not made for."""
    longest = model.config.sequence_len
    if max_seq_len > longest:
        raise UserError(f"max_seq_len={max_seq_len} must be within 1 and the model's {longest}, or -1 for that")
    return longest if max_seq_len == -1 else max_seq_len


def plan_steps(
    num_rows: int, rows_per_step: int, num_iterations: int, device_batch_size: int, world_size: int,
) -> tuple[int, int, int]:
    """
    How num_rows rows are trained on once, rows_per_step at a time over all ranks; num_iterations: at most (-1: all).

    Returns (optimizer steps, micro-steps of each, rows of a rank and micro-step; not every one of them is filled).
    """
    all_steps = math.ceil(num_rows / rows_per_step)
    rows = min(device_batch_size, math.ceil(rows_per_step / world_size))
    grad_accum_steps = math.ceil(rows_per_step / (rows * world_size))
    return all_steps if num_iterations == -1 else min(num_iterations, all_steps), grad_accum_steps, rows
