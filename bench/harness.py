"""What the measurements share: a base folder of their own, functions on several ranks, and where the tables go."""
import contextlib
import itertools
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from torch.profiler import ProfilerActivity, profile

from nanochat.checkpoint import checkpoint_dir
from nanochat.errors import UserError
from nanochat.files import write_text
from nanochat.gpt import GPT
from nanochat.gpt_config import config_from_depth
from nanochat.saving import save_weights
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer

DOCS = Path(__file__).parent.parent / "docs"
END = "<!-- end of what it made -->"
GROUPS = Path("/sys/fs/cgroup/cpu" if Path("/sys/fs/cgroup/cpu").is_dir() else "/sys/fs/cgroup")  # version 1 or 2


def peak_of(function: Callable[[], Any]) -> int:
    """Bytes of a CPU's tensors at the fullest moment of function(), beyond those before, as PyTorch counts."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        function()
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


def put_into_page(page: str, command: str, text: str) -> None:
    """
    Replace what stands in docs/<page> between `<!-- made by: <command> -->` and the end mark that follows it.
    UserError when the page has no such marks.
    """
    path, begin = DOCS / page, f"<!-- made by: {command} -->"
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise UserError(f"{path} has no {begin} with {END} after it; put both where the tables shall stand")
    write_text(path, f"{before}{begin}\n\n{text}\n\n{END}{after}")


def show(text: str, page: str, command: str, write: bool) -> None:
    """Print the tables; with write put them into the page as well. command: such as "bench.zero"."""
    print(f"\n{text}")
    if write:
        put_into_page(page, f"python -m {command} --write", text)


@contextlib.contextmanager
def scratch_base(vocab_size: int | None = None) -> Iterator[None]:
    """A base folder that goes away with its models; with a vocab_size it has tinyworld and a tokenizer of that size."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NANOCHAT_BASE_DIR"] = folder
        if vocab_size:
            for script in (["scripts.dataset"], ["scripts.tok_train", f"--vocab_size={vocab_size}"]):
                subprocess.run([sys.executable, "-m", *script], check=True, stdout=subprocess.DEVNULL)
        yield


def save_chat_model(depth: int, context: int, arch: str) -> Path:
    """The checkpoint of a model "bench" with a vocabulary of 8,192, whose weights are drawn: it writes words alone."""
    words = itertools.product(b"etaoinshrdlcumwfgypb", repeat=4)  # tokens that are like words
    merges = [b" " + bytes(word) for word in itertools.islice(words, 8192 - 256 - len(SPECIAL_TOKENS))]
    model = GPT(config_from_depth(depth, 8192, context, arch=arch))
    model.init_weights(0)
    model.lm_head.weight.data[:256] = model.lm_head.weight.data[-len(SPECIAL_TOKENS) :] = 0
    return save_weights(checkpoint_dir("sft", "bench"), 0, model.state_dict(), Tokenizer(merges), model.config, {})


@contextlib.contextmanager
def serving(*settings: str, checkout: str = ".", workers: int = 1) -> Iterator[int]:
    """The port of a chat server that runs with these settings, of the version of this repo in that folder."""
    command = [sys.executable, "-m", "scripts.chat_web", "--source=sft", "--port=0", f"--workers={workers}", *settings]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout)
    try:
        yield int(re.match(r"http://[^:]+:(\d+) ", server.stdout.readline())[1])
    finally:
        server.terminate()
        server.wait()


def limit_cpu(share: float, period: int = 10_000) -> None:
    """
    This process may compute for that share of a core's time, looked at every `period` µs. Linux wants a share of at
    least 1,000 µs. UserError if not root.
    """
    group, quota = GROUPS / f"nanochat-{socket.gethostname()}-{os.getpid()}", int(share * period)
    try:
        group.mkdir(exist_ok=True)
        if GROUPS.name == "cpu":
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {period}")
        (group / "cgroup.procs").write_text("0")
    except OSError as error:
        raise UserError(f"{error}; a core for each rank is needed, or root and control groups") from None


def remove_limits() -> None:
    """The control groups of processes that have ended."""
    for group in GROUPS.glob("nanochat-*"):
        with contextlib.suppress(OSError):  # somebody's who goes on
            group.rmdir()


def all_reduce_seconds(numbers: int, times: int) -> list[float]:
    """Of so many all-reduces of so many float32 numbers. COLLECTIVE."""
    tensor, found = torch.ones(numbers), []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        found.append(time.perf_counter() - start)
    return found


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


def enter_own_network(setup: str) -> bool:
    """
    Start the running module again in a network namespace of its own, after this shell command; Linux, where users may.
    True when inside; False where that is not possible, after the reason has been printed.
    """
    if os.environ.get("OWN_NETWORK"):
        return True
    command = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c"]
    if sys.platform != "linux" or subprocess.run([*command, setup]).returncode:
        return False
    os.environ["OWN_NETWORK"] = "1"
    os.execvp("unshare", [*command, f'{setup} && exec "$0" "$@"', *sys.orig_argv])


def bytes_sent() -> int:
    """Over the loopback of this network namespace since it exists, headers included; 0 where others send there, too."""
    if not os.environ.get("OWN_NETWORK"):
        return 0
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))
