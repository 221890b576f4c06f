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

from nanochat.runtime.files import write_text

DOCS = Path(__file__).parent.parent / "docs"
END = "<!-- end of what it made -->"


def show(text: str, page: str, command: str, write: bool) -> None:
    """
    Print the tables; with write put them into docs/<page>, too, between `<!-- made by: python -m <command> --write -->`
    and the end mark that follows it, which must be there.
    """
    print(f"\n{text}")
    if not write:
        return
    path = DOCS / page
    content = path.read_text(encoding="utf-8")
    mark = f"<!-- made by: python -m {command} --write -->"
    start = content.index(mark) + len(mark)
    end = content.index(END, start)
    write_text(path, f"{content[:start]}\n\n{text}\n\n{content[end:]}")


def on_ranks(ranks: int, function: Callable, *args: Any) -> Any:
    """Rank 0's result of function(rank, ranks, *args), called in a process with one thread for each rank; gloo."""
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
