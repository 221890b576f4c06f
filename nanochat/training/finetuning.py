"""How the stages after pretraining begin: from the model of the stage before, or from where an interrupted run was."""
import math
from pathlib import Path
from typing import NamedTuple

import torch

from nanochat.data.tokenizer import Tokenizer
from nanochat.model.gpt import GPT
from nanochat.optim.optimizers import setup_optimizers
from nanochat.optim.zero import Sharding
from nanochat.runtime.collectives import from_rank0
from nanochat.runtime.console import print0
from nanochat.runtime.errors import UserError
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
    say_how_to_talk,
    step_dir,
    wrote,
)
from nanochat.training.metrics import Metrics
from nanochat.training.records import describe_checkpoint, unfinished
from nanochat.training.report import settings_table, write_section
from nanochat.training.resharding import load_training_state, stored_weights

# Fine-tuning on a user's few conversations. Measured with models of depth 4; a rate of 0.1 taught next to nothing.
FEW = 3_000       # rows
FEW_RATE = 0.3
MOST_EPOCHS = 20
LEAST_RATE = 0.02  # nanochat's, for 23,000 conversations


class Start(NamedTuple):
    """Where a run of a training stage begins."""

    checkpoints: Path       # the folder of its checkpoints
    begin: Path             # the checkpoint to load: of the stage before, or of an interrupted run that goes on
    origin: str             # the checkpoint of the stage before that it all began with, and the sum of its weights
    meta: dict              # of `begin`
    resumed: bool           # whether an interrupted run goes on
    step: int               # the first optimizer step to take
    metrics_state: dict | None  # `Metrics.state` of an interrupted run


def find_start(
    stage: str, source: str, model_tag: str | None, source_step: int | None, resume: str, overwrite: bool,
) -> Start:
    """
    Where a run of a training stage ("mid", "sft", "rl") begins, as the settings of its script say. UserError where the
    stage before has not reached its end, unless source_step names the step. COLLECTIVE.
    """
    source_dir = model_dir(source, model_tag)
    checkpoints = checkpoint_dir(stage, source_dir.name)
    interrupted = choose_start(checkpoints, resume, overwrite)
    if interrupted is None:
        begin = find_checkpoint(source_dir, source_step, training=False)
        if source_step is None and (place := unfinished(begin)):
            raise UserError(f"{begin} is {place}: its run was stopped, or is still going on; finish it with "
                            f"--resume=auto, or start from this step with --source_step={read_meta(begin)['step']}")
        print0(f"starting from {begin}")
        return Start(checkpoints, begin, from_rank0(describe_checkpoint, begin), read_meta(begin), False, 0, None)
    # Compared by `require_same_data`: the checkpoint that the run would begin with now. Where it is gone, and after a
    # restart by torchrun, which has no reason to stop if the source was trained on: the one it began with.
    meta = read_meta(interrupted)
    if wrote(launchers(), meta) or not from_rank0(list_steps, source_dir):
        origin = meta["data_state"]["origin"]
    else:
        origin = from_rank0(describe_checkpoint, find_checkpoint(source_dir, source_step, training=False))
    return Start(checkpoints, interrupted, origin, meta, True, meta["step"], meta["metrics_state"])


def load_training(
    start: Start,
    config: dict,
    device: torch.device,
    dtype: torch.dtype,
    zero_stage: int,
    activation_checkpointing: bool,
    rates: tuple[float, float, float],
    lr_scale: float,
) -> tuple[GPT, Tokenizer, Sharding, tuple]:
    """
    What a run trains: (model, tokenizer, sharding, optimizers). For an interrupted run also masters and moments are
    loaded; otherwise the optimizers begin anew. COLLECTIVE.

    rates: of the head, the embedding and the matrices, all times lr_scale. config: all settings, to name those that a
    resumed run has changed.
    """
    model, tokenizer, _ = load_checkpoint(start.begin, torch.device("meta"))
    # The weights come unit by unit, in the dtype they were saved in: no rank holds more than one whole unit beside its
    # shards.
    sharding = Sharding(model, model.units(), device, dtype, zero_stage, weights=stored_weights(start.begin))
    model.activation_checkpointing = activation_checkpointing
    optimizers = setup_optimizers(model, sharding, *rates, lr_scale=lr_scale)
    if start.resumed:
        load_training_state(start.begin, sharding, optimizers)
        print0(f"resuming from {start.begin}{changed_settings(start.meta['config'], config)}")
    return model, tokenizer, sharding, optimizers


def require_same_data(start: Start, data_state: dict) -> None:
    """
    UserError where an interrupted run would go on from another model, or with other rows, than it began with.
    """
    if not start.resumed:
        return
    for key, value in data_state.items():
        before = start.meta["data_state"].get(key)
        if before != value:
            raise UserError(f"cannot continue exactly: {key} was {before} when the checkpoint was saved "
                            f"and is {value} now; --overwrite starts anew")


def choose_epochs_and_rate(conversations: int, num_epochs: int, init_lr_frac: float) -> tuple[int, float]:
    """
    How often each conversation is seen, and the part of the learning rates to begin with; −1: chosen here. FEW rows,
    32 a step, teach their content at FEW_RATE, so a few hundred conversations are seen several times. The more rows
    there are, the lower the rate, as what a run learns goes with the sum of its rates.
    """
    if num_epochs == -1:
        num_epochs = min(max(round(FEW / conversations), 1), MOST_EPOCHS)
    if init_lr_frac == -1:
        init_lr_frac = min(max(FEW_RATE * FEW / (conversations * num_epochs), LEAST_RATE), FEW_RATE)
    return num_epochs, init_lr_frac


def row_length(max_seq_len: int, meta: dict) -> int:
    """Tokens of a row: the setting, or for −1 the model's (meta of a checkpoint); UserError for longer ones."""
    longest = meta["model_config"]["sequence_len"]
    if max_seq_len > longest:
        raise UserError(f"max_seq_len={max_seq_len} must be within 1 and the model's {longest}, or -1 for that")
    return longest if max_seq_len == -1 else max_seq_len


def plan_steps(
    num_rows: int, rows_per_step: int, num_iterations: int, device_batch_size: int, world_size: int,
) -> tuple[int, int]:
    """
    How num_rows rows are trained on once, rows_per_step at a time over all ranks; num_iterations: at most (-1: all).

    Returns (optimizer steps, rows of a rank and micro-step; not every one of them is filled).
    """
    all_steps = math.ceil(num_rows / rows_per_step)
    rows = min(device_batch_size, math.ceil(rows_per_step / world_size))
    return all_steps if num_iterations == -1 else min(num_iterations, all_steps), rows


def report_stage(
    start: Start, step: int, metrics: Metrics, script: str, title: str, config: dict, results: dict,
    note: str = "",
) -> None:
    """After the last step: write a stage's section of the report (`note`, then settings), say how to try its model."""
    column = start.checkpoints.parent.name.removesuffix("_checkpoints")
    write_section(script, title, note + settings_table(config), {column: results}, metrics.path,
                  data=start.meta.get("data"), checkpoint=step_dir(start.checkpoints, step))
    say_how_to_talk(start.checkpoints)
