"""Learning rate, momentum, weight decay, horizon and batch size: pure functions of the step and the settings."""
import math

from nanochat.errors import UserError

# The batch grows with the tokens to train on as tokens^0.383, through half a million tokens for 1.2 billion
# (a depth-12 model on ten tokens per parameter). Exponent: Bergsma et al. 2025, arXiv:2505.13738. The rates of the
# scripts are for that point.
REFERENCE_BATCH, REFERENCE_TOKENS, BATCH_EXPONENT = 2**19, 1.2e9, 0.383
LONGEST_WARMUP = 0.1  # part of the run: a short one is not all warmup


def warmdown_left(step: int, num_iterations: int, warmdown_ratio: float) -> float:
    """1 until the last part of the run, then linear to 0 at its end, where it stays."""
    left, warmdown = max(num_iterations - step, 0), warmdown_ratio * num_iterations
    return left / warmdown if left < warmdown else 1.0


def lr_multiplier(
    step: int, num_iterations: int, warmup_steps: int, warmdown_ratio: float, final_lr_frac: float
) -> float:
    """Linear warmup, constant, linear warmdown to final_lr_frac at the end, where it stays; always within [0, 1]."""
    warmup = min(warmup_steps, LONGEST_WARMUP * num_iterations)
    rise = (step + 1) / warmup if step < warmup else 1.0
    fall = final_lr_frac + (1 - final_lr_frac) * warmdown_left(step, num_iterations, warmdown_ratio)
    return min(rise, fall, 1.0)


def is_due(step: int, num_iterations: int, every: int) -> bool:
    """Whether something is done before this step that is done every so many steps and at the end; -1: never."""
    return every > 0 and (step % every == 0 or step >= num_iterations)


def momentum_at(step: int, left: float = 1.0, peak: float = 0.95, final: float = 0.95) -> float:
    """
    Muon's: 0.85 rising to the peak over 300 steps, as early gradients turn too fast to be averaged for long; in the
    warmdown, of which `left` is left, falling to `final`, as late steps are small beside what was averaged.
    """
    return min(0.85 + (peak - 0.85) * min(step / 300, 1.0), final + (peak - final) * left)


def weight_decay_multiplier(step: int, num_iterations: int) -> float:
    """Linear to zero at the end of the run."""
    return max(1 - step / num_iterations, 0.0)


def apply_schedule(optimizers, step: int, num_iterations: int, lrm: float, momentum: float) -> None:
    """Set every group's rates for this step from what they were at the start of the run."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lrm
            if "momentum" in group:
                group["momentum"] = momentum
            if "initial_weight_decay" in group:
                group["weight_decay"] = group["initial_weight_decay"] * weight_decay_multiplier(step, num_iterations)


def rate_scales(batch: int, tokens: float) -> tuple[float, float]:
    """
    What learning rates, and weight decay, are multiplied by for a batch and a horizon in tokens. Rates change as
    √batch, but are never less than half: runs on small batches are short, and learn little at small rates. Decay times
    rate times steps, which says how much of early weights is left, stays what it is at the reference: Wang & Aitchison
    2024, arXiv:2405.13698.
    """
    lr = max((batch / REFERENCE_BATCH) ** 0.5, 0.5)
    return lr, batch / REFERENCE_BATCH / lr * REFERENCE_TOKENS / tokens


def scale_rates(optimizers, lr: float, decay: float) -> None:
    """Multiply every group's learning rate, and the weight decay that has a schedule, for the whole run."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["initial_lr"] *= lr
        if "initial_weight_decay" in group:
            group["initial_weight_decay"] *= decay


def choose_batch_size(tokens_or_none: float | None, num_iterations: int, rows_unit: int) -> int:
    """
    Tokens per optimizer step for a horizon given in tokens, or in steps (tokens None): the power of two nearest to
    the rule above, but at least one micro-batch on every rank (rows_unit tokens) and a multiple of it.
    """
    if tokens_or_none is not None:
        if tokens_or_none <= 0:
            raise UserError("no horizon: set num_iterations, target_flops or target_param_data_ratio")
        batch = REFERENCE_BATCH * (tokens_or_none / REFERENCE_TOKENS) ** BATCH_EXPONENT
    else:  # tokens = steps · batch: solve batch = ref · (steps · batch / ref_tokens)^e for batch
        batch = (REFERENCE_BATCH * (num_iterations / REFERENCE_TOKENS) ** BATCH_EXPONENT) ** (1 / (1 - BATCH_EXPONENT))
    batch = 2 ** round(math.log2(batch))
    return max(round(batch / rows_unit), 1) * rows_unit


def accumulation_steps(total_batch_size: int, device_batch_size: int, max_seq_len: int, world_size: int) -> int:
    """Micro-steps per optimizer step on each rank, or an error that names the nearest batches that work."""
    if total_batch_size < 1:
        raise UserError(f"total_batch_size={total_batch_size} must be at least 1, or -1 to have it chosen")
    unit = device_batch_size * max_seq_len * world_size
    if total_batch_size % unit == 0:
        return total_batch_size // unit
    below = total_batch_size // unit * unit
    nearest = f"{below} or {below + unit}" if below else f"{unit}"
    rows, rest = divmod(total_batch_size, max_seq_len * world_size)
    smaller = [] if rest else [size for size in range(device_batch_size, 0, -1) if rows and rows % size == 0][:1]
    raise UserError(
        f"total_batch_size={total_batch_size} is not a multiple of device_batch_size * max_seq_len * world_size = "
        f"{device_batch_size} * {max_seq_len} * {world_size} = {unit}; try total_batch_size={nearest}"
        + "".join(f", or device_batch_size={size}" for size in smaller)
    )


def choose_num_iterations(
    num_iterations: int, target_flops: float, target_param_data_ratio: float,
    flops_per_token: int, parameters: int, total_batch_size: int,
) -> int:
    """Optimizer steps of the run: as given, else from a FLOP budget, else from tokens per parameter that computes."""
    if num_iterations > 0:
        return num_iterations
    if target_flops > 0:
        steps = round(target_flops / (flops_per_token * total_batch_size))
    elif target_param_data_ratio > 0:
        steps = round(target_param_data_ratio * parameters / total_batch_size)
    else:
        raise UserError("no horizon: set num_iterations, target_flops or target_param_data_ratio")
    if steps < 1:
        raise UserError(f"the horizon is less than one step of total_batch_size={total_batch_size} tokens; "
                        "lower that or set num_iterations")
    return steps
