"""Learning rate, momentum, weight decay, horizon and batch size: pure functions of the step and the settings."""
import math
from typing import NamedTuple

from nanochat.model.gpt_config import LARGE_DEPTH
from nanochat.runtime.errors import UserError

# The batch grows with the tokens to train on as tokens^0.383, through half a million tokens for 1.2 billion
# (a depth-12 model on ten tokens per parameter). Exponent: Bergsma et al. 2025, arXiv:2505.13738. The rates of the
# scripts are for that point.
REFERENCE_BATCH = 2**19
REFERENCE_TOKENS = 1.2e9
BATCH_EXPONENT = 0.383
# The largest batch that is known to pay: with 2^21, which the rule gives from depth 32 on, a model of depth 34 needed
# four to six times the tokens of one of depth 24 for the same loss (nanochat, pull request 851).
LARGEST_BATCH = 2**20
LONGEST_WARMUP = 0.1  # part of the run: a short one is not all warmup


class Recipe(NamedTuple):
    """Settings of pretraining that depend on its steps and layers; of a short run, if nothing else is said."""

    embedding_lr: float = 0.2
    unembedding_lr: float = 0.004
    muon_momentum: float = 0.95
    final_muon_momentum: float = 0.95
    momentum_steps: int = 300
    weight_decay: float = 0.0
    warmup_steps: int = 0
    warmdown_ratio: float = 0.6
    final_lr_frac: float = 0.0


# A long run of a large model has nanochat's recipe of 2026, for GPUs. Its decay of 0.28 is for 0.88 billion tokens; at
# REFERENCE_TOKENS 0.205 is as strong. Others keep the values that the CPU's speedrun was tuned with: in fewer than
# about 1,000 steps the warmdown would begin before momentum has risen, and with 4 layers the head's rate was too high.
LONG = 1000  # steps
LONG_RUN = Recipe(
    embedding_lr=0.3, unembedding_lr=0.008, muon_momentum=0.97, final_muon_momentum=0.9, momentum_steps=400,
    weight_decay=0.205, warmup_steps=40, warmdown_ratio=0.65, final_lr_frac=0.05)


def choose_recipe(settings: dict, num_iterations: int, before: dict | None = None) -> Recipe:
    """
    The settings that are not -1; instead of those that are, the settings of the run that goes on (`before`), or what is
    for this number of steps and layers.
    """
    recipe = Recipe()
    if num_iterations >= LONG and settings["depth"] >= LARGE_DEPTH:
        recipe = LONG_RUN
    if before:  # older runs do not say momentum_steps: they had a short run's
        recipe = Recipe(**{name: before[name] for name in Recipe._fields if name in before})
    return recipe._replace(**{name: settings[name] for name in Recipe._fields if settings[name] != -1})


def warmdown_left(step: int, num_iterations: int, warmdown_ratio: float) -> float:
    """1 until the last part of the run, then linear to 0 at its end, where it stays."""
    left = max(num_iterations - step, 0)
    warmdown = warmdown_ratio * num_iterations
    return left / warmdown if left < warmdown else 1.0


def lr_multiplier(
    step: int,
    num_iterations: int,
    warmdown_ratio: float,
    warmup_steps: int = 0,
    final_lr_frac: float = 0.0,
) -> float:
    """Linear warmup, constant, linear warmdown to final_lr_frac at the end, where it stays; always within [0, 1]."""
    warmup = min(warmup_steps, LONGEST_WARMUP * num_iterations)
    rise = (step + 1) / warmup if step < warmup else 1.0
    fall = final_lr_frac + (1 - final_lr_frac) * warmdown_left(step, num_iterations, warmdown_ratio)
    return min(rise, fall, 1.0)


def is_due(step: int, num_iterations: int, every: int) -> bool:
    """Whether an action is due before this step: every `every` steps and at the end; -1: never."""
    return every > 0 and (step % every == 0 or step >= num_iterations)


