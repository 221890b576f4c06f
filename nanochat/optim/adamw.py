"""AdamW: the update rule, a pure function of tensors, and the optimizer that applies it to a rank's shards."""
import math

import torch
from torch import Tensor

from nanochat.optim.zero import StepStats
from nanochat.runtime.compiling import in_one_pass


def adamw_update(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, keep: Tensor, weight1: Tensor, weight2: Tensor,
    rate: Tensor, second: Tensor, eps: Tensor,
) -> None:
    """
    One step in place on any range of elements; everything float32. The factors are scalars on the device: as Python's
    numbers they would be compiled in. Loshchilov & Hutter 2019, arXiv:1711.05101; eps is added after the bias
    correction.
    """
    exp_avg.lerp_(grad, weight1)
    exp_avg_sq.lerp_(grad * grad, weight2)
    master.mul_(keep).sub_(exp_avg / ((exp_avg_sq / second).sqrt() + eps) * rate)


def bias_correction(beta: float, step: Tensor) -> Tensor:
    """1 − beta^step. As a difference in float32 it would lose a digit or two in the first steps."""
    return -torch.expm1(step * math.log(beta))


class DistAdamW:
    """
    AdamW on a rank's shards; it needs no communication, because its update is elementwise.
    groups: [{"shards": [Shard, …], "lr": float}, …]; a group's own "betas" and "weight_decay" take the place of the
    arguments.
    """

    kind = "adamw"

    def __init__(
        self, groups: list[dict], device: torch.device | str = "cpu", betas: tuple[float, float] = (0.8, 0.95),
        eps: float = 1e-10, weight_decay: float = 0.0,
    ):
        common = {"betas": betas, "weight_decay": weight_decay}
        self.param_groups = [{"initial_lr": group["lr"], **common, **group} for group in groups]
        self.eps = eps
        shards = [shard for group in groups for shard in group["shards"]]
        self.state = {key: {s.name: torch.zeros_like(s.master) for s in shards} for key in ("exp_avg", "exp_avg_sq")}
        self.owned: dict[str, dict[str, Tensor]] = {}
        self.counters = {"steps": torch.zeros((), dtype=torch.float32, device=device)}  # applied; exact up to 2^24

    @torch.no_grad()
    def step(self, stats: StepStats) -> None:
        """Apply the shards' gradients, unless the step is not ok: then nothing changes on any rank."""
        self.counters["steps"] += stats.ok
        step = self.counters["steps"].clamp(min=1)
        for group in self.param_groups:
            (beta1, beta2), lr, ok = group["betas"], group["lr"], stats.ok
            factors = (1 - lr * group["weight_decay"] * ok, (1 - beta1) * ok, (1 - beta2) * ok,
                       lr * ok / bias_correction(beta1, step), bias_correction(beta2, step), ok.new_full((), self.eps))
            for shard in group["shards"]:
                exp_avg, exp_avg_sq = (self.state[key][shard.name] for key in ("exp_avg", "exp_avg_sq"))
                in_one_pass(adamw_update, shard.master, shard.grad, exp_avg, exp_avg_sq, *factors)
