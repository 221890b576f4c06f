"""Learning rates of a step, as pure functions of the settings; `set_rates` applies them."""
from typing import NamedTuple

# The largest share of a run that may be warmup: a short run is not all warmup.
LONGEST_WARMUP = 0.1


def warmdown_left(step: int, num_iterations: int, warmdown_ratio: float) -> float:
    """1 until the last part of the run, then linear to 0 at its end, where it stays."""
    left = max(num_iterations - step, 0)
    warmdown = warmdown_ratio * num_iterations
    return left / warmdown if left < warmdown else 1.0


def lr_multiplier(
    step: int, num_iterations: int, warmdown_ratio: float, warmup_steps: int, final_lr_frac: float
) -> float:
    """Linear warmup, constant, linear warmdown to final_lr_frac at the end, where it stays; always within [0, 1]."""
    warmup = min(warmup_steps, LONGEST_WARMUP * num_iterations)
    rise = (step + 1) / warmup if step < warmup else 1.0
    fall = final_lr_frac + (1 - final_lr_frac) * warmdown_left(step, num_iterations, warmdown_ratio)
    return min(rise, fall, 1.0)


class Rates(NamedTuple):
    """A step's rates, all but the momentum as multiples of the initial ones. `Recipe.at` computes them."""

    muon: float          # learning rates, by the optimizer's kind
    adamw: float
    ema_nesterov: float  # its distance
    momentum: float      # of Muon
    decay: float         # of Muon's weight decay


def set_rates(optimizers, rates: Rates) -> None:
    """Set every group's rates for a step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * getattr(rates, optimizer.kind)
            if optimizer.kind == "muon":
                group["momentum"] = rates.momentum
                group["weight_decay"] = group["initial_weight_decay"] * rates.decay


def is_due(step: int, num_iterations: int, every: int) -> bool:
    """Whether an action is due before this step: every `every` steps and at the end; -1: never."""
    return every > 0 and (step % every == 0 or step >= num_iterations)
