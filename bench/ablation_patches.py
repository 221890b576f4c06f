"""
Candidates that are not part of the product, for bench/ablation_run.py: each is a function that replaces something of
nanochat before scripts.base_train is imported. It may return a function of base_train's globals, for after the last
step.
"""
from collections.abc import Callable

import nanochat.schedule
from nanochat.zero import Sharding


def tail_average(power: float = 8.0) -> Callable[[dict], None]:
    """
    The model that is evaluated has the mean of the masters over the warmdown, in which the newest of n weighs
    (power + 1) / (power + n): Shamir & Zhang 2013, arXiv:1212.1824.
    """
    multiplier, gather = nanochat.schedule.lr_multiplier, Sharding.all_gather_params
    means, before, seen = {}, 0.0, 0

    def watched(*args, **kwargs) -> float:
        nonlocal before, seen
        lrm = multiplier(*args, **kwargs)
        seen, before = seen + (lrm < before), lrm
        return lrm

    def averaged(sharding: Sharding) -> None:
        for shard in sharding.shards if seen else ():
            mean = means.setdefault(shard.name, shard.master.clone())
            mean.lerp_(shard.master, (power + 1) / (power + seen))
        gather(sharding)

    def use_means(ran: dict) -> None:
        for shard in ran["sharding"].shards:
            shard.master.copy_(means.get(shard.name, shard.master))
        gather(ran["sharding"])

    nanochat.schedule.lr_multiplier, Sharding.all_gather_params = watched, averaged
    return use_means
