"""AdamW: the update rule, a pure function of tensors, and the optimizer that applies it to a rank's shards."""
import math

import torch
from torch import Tensor

from nanochat.optim.sharding import ShardOptimizer, StepStats
from nanochat.runtime.compiling import in_one_pass

# Defaults of a group. The betas are nanochat's.
DEFAULTS = {"betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}


def adamw_update(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    keep: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    rate: Tensor,
    correction2: Tensor,
    eps: Tensor,
) -> None:
    """
    One step in place on any range of elements; everything float32. The factors are scalars on the device: Python
    numbers would be compiled in. Loshchilov & Hutter 2019, arXiv:1711.05101; eps is added after the bias correction.
    """
    exp_avg.lerp_(grad, weight1)
    exp_avg_sq.lerp_(grad * grad, weight2)
    master.mul_(keep).sub_(exp_avg / ((exp_avg_sq / correction2).sqrt() + eps) * rate)


def bias_correction(beta: float, step: Tensor) -> Tensor:
    """1 − beta^step. As a difference in float32 it would lose a digit or two in the first steps."""
    return -torch.expm1(step * math.log(beta))


class DistAdamW(ShardOptimizer):
    """
    AdamW on a rank's shards; it needs no communication, because its update is elementwise.
    A group may override DEFAULTS.
    """

    kind = "adamw"

    def __init__(
        self,
        groups: list[dict],
        device: torch.device | str = "cpu",
    ):
        super().__init__([DEFAULTS | group for group in groups], "exp_avg", "exp_avg_sq")
        # Applied steps; float32 counts exactly up to 2^24.
        self.counters["steps"] = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def step(self, stats: StepStats) -> None:
        """Apply the shards' gradients, unless the step is not ok: then nothing changes on any rank."""
        ok = stats.ok
        self.counters["steps"] += ok
        step = self.counters["steps"].clamp(min=1)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            correction1 = bias_correction(beta1, step)
            correction2 = bias_correction(beta2, step)
            # With ok 0 every factor leaves its tensor as it is.
            keep = 1 - group["lr"] * group["weight_decay"] * ok
            rate = group["lr"] * ok / correction1
            eps = ok.new_full((), group["eps"])
            for shard in group["shards"]:
                in_one_pass(
                    adamw_update, shard.master, shard.grad,
                    self.state["exp_avg"][shard.name], self.state["exp_avg_sq"][shard.name],
                    keep, (1 - beta1) * ok, (1 - beta2) * ok, rate, correction2, eps,
                )
