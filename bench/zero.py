"""
What the stages of ZeRO keep and send, measured beside the formulas: the tables of docs/zero.md.

    python -m bench.zero            # prints them
    python -m bench.zero --write    # and puts them into the page

It starts its own ranks (gloo, on the CPU) and takes steps on random tokens in every stage and dtype. Memory is the
storage of all live tensors; traffic is what each collective sends, and what goes through the network interface.
"""
import fcntl
import gc
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from configurator import configure

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat.optimizers import setup_optimizers
from nanochat.gpt import GPT, GPTConfig
from nanochat.plan.memory import StateBytes, parameter_counts, sent_bytes, state_bytes
from bench.pages import put_into_page
from nanochat.report import markdown_table
from nanochat.zero import MAX_IN_FLIGHT, Sharding

PRIVATE_NETWORK = ["unshare", "--net", "--map-root-user"]  # a network of its own, in which nobody else sends
STAGES, DTYPES, MICRO_STEPS = (0, 1, 2, 3), ("bfloat16", "float32"), (1, 4)


# ---- Memory

def storages(tensors: list[Tensor | None]) -> dict[int, int]:
    """{address: bytes} of what tensors live in, each storage once; of sharded tensors, of what is here."""
    found = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors if t is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def on_their_way(sharding: Sharding) -> list[Tensor | None]:
    """What collectives read and fill that have started and are not waited for; gloo's sums receive into one buffer more."""
    sums = [t for _bucket, work, own, whole, _last in sharding.in_flight for t in (own, whole, getattr(work, "received", None))]
    return sums + [source for bucket in sharding.buckets for _work, source in bucket.pending]


def live_tensors() -> Iterator[Tensor]:
    """Every tensor that Python knows of and that was made since `measure` began, whoever made it."""
    return (t for t in gc.get_objects() if issubclass(type(t), Tensor) and not isinstance(t, DTensor) and t.device.type == "cpu")


def census(sharding: Sharding, optimizers: tuple) -> dict[str, int]:
    """As `classify`, once gloo's threads have let go of what has arrived: they do so a moment after the wait for it."""
    deadline = time.monotonic() + 0.3
    while (result := classify(sharding, optimizers))["rest"] > 10_000 and time.monotonic() < deadline:
        time.sleep(0.02)
    return result


def classify(sharding: Sharding, optimizers: tuple) -> dict[str, int]:
    """Bytes alive on this rank, by purpose. A storage counts once: in float32 a master is its parameter's own memory."""
    params, buckets, shards = list(sharding.model.parameters()), sharding.buckets, sharding.shards
    purposes = {
        "parameters": params,
        "gradients": [*(p.grad for p in params), *(b.grad for b in buckets), *(s.grad for s in shards)],
        "optimizer": [*(s.master for s in shards), *(t for o in optimizers for moment in o.state.values() for t in moment.values())],
        "in flight": on_their_way(sharding),
        "rest": list(live_tensors()),  # whatever is none of the above: what leaks shows here
    }
    seen, result = set(), {}
    for purpose, tensors in purposes.items():
        new = {address: size for address, size in storages(tensors).items() if address not in seen}
        seen |= new.keys()
        result[purpose] = sum(new.values())
    return result


# ---- Traffic, and whole gradients

