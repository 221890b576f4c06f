"""How the stages after pretraining begin: from the model of the stage before, or from where an interrupted run was."""
from pathlib import Path
from typing import NamedTuple

import torch

from nanochat.adamw import DistAdamW
from nanochat.checkpoint import changed_settings, checkpoint_dir, choose_start, find_checkpoint, load_checkpoint, model_dir
from nanochat.distributed import print0
from nanochat.errors import UserError, require_fraction, require_positive
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
    step: int               # the first to take
    meta: dict | None       # of the interrupted run that goes on


def begin_stage(stage: str, config: dict, device: torch.device, dtype: torch.dtype, compiling: bool) -> Stage:
    """
    The model of `stage` ("mid", "sft", "rl"), ready to train: loaded, sharded, compiled. config: the script's settings,
    of which it takes those that say where the model is, how it is resumed, sharded and optimized. Weights of the stage
    before are taken in the dtype they were saved in; an interrupted run goes on with its masters and moments. COLLECTIVE.
    """
    require_fraction(config, "warmdown_ratio", "final_lr_frac", "init_lr_frac")
    require_positive(config, "device_batch_size", "max_bad_steps")
    if config["seed"] < 0:
        raise UserError(f"seed={config['seed']} must be at least 0")
    if config["num_iterations"] == 0 or config["num_iterations"] < -1:
        raise UserError(f"num_iterations={config['num_iterations']} trains nothing; set the steps, or -1 for as many as the data has")
    source = model_dir(config["source"], config["model_tag"])
    checkpoints = checkpoint_dir(stage, source.name)
    checkpoint = choose_start(checkpoints, config["resume"], config["resume_from_step"], config["overwrite"])
    begin = checkpoint or find_checkpoint(source, config["step"])
    model, tokenizer, meta = load_checkpoint(begin, device)
    model.float()  # what a Sharding takes; masters in float32 come of it
    model.activation_checkpointing = config["activation_checkpointing"]
    reduce_dtype = getattr(torch, config["reduce_dtype"])
    sharding = Sharding(model, model.units(), device, dtype, config["zero_stage"], config["shard_size"], reduce_dtype)
    rates = (config[name] * config["init_lr_frac"] for name in ("unembedding_lr", "embedding_lr", "matrix_lr"))
    optimizers = model.setup_optimizers(sharding, *rates, config["weight_decay"])
    if compiling:
        model.compile_blocks()
    if checkpoint:
        load_training_state(checkpoint, sharding, optimizers)
        print0(f"resuming from {checkpoint}{changed_settings(meta['config'], config)}")
    else:
        print0(f"starting from {begin}")
    step = meta["step"] if checkpoint else 0
    return Stage(model, tokenizer, sharding, optimizers, checkpoints, step, meta if checkpoint else None)


def require_same_data(meta: dict | None, identity: dict) -> None:
    """UserError when a run would go on with other rows than it was interrupted in."""
    for key, value in identity.items():
        if meta is not None and meta["data_state"][key] != value:
            raise UserError(f"cannot continue exactly: {key} was {meta['data_state'][key]} when the checkpoint was saved and is {value} now")
