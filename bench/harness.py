"""What the measurements share: functions on several ranks, and where the tables go."""
import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from nanochat.runtime.errors import UserError
from nanochat.runtime.files import write_text

DOCS = Path(__file__).parent.parent / "docs"
END = "<!-- end of what it made -->"


def show(text: str, page: str, command: str, write: bool) -> None:
    """
    Print the tables; with write put them into docs/<page>, too, between `<!-- made by: python -m <command> --write -->`
    and the end mark that follows it. UserError when the page has no such marks.
    """
    print(f"\n{text}")
    if not write:
        return
    path, begin = DOCS / page, f"<!-- made by: python -m {command} --write -->"
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise UserError(f"{path} has no {begin} with {END} after it; put both where the tables shall stand")
    write_text(path, f"{before}{begin}\n\n{text}\n\n{END}{after}")


def on_ranks(ranks: int, function: Callable, *args: Any) -> Any:
    """function(rank, ranks, *args) on so many processes with a thread each, joined by gloo. Returns rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        # Forked, not spawned: a spawned process would run the benchmark's module again.
        start_processes(one_rank, (ranks, folder, function, args), ranks, start_method="fork")
        return pickle.loads(Path(folder, "result").read_bytes())


def one_rank(rank: int, ranks: int, folder: str, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if "lo" in dict(socket.if_nameindex()).values() else "lo0"
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    result = function(rank, ranks, *args)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
