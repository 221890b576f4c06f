"""Our reduce-scatter against plain arithmetic, and the bytes that collectives send."""
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks  # makes the repo importable where this file is run by itself

from nanochat.runtime import distributed
from nanochat.runtime.collectives import (
    all_gather_single,
    reduce_scatter,
    reduce_scatter_single,
)
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir

PRIVATE_NETWORK = ["unshare", "--net", "--map-root-user"]  # in which no other process sends
ELEMENTS = 1_048_572  # 4 MB of float32, divisible by 2, 3 and 4


def reduce_scatter_equals_arithmetic(rank: int, world_size: int) -> None:
    """
    Over all ranks, and within the groups of ranks 0 and 2, and 1 and 3, where chunks go by the rank within the group.
    Multiples of 1/64 below 16: every order of adding them is exact.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randint(-1000, 1000, (world_size, 20), generator=generator) / 64
    groups = [(None, [0, 1, 2, 3]), *((dist.new_group(ranks), ranks) for ranks in ([0, 2], [1, 3]))]
    for group, ranks in groups:
        if rank not in ranks:
            continue
        size = 20 // len(ranks)
        parts, inputs = torch.full((2, size), 77.0), [tensors[rank].clone(), 2 * tensors[rank]]
        works = [reduce_scatter(part, x, group) for part, x in zip(parts, inputs)]
        for work in reversed(works):  # two in flight at once, waited for in the other order
            work.wait()
        start = ranks.index(rank) * size
        total = tensors[ranks].sum(0)[start : start + size]
        assert torch.equal(parts[0], total) and torch.equal(parts[1], 2 * total)
        assert torch.equal(inputs[0], tensors[rank]), "reduce-scatter leaves its input alone"


def all_compute_in_one_dtype(rank: int, world_size: int) -> None:
    """Where bfloat16 is fast on the processor of one host only, too."""
    distributed.compute_dtype = lambda *_: torch.bfloat16 if rank else torch.float32
    assert distributed.set_up("cpu", "auto")[3] == torch.float32


def all_share_a_folder(rank: int, world_size: int) -> None:
    """On one host, then on two with disks of their own."""
    distributed.require_shared_folder()
    dist.barrier()  # rank 0 has removed its mark
    assert list(base_dir().iterdir()) == []
    dist.barrier()
    os.environ["NANOCHAT_BASE_DIR"] = str(base_dir() / str(rank))
    with pytest.raises(UserError, match="/1 on .* is not rank 0's: all hosts must share the base folder"):
        distributed.require_shared_folder()


@pytest.mark.parametrize(("ranks", "check"), [
    (4, reduce_scatter_equals_arithmetic), (2, all_compute_in_one_dtype), (2, all_share_a_folder)])
def test_ranks_compute_together(ranks, check):
    run_on_ranks(ranks, check)


ENDS = """
import atexit, os
from nanochat.runtime.distributed import compute_cleanup, compute_init
class OfTheInterpreter:
    def __del__(self, write=os.write):
        write(1, b"taken down")
kept = OfTheInterpreter()
compute_init("cpu")
atexit.register(print, "at exit")
print("printed", end=", ")
compute_cleanup()
print("not reached")
"""


def test_a_rank_ends_without_taking_down_its_interpreter():
    """Else gloo's threads abort it if they still have to drop a tensor; all is written, and exit functions run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for environment, expected in ((rank, "printed, at exit\n"), ({}, "printed, not reached\nat exit\ntaken down")):
        done = subprocess.run([sys.executable, "-c", ENDS], env=os.environ | environment, text=True,
                              capture_output=True)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr


# ---- Bytes on the wire

# What all n ranks together send, in tensors / (n − 1): every tensor, or a chunk of it, once to every other rank.
FORMULAS = {"broadcast": 1, "all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "gloo's own reduce-scatter": 2}


def sent_through_lo() -> int:
    """Bytes since the network began, headers and acknowledgements included."""
    with open("/proc/self/net/dev") as lines:
        return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def bytes_of_collectives(rank: int, world_size: int) -> dict[str, float]:
    """What all ranks together sent for one collective, in tensors of ELEMENTS: {collective: the least of 5 times}."""
    x = torch.full((ELEMENTS,), float(rank))
    gathered = torch.empty_like(x)
    part = torch.empty(ELEMENTS // world_size)
    collectives = {
        "broadcast": (dist.broadcast, x, 0),
        "all-gather": (all_gather_single, gathered, part),
        "reduce-scatter": (lambda output, input: reduce_scatter(output, input).wait(), part, x),
        "all-reduce": (dist.all_reduce, x),
        "gloo's own reduce-scatter": (reduce_scatter_single, part, x),
    }
    result = {}
    for name, (collective, *args) in collectives.items():
        counts = []
        for _ in range(5):  # TCP sends a little twice on a busy machine: the least is right
            dist.barrier()
            before = sent_through_lo()
            dist.barrier()
            collective(*args)
            dist.barrier()
            counts.append(sent_through_lo() - before)
        result[name] = min(counts) / (4 * ELEMENTS)
    return result


def measure() -> None:
    """Run in a private network: bring its only interface up, measure, print one line of JSON."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
    print(json.dumps({n: run_on_ranks(n, bytes_of_collectives)[0] for n in (2, 3, 4)}))


@pytest.fixture(scope="module")
def measured() -> dict[int, dict[str, float]]:
    """{ranks: {collective: tensors sent by all ranks together}}"""
    if not shutil.which("unshare") or subprocess.run([*PRIVATE_NETWORK, "true"], capture_output=True).returncode:
        pytest.skip("counting bytes needs a network of its own, and this machine does not let us make one")
    run = subprocess.run([*PRIVATE_NETWORK, sys.executable, __file__], text=True, capture_output=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return {int(n): counts for n, counts in json.loads(run.stdout).items()}


def test_bytes_on_the_wire_are_the_formulas(measured):
    """
    Within 2%: headers and acknowledgements are 0.3% of 64 KB segments. Gloo's own reduce-scatter is an all-reduce, so
    runtime/collectives.py has its own. When that fails, ours can be removed.
    """
    for n, counts in measured.items():
        for name, factor in FORMULAS.items():
            sent, formula = (4 * ELEMENTS * tensors for tensors in (counts[name], factor * (n - 1)))
            print(f"{n} ranks, {name}: {sent:,.0f} bytes, formula {formula:,}")
            assert counts[name] == pytest.approx(factor * (n - 1), rel=0.02), f"{name} on {n} ranks"


if __name__ == "__main__":
    measure()
