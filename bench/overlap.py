"""
What it is worth that ranks compute while they communicate: two ranks, on a link slowed down to a fixed rate.

    python -m bench.overlap         # Linux with iproute2, two cores; root, or where users may have namespaces

Each rank has a core to itself. The link is the loopback of a network namespace of their own, with a token bucket filter
(tc … tbf); it and the namespace go with the ranks. docs/overlap.md explains the figure.
"""
import os
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

from configurator import configure

import torch
import torch.distributed as dist

from bench.harness import bytes_sent, enter_own_network, on_ranks
from nanochat.gpt_config import config_from_depth
from nanochat.plan.probes import set_up_training

depth = 8                   # [1..] layers; the width (64 per layer) and the heads follow from it
max_seq_len = 256           # [1..] tokens per row
device_batch_size = 8       # [1..] rows per rank; one micro-step
communication = 0.65        # [>0] time that a step's bytes take, in backward passes; sets the rate of the link
num_rounds = 10             # [1..] rounds measured: a step that overlaps, one that does not, one on the free link
configure(globals())

VOCABULARY = 512            # few tokens, so that nearly all parameters are in the blocks
TBF = "burst 128kb limit 64mb"  # bursts of several of the link's packets; a queue for all that is sent at once: no loss


class Round(NamedTuple):
    """Seconds: of a step with overlap, of one without, of one without on the unthrottled link, of its backward pass."""

    on: float
    off: float
    unthrottled: float
    backward: float

    def added(self) -> float:
        """By communication that does not overlap, in backward passes."""
        return (self.off - self.unthrottled) / self.backward

    def hidden(self) -> float:
        """Of what a backward pass could hide of it."""
        return (self.off - self.on) / min(self.off - self.unthrottled, self.backward)

    def text(self) -> str:
        times = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in self._asdict().items())
        return f"{times}; communication adds {self.added():.2f} backward passes, {self.hidden():.2f} of it hidden"


def throttle(rank: int, bits_per_second: float | None) -> None:
    """Each of the two directions has this rate; None: as fast as it can. The loopback carries both."""
    if rank == 0:
        queue = f"tbf rate {2 * bits_per_second:.0f}bit {TBF}" if bits_per_second else "noqueue"
        subprocess.run(f"tc qdisc replace dev lo root {queue}".split(), check=True)


def measure(rank: int, ranks: int) -> list[Round]:
    core = sorted(os.sched_getaffinity(0))[rank]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), [core])
    config = config_from_depth(depth, VOCABULARY, max_seq_len)
    model, sharding, optimizers = set_up_training(config, torch.float32, torch.device("cpu"), stage=2)
    send_when_computed = sharding.gradient_computed
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCABULARY, (device_batch_size, max_seq_len + 1), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def one_step(overlap: bool) -> tuple[float, float]:
        """
        Seconds of an optimizer step, and of its backward pass, on the slower rank. A step is counted from one gather to
        the next: there alone nothing is on its way, so that no step pays for another's communication.
        """
        # Without overlap a parameter's hook sends nothing: `accumulate` sends all gradients after the backward pass.
        sharding.gradient_computed = send_when_computed if overlap else lambda bucket: None
        dist.barrier()
        start = time.perf_counter()
        sharding.all_gather_params()
        if not overlap:
            sharding.wait_for_params()
        with sharding.accumulate(last=True):
            loss = model(inputs, targets)
            forward_end = time.perf_counter()
            loss.backward()
            backward_end = time.perf_counter()
        stats = sharding.reduce_and_clip(loss)
        for optimizer in optimizers:
            optimizer.step(stats)
        times = torch.tensor([time.perf_counter() - start, backward_end - forward_end], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return times[0].item(), times[1].item()

    one_step(overlap=False)  # has the allocations in it
    before = bytes_sent()
    _, backward = one_step(overlap=False)
    sent = torch.tensor((bytes_sent() - before) / 2)
    dist.broadcast(sent, 0)
    rate = 8 * sent.item() / (communication * backward)
    if rank == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters: each rank sends {sent / 1e6:.0f} MB a step; "
              f"the link is set to {rate / 1e6:,.0f} Mbit/s")
    rounds = []
    for _ in range(num_rounds):  # in turn, so that a machine that drifts does so under all of them
        throttle(rank, rate)
        (on, _), (off, _) = one_step(overlap=True), one_step(overlap=False)
        throttle(rank, None)
        rounds.append(Round(on, off, *one_step(overlap=False)))
    return rounds


# Small packets: those of 64 KiB are half a burst.
if not enter_own_network(f"ip link set lo mtu 16384 up && tc qdisc add dev lo root tbf rate 1gbit {TBF}"):
    sys.exit("skipped: no network namespaces with a throttled link here")
if len(os.sched_getaffinity(0)) < 2:
    sys.exit("skipped: it takes two cores; on one, the ranks disturb each other")
throttle(0, None)
rounds = on_ranks(2, measure)
median, hidden = Round(*map(statistics.median, zip(*rounds))), sorted(times.hidden() for times in rounds)
print(*(times.text() for times in rounds), f"medians: {median.text()}", sep="\n")
print(f"overlap hides {statistics.median(hidden):.2f} of the communication ({hidden[0]:.2f} to {hidden[-1]:.2f})")