class Watch(TorchDispatchMode):
    """
    While it is on, counts the bytes that this rank sends in every collective, as docs/collectives.md has them. It stands
    where all of PyTorch's collectives pass, whoever calls them, and refuses those that it has no formula for.

    On stages 0 to 2 it also keeps the peak of gradients that are whole: those of parameters, their copies end to end,
    and those being sent; looked at whenever one appears or leaves.
    """

    def __init__(self, ranks: int, rank: int, params: list[nn.Parameter]):
        super().__init__()
        self.ranks, self.rank, self.params = ranks, rank, params
        self.sharding: Sharding | None = None
        self.optimizers: tuple = ()
        self.in_micro_steps = False
        self.sent: Counter[str] = Counter()  # bytes, by the name of the collective
        self.peaks: Counter[str] = Counter()  # bytes
        for p in params:  # before the model is sharded: so each gradient is seen before it is sent
            p.register_post_accumulate_grad_hook(self.gradient_appeared)

    def __torch_dispatch__(self, func: Callable, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.count(func._schema.name.removeprefix("c10d::"), *args)
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default and result.numel() in {len(bucket.flat) for bucket in self.sharding.buckets}:
            self.look([result, *args[0]])  # gradients laid end to end, for a moment beside those that they are copied from
        return result

    def count(self, name: str, *args) -> None:
        match name:
            case "allreduce_":  # (tensors, group, …)
                (tensor,) = args[0]
                sent = 2 * (self.ranks - 1) / self.ranks * tensor.nbytes
                self.look([tensor])
            case "_allgather_base_":  # (output, input, group, …)
                sent = (self.ranks - 1) * args[1].nbytes
            case "alltoall_base_":  # (output, input, group, output sizes, input sizes, …): all but the part for itself
                received, tensor, sizes = args[0], args[1], args[4]
                sent = tensor.nbytes - (sizes[self.rank] * tensor.element_size() if sizes else tensor.nbytes / self.ranks)
                self.look([tensor], [received])
            case "barrier":
                sent = 0
            case _:
                raise NotImplementedError(f"bytes that a rank sends in {name}")
        self.sent[name] += sent

    def look(self, sending: Sequence[Tensor] = (), receiving: Sequence[Tensor] = ()) -> None:
        if self.in_micro_steps and self.params:
            whole = storages([*sending, *(p.grad for p in self.params), *(gradients for *_, gradients, _last in self.sharding.in_flight)])
            buffers = storages([*receiving, *on_their_way(self.sharding)])
            self.peaks |= {"whole": sum(whole.values()), "with buffers": sum((whole | buffers).values())}  # the larger of both

    def gradient_appeared(self, p: nn.Parameter) -> None:
        self.look()
        if p is self.params[0]:  # the embedding's is the last of a backward pass: who hoards has all by now
            self.peaks |= {"rest": census(self.sharding, self.optimizers)["rest"]}


def sent_through_lo() -> int:
    """Bytes since the network began, headers and acknowledgements included."""
    with open("/proc/self/net/dev") as lines:
        return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


# ---- A few steps, watched

def train_step(model: nn.Module, sharding: Sharding, optimizers: tuple, rows: Tensor, micro_steps: int, watch: Watch) -> dict[str, int]:
    """One optimizer step as in scripts/base_train.py. Returns the census of a pause between micro-steps, if there is one."""
    memory = {}
    watch.in_micro_steps = True
    for micro_step in range(micro_steps):
        with sharding.accumulate(last=micro_step == micro_steps - 1):
            loss = model(rows[:, :-1], rows[:, 1:])
            (loss / micro_steps).backward()
        if micro_step == 1 < micro_steps - 1:  # after the first one, stage 2 has not yet received all that it will keep
            gc.collect()
            memory = census(sharding, optimizers)
    watch.in_micro_steps = False
    stats = sharding.reduce_and_clip(loss)
    for optimizer in optimizers:
        optimizer.step(stats)
    sharding.all_gather_params()
    for bucket in sharding.buckets:
        bucket.wait()  # base_train leaves that to the next forward pass
    return memory


def measure(rank: int, ranks: int, config: GPTConfig, stage: int, dtype: str, on_wire: bool = False) -> dict:
    """
    On this rank, in bytes: {"memory": census between micro-steps, "peaks": those of Watch, "sent": for each of
    MICRO_STEPS what this rank sent in an optimizer step, "wire": what all ranks sent through the interface}.
    """
    gc.collect()
    gc.freeze()  # what is here by now is not looked through again
    model = GPT(config)
    model.init_weights(seed=0)
    watch = Watch(ranks, rank, list(model.parameters()) if stage < 3 else [])
    watch.sharding = sharding = Sharding(model, model.units(), torch.device("cpu"), getattr(torch, dtype), stage)
    watch.optimizers = optimizers = setup_optimizers(model, sharding)
    rows = torch.randint(config.vocab_size, (1, config.sequence_len + 1), generator=torch.Generator().manual_seed(rank))
    memory, sent, wire = {}, [], []
    for micro_steps in MICRO_STEPS:
        watch.sent.clear()
        dist.barrier()
        before = sent_through_lo() if on_wire else 0
        dist.barrier()
        with watch:
            memory = train_step(model, sharding, optimizers, rows, micro_steps, watch)
        dist.barrier()
        wire.append(sent_through_lo() - before if on_wire else 0)
        sent.append(watch.sent.total())
    for p in watch.params:
        p._post_accumulate_grad_hooks.clear()  # they close a cycle that Python's collector cannot see
    return {"memory": memory, "peaks": dict(watch.peaks), "sent": sent, "wire": wire}


def measure_all(rank: int, ranks: int, config: GPTConfig, on_wire: bool = False) -> list[dict]:
    """Every dtype and stage; of memory the fullest rank's, of traffic the mean over ranks."""
    results = []
    for dtype in DTYPES:
        for stage in STAGES:
            per_rank: list = [None] * ranks
            dist.all_gather_object(per_rank, measure(rank, ranks, config, stage, dtype, on_wire))
            result = {"ranks": ranks, "dtype": dtype, "stage": stage, "wire": [total / ranks for total in per_rank[0]["wire"]]}
            result["sent"] = [sum(sent) / ranks for sent in zip(*(r["sent"] for r in per_rank))]
            for key in ("memory", "peaks"):
                result[key] = {name: max(r[key][name] for r in per_rank) for name in per_rank[0][key]}
            results.append(result)
    return results


def rank_main(rank: int, ranks: int, config: GPTConfig, on_wire: bool, folder: str) -> None:
    """The life of one rank; the first leaves the results in the folder."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if "lo" in dict(socket.if_nameindex()).values() else "lo0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous{ranks}", rank=rank, world_size=ranks)
    results = measure_all(rank, ranks, config, on_wire)
    if rank == 0:
        Path(folder, f"{ranks}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


# ---- Tables

def expected_state(result: dict, config: GPTConfig) -> StateBytes:
    return state_bytes(result["stage"], result["ranks"], getattr(torch, result["dtype"]), *parameter_counts(config))


def expected_sent(result: dict, config: GPTConfig) -> list[float]:
    adamw, muon = parameter_counts(config)
    dtype = getattr(torch, result["dtype"])
    return [sent_bytes(result["stage"], result["ranks"], m, dtype, torch.float32, adamw + muon, muon, adamw // 2) for m in MICRO_STEPS]


def megabytes(*values: float) -> str:
    return " / ".join(f"{value / 1e6:.2f}" for value in values)


def tables(results: list[dict], config: GPTConfig, on_wire: bool) -> str:
    """The part of docs/zero.md that is measured."""
    # --- what is kept
    adamw, muon = parameter_counts(config)
    unit = 4 * max(adamw // 2, muon // config.n_layer)
    parts = [
        f"A model of {adamw + muon:,} parameters, {muon:,} of them Muon's, in {config.n_layer + 2} units of at most {unit // 4:,}; "
        f"torch {torch.__version__}, gloo. MB are 10⁶ bytes.",
        "### Memory: MB per rank between two micro-steps, measured on the fullest rank / formula",
    ]
    for dtype in DTYPES:
        rows = []
        for r in sorted((r for r in results if r["dtype"] == dtype), key=lambda r: (r["stage"], r["ranks"])):
            pairs = [(r["memory"][name], formula) for name, formula in expected_state(r, config)._asdict().items()]
            together = tuple(map(sum, zip(*pairs)))
            rows.append([r["stage"], r["ranks"], *(megabytes(*pair) for pair in pairs), megabytes(*together), megabytes(r["memory"]["in flight"])])
        parts += [f"**{dtype}**", markdown_table(["stage", "ranks", "parameters", "gradients", "optimizer state", "together", "in flight"], rows)]
    rest = max(r["memory"]["rest"] for r in results)
    worst = max(abs(r["memory"][name] / formula - 1) for r in results for name, formula in expected_state(r, config)._asdict().items())
    parts.append(
        f"The largest deviation is {worst:.1%}; all other live tensors had {rest / 1e3:.1f} KB together at most. *In flight* on stage 2 are the "
        f"last {MAX_IN_FLIGHT} units' sums, which the next micro-step receives; nearly half of it is where gloo's chunks arrive."
    )

    # --- the peak of whole gradients, then what travels: on one rank nothing does
    several = sorted((r for r in results if r["ranks"] > 1), key=lambda r: (r["stage"], r["ranks"]))
    rows = [
        [r["stage"], r["ranks"], *(f"{megabytes(r['peaks'][key])} = {r['peaks'][key] / unit:.2f} units" for key in ("whole", "with buffers"))]
        for r in several if r["dtype"] == "bfloat16" and r["stage"] in (1, 2)
    ]
    parts += [
        "### Whole gradients alive at any moment of a step, MB",
        markdown_table(["stage", "ranks", "whole gradients", "with the buffers that receive"], rows),
        f"Stage 2: {MAX_IN_FLIGHT} units on their way, one being computed, and for a moment its copy end to end; the model has "
        f"{config.n_layer + 2}. At the end of its backward passes all other tensors that Python knows of had "
        f"{max(r['peaks']['rest'] for r in several if r['stage'] == 2) / 1e3:.1f} KB at most: nothing is hoarded elsewhere.",
        "### Traffic: MB that a rank sends in one optimizer step" + (", counted / formula / on the wire" if on_wire else ", counted / formula"),
    ]
    for dtype in DTYPES:
        rows = []
        for r in several:
            if r["dtype"] == dtype:
                numbers = zip(r["sent"], expected_sent(r, config), *([r["wire"]] if on_wire else []))
                rows.append([r["stage"], r["ranks"], *(megabytes(*cell) for cell in numbers)])
        parts += [f"**{dtype}**", markdown_table(["stage", "ranks", *(f"{m} micro-step{'s' * (m > 1)}" for m in MICRO_STEPS)], rows)]
    worst = max(abs(sent / formula - 1) for r in several for sent, formula in zip(r["sent"], expected_sent(r, config)))
    parts.append(f"The counts are at most {worst:.1%} from the formulas.")
    if on_wire:
        more = [carried / sent - 1 for r in several for carried, sent in zip(r["wire"], r["sent"])]
        parts.append(f"The wire carries {min(more):.1%} to {max(more):.1%} more than counted: headers, acknowledgements, a barrier.")
    return "\n\n".join(parts)


if __name__ == "__main__":
    # ---- Model: with a vocabulary of 12 times the width every unit is as large as every other
    depth = 12                  # layers
    width = 128                 # of the model; a multiple of the ranks leaves no padding
    max_seq_len = 32            # tokens; few, only parameters matter here
    # ---- Measurement
    max_ranks = 8               # 1, 2, 4, … up to this
    wire: Literal["auto", "here", "no"] = "auto"  # count on the interface too: here: of this network; auto: of one made for it
    write = False               # put the tables into docs/zero.md
    configure(globals())

    # ---- A network of its own: start again inside it (Linux, where users may)
    if wire == "auto":
        allowed = shutil.which("unshare") and subprocess.run([*PRIVATE_NETWORK, "true"], capture_output=True).returncode == 0
        if allowed:
            arguments = [arg for arg in sys.argv[1:] if not arg.startswith("--wire")] + ["--wire=here"]
            os.execvp("unshare", [*PRIVATE_NETWORK, sys.executable, "-m", "bench.zero", *arguments])
        print("bytes on the wire: not counted, this machine does not let us make a network")
    if wire == "here":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP

    # ---- Measure: one set of processes for each number of ranks
    config = GPTConfig(max_seq_len, 12 * width, depth, width, 2, 2)
    results: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        ranks = 1
        while ranks <= max_ranks:
            start = time.perf_counter()
            start_processes(rank_main, (ranks, config, wire == "here", folder), nprocs=ranks, start_method="forkserver")
            results += json.loads(Path(folder, f"{ranks}.json").read_text())
            print(f"{ranks} rank(s): {time.perf_counter() - start:.0f} s", flush=True)
            ranks *= 2

    # ---- Show
    text = tables(results, config, wire == "here")
    print(text)
    if write:
        put_into_page("zero.md", "python -m bench.zero --write", text)
