"""Our reduce-scatter against plain arithmetic, what ranks must agree on, and how they end."""
import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from nanochat.runtime import distributed
from nanochat.runtime.collectives import reduce_scatter
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir


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
