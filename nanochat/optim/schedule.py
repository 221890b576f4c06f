"""Learning rate, momentum and weight decay of a step: pure functions of the settings; `set_rates` applies them."""
import math
from typing import NamedTuple

# The largest share of a run that may be warmup: a short run is not all warmup.
LONGEST_WARMUP = 0.1


def warmdown_left(step: int, num_iterations: int, warmdown_ratio: float) -> float:
    """1 until the last part of the run, then linear to 0 at its end, where it stays."""
    left = max(num_iterations - step, 0)
    warmdown = warmdown_ratio * num_iterations
    return left / warmdown if left < warmdown else 1.0


def lr_multiplier(
    step: int, num_iterations: int, warmdown_ratio: float, warmup_steps: int = 0, final_lr_frac: float = 0.0
) -> float:
    """Linear warmup, constant, linear warmdown to final_lr_frac at the end, where it stays; always within [0, 1]."""
    warmup = min(warmup_steps, LONGEST_WARMUP * num_iterations)
    rise = (step + 1) / warmup if step < warmup else 1.0
    fall = final_lr_frac + (1 - final_lr_frac) * warmdown_left(step, num_iterations, warmdown_ratio)
    return min(rise, fall, 1.0)


def muon_momentum(step: int, left: float, peak: float, final: float, rise_steps: int) -> float:
    """
    Muon's momentum rises from 0.85 to the peak over rise_steps: early gradients turn too fast to be averaged for long.
    In the warmdown it falls to `final`: late steps are small beside the average. left: see warmdown_left.
    """
    rise = 0.85 + (peak - 0.85) * min(step / rise_steps, 1.0)
    fall = final + (peak - final) * left
    return min(rise, fall)


def decay_multiplier(step: int, num_iterations: int) -> float:
    """Muon's weight decay falls to zero on a cosine."""
    return (1 + math.cos(math.pi * min(step / num_iterations, 1.0))) / 2


def ahead_multiplier(step: int, num_iterations: int) -> float:
    """
    EMA-Nesterov moves the weights ahead in mid-run only: early moves say little about later ones, and in the warmdown
    the weights come to rest. Steps 500 to 2,400 of 3,150 in modded-nanogpt's pull request 308, 300 to 1,950 of 2,900 in
    309.
    """
    return float(0.15 <= step / num_iterations < 0.75)


class Rates(NamedTuple):
    """A step's rates: multiples of the initial ones, but for the momentum. `Recipe.at` computes them."""

    lrm: float        # of Muon's learning rate
    adamw_lrm: float
    momentum: float   # Muon's
    decay: float      # of Muon's weight decay
    ahead: float      # of EMA-Nesterov's distance

    def times(self, factor: float) -> "Rates":
        """With both learning rates multiplied."""
        return self._replace(lrm=self.lrm * factor, adamw_lrm=self.adamw_lrm * factor)


def set_rates(optimizers, rates: Rates) -> None:
    """Set every group's rates for a step."""
    multipliers = {"muon": rates.lrm, "adamw": rates.adamw_lrm, "ema_nesterov": rates.ahead}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multipliers[optimizer.kind]
            if optimizer.kind == "muon":
                group["momentum"] = rates.momentum
                group["weight_decay"] = group["initial_weight_decay"] * rates.decay


def is_due(step: int, num_iterations: int, every: int) -> bool:
    """Whether an action is due before this step: every `every` steps and at the end; -1: never."""
    return every > 0 and (step % every == 0 or step >= num_iterations)
