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

from nanochat.optimizers import setup_optimizers
from nanochat.distributed import compute_cleanup, compute_init, print0
from nanochat.errors import UserError, require_positive
from nanochat.gpt import GPT, config_from_depth
from nanochat.zero import Sharding

# ---- Model
depth = 8                   # layers; the width (64 per layer) and the heads follow from it
vocab_size = 512            # tokens; few, so that nearly all parameters are in the blocks
max_seq_len = 256           # tokens per row
device_batch_size = 8       # rows per rank; one micro-step
zero_stage: Literal[0, 1, 2] = 2  # 0: gradients are all-reduced, 1 and 2: reduce-scattered, and parameters gathered
# ---- Link
communication = 0.65        # time that communication adds if nothing overlaps, in backward passes; the rate follows from it
# ---- Measurement
warmup_rounds = 3           # rounds that set the rate; the first has the allocations in it
num_rounds = 10             # rounds measured: a step that overlaps, one that does not, one on the unthrottled link
config = configure(globals())
require_positive(config, "depth", "vocab_size", "max_seq_len", "device_batch_size", "warmup_rounds", "num_rounds")

OWN_NETWORK = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
TBF = "burst 128kb limit 64mb"  # bursts of the link's largest packets; a queue that holds all that is sent at once: no loss


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


# ---- Alone so far: become rank 0, in a network of its own
if "RANK" not in os.environ:
    probe = f"ip link add end0 type veth peer name end1 && tc qdisc add dev end0 root tbf rate 1gbit {TBF} && unshare --net true"
    try:
        allowed = subprocess.run([*OWN_NETWORK, "sh", "-c", probe], capture_output=True, text=True)
    except FileNotFoundError as error:
        sys.exit(print(f"skipped: {error.filename} is not here (it comes with util-linux)"))
    if allowed.returncode:
        sys.exit(print(f"skipped: no network namespaces with a throttled link here ({allowed.stderr.strip()})"))
    if len(os.sched_getaffinity(0)) < 2:
        raise UserError("bench.overlap needs two cores: on one, the ranks disturb each other")
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # addresses have no names here, and torch would warn
    os.execvp(OWN_NETWORK[0], [*OWN_NETWORK, sys.executable, "-m", "bench.overlap", *sys.argv[1:]])

# ---- The link: rank 0 starts rank 1, whose network is again one of its own; rank 1 lays the link and hands over an end
rank = int(os.environ["RANK"])
end = f"end{rank}"
if rank == 0:
    other = subprocess.Popen(["unshare", "--net", sys.executable, *sys.orig_argv[1:]], env={**os.environ, "RANK": "1"})
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
os.environ["GLOO_SOCKET_IFNAME"] = end
os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[rank]])  # before there are threads: gloo's are on the rank's core
torch.set_num_threads(1)
*_, device = compute_init("cpu")

# ---- Model, optimizers, tokens
model = GPT(config_from_depth(depth, vocab_size, max_seq_len))
model.init_weights(seed=0)
sharding = Sharding(model, model.units(), device, torch.float32, zero_stage)
gradient_computed = sharding.gradient_computed
optimizers = setup_optimizers(model, sharding)
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
    run(f"tc qdisc replace dev {end} root " + (f"tbf rate {bits_per_second:.0f}bit {TBF}" if bits_per_second else "noqueue"))


def bytes_sent() -> int:
    """Through this rank's end of the link, headers included."""
    with open("/proc/self/net/dev") as lines:
        return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(f"{end}:"))


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
    unthrottled, backward = one_step(overlap=False)
    times = Round(on, off, unthrottled, backward)
    print0(*(f"{1e3 * seconds:12.0f}" for seconds in times), f"{times.added():12.2f} {times.hidden():12.2f}")
    return times


# ---- Set the rate: first from the bytes of a step, then from the time that they add
for _ in range(2):  # the first has the allocations in it
    before = bytes_sent()
    _, backward = one_step(overlap=False)
    sent = bytes_sent() - before
rate, = slower_rank(8 * sent / (communication * backward))
print0(f"{sum(p.numel() for p in model.parameters()):,} parameters, stage {zero_stage}: each rank sends {sent / 1e6:.0f} MB a step")
print0(*(f"{title:>12}" for title in ("overlapping", "not", "unthrottled", "backward ms", "added", "hidden")))
correction = statistics.median(one_round().added() for _ in range(warmup_rounds)) / communication
rate *= min(max(correction, 0.5), 2)  # communication that hides in both, as behind Muon's products; not a machine that hiccuped

# ---- Is the link what it says? Each of two ranks sends a tensor once to all-reduce it
throttle(rate)
x = torch.zeros(8 * 2**20 // 4)
dist.barrier()
before, start = bytes_sent(), time.perf_counter()
dist.all_reduce(x)
achieved = 8 * (bytes_sent() - before) / (time.perf_counter() - start)
print0(f"the link is set to {rate / 1e6:,.0f} Mbit/s; an all-reduce of 8 MB gets {achieved / 1e6:,.0f}")

# ---- Measure: in turn, so that a machine that drifts does so under all of them
rounds = [one_round() for _ in range(num_rounds)]
median = Round(*(statistics.median(column) for column in zip(*rounds)))
hidden = sorted(times.hidden() for times in rounds)
print0(f"medians of {num_rounds}, ms: backward {1e3 * median.backward:.0f}; step on the unthrottled link {1e3 * median.unthrottled:.0f}, "
       f"on the throttled one {1e3 * median.off:.0f}, with overlap {1e3 * median.on:.0f}")
print0(f"communication adds {median.added():.2f} backward passes; overlap hides {statistics.median(hidden):.2f} of it "
       f"(median of {num_rounds}, {hidden[0]:.2f} to {hidden[-1]:.2f}; from the medians above {median.hidden():.2f})")
compute_cleanup()
if rank == 0:
    other.wait()
