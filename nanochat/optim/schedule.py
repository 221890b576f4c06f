"""Learning rate, momentum and weight decay of a step, and its micro-steps: pure functions of the settings."""
import math

from nanochat.runtime.errors import UserError

# The largest share of a run that may be warmup: a short run is not all warmup.
LONGEST_WARMUP = 0.1


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
    Muon's momentum rises from 0.85 to the peak over rise_steps: early gradients turn too fast to be averaged for long.
    In the warmdown it falls to `final`: late steps are small beside the average. left: see warmdown_left.
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
    adamw_lrm: float | None = None,
) -> None:
    """
    Set every group's rates for this step from their initial ones. Weight decay falls to zero on a cosine; a group with
    a window has a rate of zero outside it. adamw_lrm: AdamW's multiplier, None: lrm.
    """
    decay_left = (1 + math.cos(math.pi * min(step / num_iterations, 1.0))) / 2
    for optimizer in optimizers:
        multiplier = adamw_lrm if optimizer.kind == "adamw" and adamw_lrm is not None else lrm
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multiplier
            if "momentum" in group:  # Muon's
                group["momentum"] = momentum
                group["weight_decay"] = group["initial_weight_decay"] * decay_left
            if "window" in group:  # LookAhead's
                begin, end = group["window"]
                group["lr"] *= begin <= step / num_iterations < end


def rows_at_a_time(rows: int, ranks: int, most: int, pipeline_stages: int = 1) -> int:
    """
    Rows per rank and micro-step, at most `most`, for steps of `rows`: a divisor of each rank's share. If the ranks do
    not divide a step, up to a tenth of its places, in its last micro-step, stay empty to keep micro-steps large. A
    pipeline has no empty places, and at least as many micro-batches as stages. ranks: pipelines, if there are several
    stages.
    """
    share, rest = divmod(rows, ranks)
    for size in range(most, 1, -1):
        if not rest or pipeline_stages > 1:
            if share % size == 0 and share // size >= pipeline_stages:
                return size
        elif rows % size == 0 and rows >= 0.9 * ranks * size * math.ceil(rows / (ranks * size)):
            return size
    return 1


def accumulation_steps(
    total_batch_size: int,
    device_batch_size: int,
    max_seq_len: int,
    world_size: int,
    uneven: bool = False,
    pipeline_stages: int = 1,
) -> int:
    """
    Micro-steps per optimizer step on each rank, or an error that names the nearest batches that work. uneven: allow a
    number of micro-batches that the ranks do not divide; in the last micro-step some ranks have no rows.
    world_size: pipelines, if there are several stages; the batches named have a micro-step for each stage.
    """
    if total_batch_size < 1:
        raise UserError(f"total_batch_size={total_batch_size} must be at least 1, or -1 to have it chosen")
    unit = device_batch_size * max_seq_len * world_size
    if total_batch_size % (unit // world_size if uneven else unit) == 0:
        return math.ceil(total_batch_size / unit)

    below = total_batch_size // unit * unit
    advice = f"try total_batch_size={below} or {below + unit}"
    if below < unit * pipeline_stages:
        advice = f"try total_batch_size={unit * pipeline_stages}"
    rows, rest = divmod(total_batch_size, max_seq_len)
    if rows >= world_size * pipeline_stages and not rest and rows % world_size == 0:
        largest = rows_at_a_time(rows, world_size, device_batch_size, pipeline_stages)
        advice += f", or device_batch_size={largest}"
    raise UserError(
        f"total_batch_size={total_batch_size} is not a multiple of device_batch_size * max_seq_len * data-parallel "
        f"ranks = {device_batch_size} * {max_seq_len} * {world_size} = {unit}; {advice}"
    )
