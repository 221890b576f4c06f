"""What the measurements share: tokens, functions on several ranks, and where the tables go."""
import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import start_processes

from nanochat.model.gpt import GPT
from nanochat.runtime.files import write_text

DOCS = Path(__file__).parent.parent / "docs"
END = "<!-- end of what it made -->"


class PageBlock:
    """
    A page's text between `<!-- made by: python -m <command> --write -->` and the end mark that follows it. The mark is
    found at once, before the work whose result it will show: a missing mark must not cost hours. Without write no mark
    is needed.
    """

    def __init__(self, page: str, command: str, write: bool):
        self.path = DOCS / page
        self.mark = f"<!-- made by: python -m {command} --write -->"
        self.write = write
        if write:
            self.find()

    def find(self) -> tuple[str, str, str]:
        """The page before the text, the text, and the page after it."""
        before, mark, rest = self.path.read_text(encoding="utf-8").partition(self.mark)
        text, end, after = rest.partition(END)
        assert mark and end, f"docs/{self.path.name} has no {self.mark} followed by {END}"
        return before + mark, text.strip(), end + after

    def show(self, text: str) -> None:
        """Print the text; with write put it into the page, too."""
        print(f"\n{text}")
        if self.write:
            before, _, after = self.find()
            write_text(self.path, f"{before}\n\n{text}\n\n{after}")


def random_tokens(end: int, *shape: int, seed: int = 0) -> Tensor:
    """Tokens below `end`, always the same for a seed."""
    return torch.randint(end, shape, generator=torch.Generator().manual_seed(seed))


def draw_weights(model: GPT, seed: int = 0) -> None:
    """Draw all weights in place."""
    model.load_state_dict({name: model.draw(name, seed) for name, _ in model.named_parameters()})


@contextlib.contextmanager
def one_rank_of(ranks: int, rank: int) -> Iterator[None]:
    """A process group of so many ranks of which only this one exists, and sends nothing; none for one rank."""
    if ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it makes the backend known

        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    yield
    if ranks > 1:
        dist.destroy_process_group()


def on_ranks(ranks: int, function: Callable, *args: Any) -> Any:
    """Rank 0's result of function(rank, ranks, *args), called in a single-threaded process per rank; gloo."""
    with tempfile.TemporaryDirectory() as folder:
        # Forked, not spawned: a spawned process would run the benchmark's module again.
        start_processes(one_rank, (ranks, folder, function, args), ranks, start_method="fork")
        return torch.load(f"{folder}/result", weights_only=False)


def one_rank(rank: int, ranks: int, folder: str, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if "lo" in dict(socket.if_nameindex()).values() else "lo0"
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    result = function(rank, ranks, *args)
    if rank == 0:
        torch.save(result, f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()
