"""How the stages after pretraining begin: from the model of the stage before, or from where an interrupted run was."""
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch

from nanochat.optimizers import setup_optimizers
from nanochat.adamw import DistAdamW
from nanochat.checkpoint import (
    MODEL_FILE, changed_settings, checkpoint_dir, choose_start, data_of, find_checkpoint, job, list_steps, load_checkpoint, model_dir,
    restarted,
)
from nanochat.distributed import from_rank0, print0
from nanochat.errors import UserError
from nanochat.gpt import GPT
from nanochat.muon import DistMuon
from nanochat.resharding import load_training_state
from nanochat.tokenizer import Tokenizer
from nanochat.zero import Sharding


class Stage(NamedTuple):
    model: GPT
    tokenizer: Tokenizer
    sharding: Sharding
    optimizers: tuple[DistAdamW, DistMuon]
    checkpoints: Path       # the folder of this stage's checkpoints
    origin: str             # the checkpoint of the stage before that it all began with, and its sums
    data: str | None        # the data set that its base model was trained on, as far as its checkpoints say
    start_step: int         # the first optimizer step to take
    meta: dict | None       # of the interrupted run that goes on


def begin_stage(stage: str, config: dict, device: torch.device, dtype: torch.dtype, compiling: bool) -> Stage:
    """
    The model of `stage` ("mid", "sft", "rl"), ready to train: loaded, sharded, compiled. config: the script's settings,
    of which it takes those that say where the model is, how it is resumed, sharded and optimized. Weights of the stage
    before are taken in the dtype they were saved in; an interrupted run goes on with its masters and moments. COLLECTIVE.
    """
    source = model_dir(config["source"], config["model_tag"])
    checkpoints = checkpoint_dir(stage, source.name)
    checkpoint = None  # of an interrupted run; a dry run looks at nothing of one
    if not config.get("dry_run"):
        checkpoint = choose_start(checkpoints, config["resume"], config["resume_from_step"], config["overwrite"])
    begin = checkpoint or find_checkpoint(source, config["source_step"])
    model, tokenizer, meta = load_checkpoint(begin, device)
    if checkpoint is None:
        origin = from_rank0(describe_origin, begin)
    elif restarted() and meta["job"] == from_rank0(job):  # in the middle of a run: no reason to stop if the source has been trained on
        origin = meta["data_state"]["origin"]
    else:
        origin = origin_now(source, config["source_step"]) or meta["data_state"]["origin"]
    model.float()  # what a Sharding takes; masters in float32 come of it
    model.activation_checkpointing = config["activation_checkpointing"]
    reduce_dtype = getattr(torch, config["reduce_dtype"])
    sharding = Sharding(model, model.units(), device, dtype, config["zero_stage"], config["shard_size"], reduce_dtype)
    rates = (config[name] * config["init_lr_frac"] for name in ("unembedding_lr", "embedding_lr", "matrix_lr"))
    optimizers = setup_optimizers(model, sharding, *rates, config["weight_decay"])
    if compiling:
        model.compile_blocks()
    if checkpoint:
        load_training_state(checkpoint, sharding, optimizers)
        print0(f"resuming from {checkpoint}{changed_settings(meta['config'], config)}")
    else:
        print0(f"starting from {begin}")
    step = meta["step"] if checkpoint else 0
    return Stage(model, tokenizer, sharding, optimizers, checkpoints, origin, data_of(meta, source.name), step, meta if checkpoint else None)


def describe_origin(checkpoint: Path) -> str:
    """Name of a checkpoint and sum of its weights."""
    sums = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    return f"{'/'.join(checkpoint.parts[-3:])} ({sums[MODEL_FILE][:16]})"


def origin_now(source: Path, step: int | None) -> str | None:
    """What a run that started now would begin with; None where that is gone, as it may be once a run has begun. COLLECTIVE."""
    if not from_rank0(list_steps, source):
        return None
    return from_rank0(describe_origin, find_checkpoint(source, step))


def row_length(max_seq_len: int, model: GPT) -> int:
    """Tokens of a row: the setting, or for −1 the model's. UserError for rows that the model was not made for."""
    if max_seq_len != -1 and not 1 <= max_seq_len <= model.config.sequence_len:
        raise UserError(f"max_seq_len={max_seq_len} must be within 1 and the model's {model.config.sequence_len}, or -1 for that")
    return model.config.sequence_len if max_seq_len == -1 else max_seq_len


def require_same_data(meta: dict | None, data_state: dict) -> None:
    """UserError when a run would go on from another model, or with other rows, than the one that was interrupted."""
    for key, value in data_state.items():
        before = value if meta is None else meta["data_state"].get(key)
        if before != value:
            raise UserError(f"cannot continue exactly: {key} was {before} when the checkpoint was saved and is {value} now; --overwrite starts anew")


class Steps(NamedTuple):
    num_iterations: int     # optimizer steps of the run
    grad_accum_steps: int   # micro-steps of each
    rows: int               # of a rank and micro-step; places that no row of the step fills stay empty


def plan_steps(num_rows: int, rows_per_step: int, num_iterations: int, device_batch_size: int, world_size: int) -> Steps:
    """How num_rows rows are trained on once, rows_per_step at a time over all ranks; num_iterations: at most (-1: all)."""
    all_steps = math.ceil(num_rows / rows_per_step)
    rows = min(device_batch_size, math.ceil(rows_per_step / world_size))
    micro_steps = math.ceil(rows_per_step / (rows * world_size))
    return Steps(all_steps if num_iterations == -1 else min(num_iterations, all_steps), micro_steps, rows)