def momentum_at(
    step: int,
    left: float = 1.0,
    peak: float = 0.95,
    final: float = 0.95,
    rise_steps: int = 300,
) -> float:
    """
    Muon's: 0.85 rising to the peak over rise_steps, since early gradients turn too fast to be averaged for long; in the
    warmdown falling to `final`, since late steps are small beside the average. left: see warmdown_left.
    """
    rise = 0.85 + (peak - 0.85) * min(step / rise_steps, 1.0)
    fall = final + (peak - final) * left
    return min(rise, fall)


def apply_schedule(
    optimizers,
    step: int,
    num_iterations: int,
    lrm: float,
    momentum: float,
) -> None:
    """Set every group's rates for this step from their initial ones; weight decay falls to zero on a cosine."""
    decay_left = (1 + math.cos(math.pi * min(step / num_iterations, 1.0))) / 2
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lrm
            if "momentum" in group:  # Muon's
                group["momentum"] = momentum
                group["weight_decay"] = group["initial_weight_decay"] * decay_left


def rate_scale(batch: int) -> float:
    """
    The factor of learning rates for a batch. They change as √batch, but are never less than half: runs on small batches
    are short, and learn little at small rates.
    """
    return max((batch / REFERENCE_BATCH) ** 0.5, 0.5)


def decay_scale(lr_scale: float, num_iterations: int) -> float:
    """
    The factor of weight decay. Decay times rate times steps, which says how much of early weights is left, stays as at
    the reference: Wang & Aitchison 2024, arXiv:2405.13698.
    """
    return REFERENCE_TOKENS / REFERENCE_BATCH / (lr_scale * num_iterations)


def choose_batch_size(num_iterations: int, horizon: float, rows_unit: int) -> int:
    """
    Tokens per optimizer step for a horizon in steps, or if that is not positive in tokens: the power of two nearest to
    the rule above, at most LARGEST_BATCH, but at least one micro-batch on every rank (rows_unit tokens) and a multiple
    of it.
    """
    if num_iterations > 0:  # tokens = steps · batch: solve batch = ref · (steps · batch / ref_tokens)^e for batch
        batch = (REFERENCE_BATCH * (num_iterations / REFERENCE_TOKENS) ** BATCH_EXPONENT) ** (1 / (1 - BATCH_EXPONENT))
    else:
        batch = REFERENCE_BATCH * (horizon / REFERENCE_TOKENS) ** BATCH_EXPONENT
    batch = min(2 ** round(math.log2(batch)), LARGEST_BATCH)
    return max(round(batch / rows_unit), 1) * rows_unit


def accumulation_steps(
    total_batch_size: int,
    device_batch_size: int,
    max_seq_len: int,
    world_size: int,
    uneven: bool = False,
) -> int:
    """
    Micro-steps per optimizer step on each rank, or an error that names the nearest batches that work. uneven: also for
    a number of micro-batches that the ranks do not divide; in the last micro-step some ranks then have no rows.
    """
    if total_batch_size < 1:
        raise UserError(f"total_batch_size={total_batch_size} must be at least 1, or -1 to have it chosen")
    unit = device_batch_size * max_seq_len * world_size
    if total_batch_size % (unit // world_size if uneven else unit) == 0:
        return math.ceil(total_batch_size / unit)

    below = total_batch_size // unit * unit
    advice = f"try total_batch_size={below} or {below + unit}" if below else f"try total_batch_size={unit}"
    rows, rest = divmod(total_batch_size, max_seq_len * world_size)
    if rows and not rest:
        largest = max(size for size in range(1, device_batch_size + 1) if rows % size == 0)
        advice += f", or device_batch_size={largest}"
    raise UserError(
        f"total_batch_size={total_batch_size} is not a multiple of device_batch_size * max_seq_len * world_size = "
        f"{device_batch_size} * {max_seq_len} * {world_size} = {unit}; {advice}"
    )


def choose_num_iterations(num_iterations: int, horizon: float, total_batch_size: int) -> int:
    """Optimizer steps of the run: num_iterations if positive, else from a horizon in tokens."""
    steps = num_iterations if num_iterations > 0 else round(horizon / total_batch_size)
    if steps < 1:
        raise UserError(f"the horizon is less than one step of total_batch_size={total_batch_size} tokens; "
                        "lower that or set num_iterations")
    return steps
