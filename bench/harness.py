"""
What the measurements share: a base folder of their own, whole training runs, functions on several ranks, the bytes of
tensors, and where the tables go.
"""
import contextlib
import os
import pickle
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nanochat.checkpoint import checkpoint_dir
from nanochat.errors import UserError
from nanochat.files import write_text
from nanochat.flops import measured_matmul_flops
from nanochat.metrics import read_metrics

DOCS = Path(__file__).parent.parent / "docs"
END = "<!-- end of what it made -->"


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


class Training(NamedTuple):
    losses: list[float]   # of each step, nats per token
    tok_per_sec: float    # median of all steps but the first two
    peak: int             # resident bytes of the largest process


def train(ranks: int = 1, threads: int = 1, env: dict[str, str] | None = None, **settings: Any) -> Training:
    """A run of base_train on the CPU in processes of its own. UserError with the end of its output when it fails."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"] if ranks > 1 else []
    settings = dict(model_tag="bench", overwrite=True, device_type="cpu", eval_every=-1, sample_every=-1) | settings
    script = ["scripts.base_train", *(f"--{name}={value}" for name, value in settings.items())]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "1000"} | (env or {})
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, "-m", *launcher, *script], stdout=log, stderr=log, env=env)
        _, status, usage = os.wait4(process.pid, 0)  # with the ranks that it has waited for
        if status:
            log.seek(0)
            raise UserError(f"{' '.join(script)} failed:\n{log.read().decode()[-2000:]}")
    records = read_metrics(checkpoint_dir("base", settings["model_tag"]) / "metrics.jsonl")
    speed = statistics.median(record["train/tok_per_sec"] for record in records[2:])
    return Training([record["train/loss"] for record in records], speed, usage.ru_maxrss * 1024)


def on_ranks(ranks: int, function: Callable, *args: Any) -> Any:
    """
    function(rank, ranks, *args) on so many processes with a thread each, joined by gloo. Returns rank 0's result.
    The function is a module's that sets nothing from the command line.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job").write_bytes(pickle.dumps((function, args)))
        command = [sys.executable, "-m", "bench.harness", folder, str(ranks)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen([*command, str(rank)], env=env) for rank in range(ranks)]
        if any([process.wait() for process in processes]):
            raise UserError(f"{function.__module__}.{function.__name__} failed on {ranks} ranks")
        return pickle.loads(Path(folder, "result").read_bytes())


def one_rank(folder: Path, ranks: int, rank: int) -> None:
    """The process of one rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if "lo" in dict(socket.if_nameindex()).values() else "lo0"
    function, args = pickle.loads((folder / "job").read_bytes())
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    result = function(rank, ranks, *args)
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure_link(rank: int, ranks: int) -> tuple[float, float, float]:
    """Between two ranks here, by gloo: bytes/s of an all-reduce of 64 MB, seconds of a message; a rank's FLOP/s."""
    seconds = {}
    for numbers in (2**24, 1):
        tensor, times = torch.zeros(numbers), []
        for _ in range(6):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - start)
        seconds[numbers] = min(times)
    # With two ranks an all-reduce sends the tensor once, in two messages.
    return 4 * 2**24 / seconds[2**24], seconds[1] / 2, measured_matmul_flops(torch.device("cpu"), torch.float32)


def enter_own_network(*setup: str) -> str:
    """
    Start the running module again inside a network namespace of its own, after these shell commands; Linux, where users
    may. Returns "" when inside, or why that is not possible.
    """
    if os.environ.get("OWN_NETWORK"):
        return ""
    unshare = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c"]
    try:
        tried = subprocess.run([*unshare, " && ".join(setup)], capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    if tried.returncode:
        return tried.stderr.strip()
    os.environ["OWN_NETWORK"] = "1"
    os.execvp("unshare", [*unshare, " && ".join([*setup, 'exec "$0" "$@"']), *sys.orig_argv])


def bytes_sent(interface: str) -> int:
    """Through a network interface of this namespace since it exists, headers included."""
    with open("/proc/self/net/dev") as lines:
        return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(f"{interface}:"))


if __name__ == "__main__":  # a rank of on_ranks
    one_rank(Path(sys.argv[1]), *map(int, sys.argv[2:]))
