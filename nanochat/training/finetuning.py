"""How mid-training, fine-tuning and RL begin: model and optimizers, rates, and what the rows of a step depend on."""
import torch

from nanochat.data.conversation_loader import PackedRows, RenderedConversations
from nanochat.data.tokenizer import Tokenizer
from nanochat.model.gpt import GPT
from nanochat.optim.optimizers import setup_optimizers
from nanochat.optim.sharding import Sharding
from nanochat.optim.zero import shard_model
from nanochat.runtime.console import print0
from nanochat.runtime.errors import UserError
from nanochat.training.checkpoint import changed_settings, load_checkpoint
from nanochat.training.resharding import load_training_state, stored_weights
from nanochat.training.starting import Start


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
