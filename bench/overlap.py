"""
What it is worth that ranks compute while they communicate: two ranks, on a link slowed down to a fixed rate.

    python -m bench.overlap                 # Linux with iproute2, two cores; root, or where users may have namespaces
    python -m bench.overlap --zero_stage=1

Each rank has a core and a network namespace to itself; a veth pair joins the two, with a token bucket filter (tc … tbf)
on both ends. The namespaces have no names: they and the link go with the ranks, whatever ends those.
docs/overlap.md explains the figure.
"""
import atexit
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Literal, NamedTuple

from configurator import configure

import torch
import torch.distributed as dist

from bench.harness import bytes_sent, enter_own_network
from nanochat.distributed import compute_cleanup, compute_init, print0
from nanochat.errors import UserError
from nanochat.gpt import config_from_depth
from nanochat.plan.probes import set_up_training

# ---- Model
depth = 8                   # [1..] layers; the width (64 per layer) and the heads follow from it
vocab_size = 512            # [1..] tokens; few, so that nearly all parameters are in the blocks
max_seq_len = 256           # [1..] tokens per row
device_batch_size = 8       # [1..] rows per rank; one micro-step
zero_stage: Literal[0, 1, 2] = 2  # 0: gradients are all-reduced, 1 and 2: reduce-scattered, and parameters gathered
# ---- Link
communication = 0.65        # [>0] time that communication adds if nothing overlaps, in backward passes; sets the rate
# ---- Measurement
warmup_rounds = 3           # [1..] rounds that set the rate; the first has the allocations in it
num_rounds = 10             # [1..] rounds measured: a step that overlaps, one that does not, one on the free link
configure(globals())

TBF = "burst 128kb limit 64mb"  # bursts of the link's largest packets; a queue for all that is sent at once: no loss


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


# ---- Alone so far: become rank 0, in a network of its own; the link is tried there first
link = f"ip link add try0 type veth peer name try1 && tc qdisc add dev try0 root tbf rate 1gbit {TBF}"
if why := enter_own_network(link, "ip link del try0", "unshare --net true"):
    sys.exit(print(f"skipped: no network namespaces with a throttled link here ({why})"))
if len(os.sched_getaffinity(0)) < 2:
    raise UserError("bench.overlap needs two cores: on one, the ranks disturb each other")
rank = int(os.environ.get("RANK", "0"))
end = f"end{rank}"
os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500", GLOO_SOCKET_IFNAME=end)
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # addresses have no names here, and torch would warn

# ---- The link: rank 0 starts rank 1, whose network is again one of its own; rank 1 lays the link and hands over an end
if rank == 0:
    other = subprocess.Popen(["unshare", "--net", sys.executable, *sys.orig_argv[1:]], env=os.environ | {"RANK": "1"})
    atexit.register(other.terminate)
    while end not in dict(socket.if_nameindex()).values():
        if other.poll() is not None:
            raise UserError("rank 1 could not lay the link")
        time.sleep(0.1)
else:
    run(f"ip link add end1 type veth peer name end0 netns {os.getppid()}")
run("ip link set lo up")
run(f"ip addr add 10.0.0.{rank + 1}/24 dev {end}")
run(f"ip link set {end} gso_max_size 16384 up")  # else packets of 64 KiB, half a burst
os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[rank]])  # before there are threads: gloo's are on this core
torch.set_num_threads(1)
*_, device = compute_init("cpu")

# ---- Model, optimizers, tokens
config = config_from_depth(depth, vocab_size, max_seq_len)
model, sharding, optimizers = set_up_training(config, torch.float32, device, zero_stage)
gradient_computed = sharding.gradient_computed
generator = torch.Generator().manual_seed(rank)
tokens = torch.randint(vocab_size, (device_batch_size, max_seq_len + 1), generator=generator)
inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


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


def throttle(bits_per_second: float | None) -> None:
    """Both ends of the link send at this rate; None: as fast as they can."""
    queue = f"tbf rate {bits_per_second:.0f}bit {TBF}" if bits_per_second else "noqueue"
    run(f"tc qdisc replace dev {end} root {queue}")


def slower_rank(*seconds: float) -> list[float]:
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def one_step(overlap: bool) -> tuple[float, float]:
    """
    Seconds of an optimizer step, and of its backward pass. A step is counted from one gather to the next: there alone
    nothing is on its way, so that no step pays for another's communication.
    """
    # Without overlap a parameter's hook sends nothing: `accumulate` sends all gradients after the backward pass.
    sharding.gradient_computed = gradient_computed if overlap else lambda bucket: None
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
    return slower_rank(time.perf_counter() - start, backward_end - forward_end)


def one_round() -> Round:
    throttle(rate)
    on, _ = one_step(overlap=True)
    off, _ = one_step(overlap=False)
    throttle(None)
    times = Round(on, off, *one_step(overlap=False))
    print0(*(f"{1e3 * seconds:12.0f}" for seconds in times), f"{times.added():12.2f} {times.hidden():12.2f}")
    return times


# ---- Set the rate: first from the bytes of a step, then from the time that they add
for _ in range(2):  # the first has the allocations in it
    before = bytes_sent(end)
    _, backward = one_step(overlap=False)
    sent = bytes_sent(end) - before
rate, = slower_rank(8 * sent / (communication * backward))
parameters = sum(p.numel() for p in model.parameters())
print0(f"{parameters:,} parameters, stage {zero_stage}: each rank sends {sent / 1e6:.0f} MB a step")
print0(*(f"{title:>12}" for title in ("overlapping", "not", "unthrottled", "backward ms", "added", "hidden")))
correction = statistics.median(one_round().added() for _ in range(warmup_rounds)) / communication
rate *= min(max(correction, 0.5), 2)  # communication that hides in both, as behind Muon's products; no outlier

# ---- Is the link what it says? Each of two ranks sends a tensor once to all-reduce it
throttle(rate)
x = torch.zeros(8 * 2**20 // 4)
dist.barrier()
before, start = bytes_sent(end), time.perf_counter()
dist.all_reduce(x)
achieved = 8 * (bytes_sent(end) - before) / (time.perf_counter() - start)
print0(f"the link is set to {rate / 1e6:,.0f} Mbit/s; an all-reduce of 8 MB gets {achieved / 1e6:,.0f}")

# ---- Measure: in turn, so that a machine that drifts does so under all of them
rounds = [one_round() for _ in range(num_rounds)]
median = Round(*map(statistics.median, zip(*rounds)))
hidden = sorted(times.hidden() for times in rounds)
print0(f"medians of {num_rounds}, ms: backward {1e3 * median.backward:.0f}; step on the unthrottled "
       f"link {1e3 * median.unthrottled:.0f}, on the throttled one {1e3 * median.off:.0f}, with overlap "
       f"{1e3 * median.on:.0f}")
print0(f"communication adds {median.added():.2f} backward passes; overlap hides {statistics.median(hidden):.2f} of it "
       f"(median of {num_rounds}, {hidden[0]:.2f} to {hidden[-1]:.2f}; from the medians {median.hidden():.2f})")
compute_cleanup()
if rank == 0:
    other.wait()
