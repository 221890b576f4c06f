"""
EMA-Nesterov (Yau et al. 2026, arXiv:2605.25395): after each update the weights move a little further in their average
direction, and the next gradient is taken there.

Let x be the weights after an update, and m the mean of the moves of x over about 1 / (1 − DECAY) steps. The paper
computes the next gradient at x + βm and updates from there: m ← DECAY m + (1 − DECAY)(x_new − x). The mean of the moves
is the move of the mean: m = (1 − DECAY)(x − a), where a is the mean of the weights before this update. So only a is
kept.

A run's last weights are blended with a: each is noisy, as the learning rate does not fall to zero, and a mean over late
steps is less so. modded-nanogpt, pull requests 325, 349, 364, with 0.25 to 0.6 of the mean.
"""
import torch
from torch import Tensor

from nanochat.optim.sharding import Shard, ShardOptimizer, StepStats
from nanochat.runtime.compiling import in_one_pass

DECAY = 0.99


def move_ahead(master: Tensor, average: Tensor, weight: Tensor, distance: Tensor) -> None:
    """One step in place on any range of elements, all float32; with weight 0 nothing changes. distance: the β above."""
    move = (master - average) * weight
    average.add_(move)
    master.addcmul_(move, distance)


class EMANesterov(ShardOptimizer):
    """
    The last optimizer of a step, on a rank's shards, elementwise like AdamW. The weights after it are the run's: they
    are sent, evaluated and saved. With a rate of 0 it only averages them.
    """

    kind = "ema_nesterov"

    def __init__(self, shards: list[Shard], distance: float):
        """distance: β at the highest learning rate; β falls with the rate."""
        super().__init__([{"shards": shards, "lr": distance}])
        # Starts as the run's initial weights.
        self.state["average"] = {s.name: s.master.clone() for s in shards}

    @torch.no_grad()
    def step(self, stats: StepStats) -> None:
        """Move the shards, unless the step is not ok: then nothing changes on any rank."""
        (group,) = self.param_groups
        weight = (1 - DECAY) * stats.ok
        distance = stats.ok.new_full((), group["lr"])
        for s in self.shards:
            in_one_pass(move_ahead, s.master, self.state["average"][s.name], weight, distance)

    @torch.no_grad()
    def end_run(self, share: float, roles: dict[str, str]) -> None:
        """
        After the last step: the weights become (1 − share) · weights + share · average, but for embeddings. The average
        stays. A run that is resumed with more steps goes on from the blended weights. roles: of all parameters.
        """
        for s in self.shards:
            if "embedding" not in roles[s.name]:
                s.master.lerp_(self.state["average"][s.name], share)
