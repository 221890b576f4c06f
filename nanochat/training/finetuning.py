"""How the stages after pretraining begin: from the previous stage's model, or from an interrupted run's checkpoint."""
import math
from pathlib import Path
from typing import NamedTuple

import torch

from nanochat.data.batch_shape import BatchShape
from nanochat.data.conversation_loader import RenderedConversations, Rows
from nanochat.data.tokenizer import Tokenizer
from nanochat.model.gpt import GPT
from nanochat.optim.optimizers import setup_optimizers
from nanochat.optim.sharding import Sharding
from nanochat.optim.zero import shard_model
from nanochat.runtime.collectives import from_rank0, rank_and_size
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
from nanochat.training.records import describe_checkpoint, unfinished
from nanochat.training.resharding import load_training_state, stored_weights

# Fine-tuning on a user's few conversations. Measured with models of depth 4; a rate of 0.1 taught next to nothing. Not
# measured with large models.
FEW = 3_000       # rows
FEW_RATE = 0.3
MOST_EPOCHS = 20
# nanochat's rate, for 23,000 conversations.
LEAST_RATE = 0.02


class Start(NamedTuple):
    """Where a run of a training stage begins."""

    checkpoints: Path       # the folder of its checkpoints
    begin: Path             # the checkpoint to load: of the previous stage, or of an interrupted run to resume
    origin: str             # the previous stage's checkpoint that the run began with, and the sum of its weights
    meta: dict              # of `begin`
    resumed: dict | None    # the same, if an interrupted run is resumed


def find_source(folder: Path, step: int | None) -> Path:
    """
    The verified checkpoint whose weights a run begins with. UserError if the source model's own run has not reached its
    end, unless a step is given. COLLECTIVE.
    """
    begin = find_checkpoint(folder, step, training=False)
    if step is None and (place := unfinished(begin)):
        raise UserError(f"{begin} is {place}: its run was stopped, or is still going on; finish it with "
                        f"--resume=auto, or start from this step with --source_step={read_meta(begin)['step']}")
    print0(f"starting from {begin}")
    return begin


def find_start(stage: str, source: str, settings: dict) -> Start:
    """
    Where a run of a training stage ("mid", "sft", "rl") begins, by its script's settings; source: the previous stage.
    UserError as for `find_source`. COLLECTIVE.
    """
    source_dir, source_step = model_dir(source, settings["model_tag"]), settings["source_step"]
    checkpoints = checkpoint_dir(stage, source_dir.name)
    interrupted = choose_start(checkpoints, settings["resume"], settings["overwrite"])
    if interrupted is None:
        begin = find_source(source_dir, source_step)
        return Start(checkpoints, begin, from_rank0(describe_checkpoint, begin), read_meta(begin), None)
    # `require_same_data` compares the origin: the checkpoint that the run would begin with now. If that is gone, or
    # torchrun restarted the run (which need not stop if the source was trained further), the old origin is kept.
    meta = read_meta(interrupted)
    if from_rank0(was_begun) or not from_rank0(list_steps, source_dir):
        origin = meta["data_state"]["origin"]
    else:
        origin = from_rank0(describe_checkpoint, find_checkpoint(source_dir, source_step, training=False))
    return Start(checkpoints, interrupted, origin, meta, meta)


def load_training(
    start: Start, settings: dict, device: torch.device, dtype: torch.dtype,
) -> tuple[GPT, Tokenizer, Sharding, tuple]:
    """
    (model, tokenizer, sharding, optimizers) of a run. For an interrupted run, masters and moments are loaded, too;
    otherwise the optimizers start from zero. settings: of the script; those that a resumed run has changed are printed.
    COLLECTIVE.
    """
    model, tokenizer, _ = load_checkpoint(start.begin, torch.device("meta"))
    # The weights come unit by unit, in the dtype they were saved in: no rank holds more than one whole unit beside its
    # shards.
    sharding = shard_model(model, model.units(), device, dtype, settings["zero_stage"],
                           weights=stored_weights(start.begin))
    model.activation_checkpointing = settings["activation_checkpointing"]
    optimizers = setup_optimizers(model, sharding, settings["unembedding_lr"], settings["embedding_lr"],
                                  settings["matrix_lr"], lr_scale=settings["init_lr_frac"])
    if start.resumed:
        load_training_state(start.begin, sharding, optimizers)
        print0(f"resuming from {start.begin}{changed_settings(start.meta, settings)}")
    return model, tokenizer, sharding, optimizers


def require_same_data(start: Start, data_state: dict) -> None:
    """
    UserError if an interrupted run would go on from another model, or with other rows, than it began with.
    """
    if not start.resumed:
        return
    for key, value in data_state.items():
        before = start.meta["data_state"].get(key)
        if before != value:
            raise UserError(f"cannot continue exactly: {key} was {before} when the checkpoint was saved "
                            f"and is {value} now; --overwrite starts over")


def choose_epochs_and_rate(conversations: int, num_epochs: int, init_lr_frac: float) -> tuple[int, float]:
    """
    How often each conversation is seen, and the fraction of the learning rates to begin with; −1: chosen here. FEW
    rows, 32 a step, are learned at FEW_RATE, so a few hundred conversations are seen several times. The more rows there
    are, the lower the rate, because learning depends on the sum of a run's rates.
    """
    if num_epochs == -1:
        num_epochs = min(max(round(FEW / conversations), 1), MOST_EPOCHS)
    if init_lr_frac == -1:
        init_lr_frac = min(max(FEW_RATE * FEW / (conversations * num_epochs), LEAST_RATE), FEW_RATE)
    return num_epochs, init_lr_frac


def row_length(max_seq_len: int, meta: dict) -> int:
    """Tokens of a row: the setting, or for −1 the model's limit (meta: of a checkpoint). UserError if longer."""
    longest = meta["model_config"]["sequence_len"]
    if max_seq_len > longest:
        raise UserError(f"max_seq_len={max_seq_len} must be within 1 and the model's {longest}, or -1 for that")
    return longest if max_seq_len == -1 else max_seq_len


def batch_shape(rows_per_step: int, device_batch_size: int, max_seq_len: int, device: torch.device) -> BatchShape:
    """The batches of optimizer steps of this many rows over all ranks: at most device_batch_size rows on each rank."""
    rank, world_size = rank_and_size()
    rows = min(device_batch_size, math.ceil(rows_per_step / world_size))
    return BatchShape(rows, max_seq_len, rank, world_size, device)


def plan_steps(
    start: Start, settings: dict, conversations: RenderedConversations, steps: list[Rows], per_step: int,
    shape: BatchShape, unit: str = "rows",
) -> tuple[int, dict]:
    """
    (optimizer steps, data_state) of a run over these steps, each of per_step rows or other units: all once, or the
    first num_iterations. data_state: everything the rows depend on; UserError as in `require_same_data`.
    """
    data_state = {"origin": start.origin, "conversations": conversations.fingerprint, "seed": settings["seed"],
                  "max_seq_len": shape.max_seq_len, "rows_per_step": per_step}
    require_same_data(start, data_state)
    num_iterations = len(steps)
    if settings["num_iterations"] != -1:
        num_iterations = min(settings["num_iterations"], len(steps))
    first = len(shape.micro_steps(steps[0]))
    print0(f"{num_iterations:,} steps of {per_step} {unit}, the first one {first} micro-step(s) x "
           f"{shape.world_size} rank(s) x {shape.device_batch_size} rows")
    return num_iterations, data_state
