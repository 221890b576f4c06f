"""AdamW: the update rule, a pure function of tensors, and the optimizer that applies it to a rank's shards."""
import math

import torch
from torch import Tensor

from nanochat.zero import StepStats


def adamw_update(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    step: Tensor, ok: Tensor, lr: float, weight_decay: float, betas: tuple[float, float], eps: float,
) -> None:
    """
    Step number `step` (from 1) in place on any range of elements; everything float32. Loshchilov & Hutter 2019,
    arXiv:1711.05101; eps is added after the bias correction. step and ok are scalars on the device: with ok = 0 (and
    a gradient of zero) nothing changes, to the bit.
    """
    beta1, beta2 = betas
    if weight_decay:
        master.mul_(1 - lr * weight_decay * ok)
    exp_avg.lerp_(grad, (1 - beta1) * ok)
    exp_avg_sq.lerp_(grad * grad, (1 - beta2) * ok)
    denominator = (exp_avg_sq / bias_correction(beta2, step)).sqrt_().add_(eps)
    master.addcmul_(exp_avg / denominator, lr * ok / bias_correction(beta1, step), value=-1)


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
            for shard in group["shards"]:
                exp_avg, exp_avg_sq = (self.state[key][shard.name] for key in ("exp_avg", "exp_avg_sq"))
                adamw_update(shard.master, shard.grad, exp_avg, exp_avg_sq, step, stats.ok,
                             group["lr"], group["weight_decay"], group["betas"], self.eps)
