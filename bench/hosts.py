"""
One run on one host and on several, joined by slow links: losses, bytes between hosts, seconds of a step; the tables of
docs/many_hosts.md. Needs root on Linux; the hosts are made by bench/network.py on this machine.

    python -m bench.hosts --write    # without --write they are only printed
"""
import math
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from configurator import configure

import torch

from bench.harness import limit_cpu, remove_limits, scratch_base, show
from bench.network import MTU, RUN, Hosts, make_sums, why_not
from nanochat.compiling import set_compile
from nanochat.distributed import keep_freed_memory
from nanochat.files import base_dir
from nanochat.gpt_config import GPTConfig, config_from_depth
from nanochat.plan.machines import Cluster, Layout, Link, StepPlan, plan_step
from nanochat.plan.memory import parts
from nanochat.plan.probes import set_up_training, train_step
from nanochat.records import read_metrics
from nanochat.report import markdown_table

rates = "100mbit,1gbit"     # of the links, as tc writes them
num_iterations = 30         # [4..] steps of each run
layouts = ""                # numbers of the lines to measure, such as 0,3; empty: all
write = False               # put the tables into docs/many_hosts.md
configure(globals())

# Of a core, that each rank may compute in any row: with fewer cores than ranks, one that waits makes no other faster.
SHARE = min(0.9 * os.cpu_count() / 4, 1.0)
PERIOD = math.ceil(1080 / SHARE)    # µs in which it may; a message waits for its receiver's next: as short as it can be
PAYLOAD = (MTU - 52) / (MTU + 14)   # of what a link sends: without headers of TCP, IP and Ethernet
# hosts, ranks on each, settings
LAYOUTS = [
    (1, 1, {"zero_stage": 0}), (1, 2, {"zero_stage": 1}),
    (2, 1, {"zero_stage": 0}), (2, 1, {"zero_stage": 1}), (2, 1, {"zero_stage": 3}),
    (2, 2, {"zero_stage": 2}), (2, 2, {"zero_stage": 2, "shard_size": 2}), (2, 2, {"zero_stage": 3, "shard_size": 2}),
    (4, 1, {"zero_stage": 0}), (4, 1, {"zero_stage": 1}),
    (2, 1, {"zero_stage": 1, "pipeline_stages": 2}), (4, 1, {"zero_stage": 1, "pipeline_stages": 4}),
]


class Machine(NamedTuple):
    """What a rank does with its share of a core, where so many compute at once and send nothing."""

    rate: float         # FLOP/s in forward and backward passes of device_batch_size rows
    muon_rate: float    # of Muon's products in an update, in which there is more than products
    copying: float      # seconds for each byte that gloo sends: copies, headers, sums


def seconds_of_steps(config: GPTConfig, seconds: float = 4.0) -> dict[int, float]:
    """{micro-steps: median seconds of an optimizer step} of one rank."""
    limit_cpu(SHARE, PERIOD)
    torch.set_num_threads(1)
    keep_freed_memory()
    set_compile(False, "cpu")
    training = set_up_training(config, torch.float32, torch.device("cpu"))
    tokens = torch.randint(config.vocab_size, (RUN["device_batch_size"], config.sequence_len + 1))
    times: dict[int, list[float]] = {1: [], 5: []}
    end = time.perf_counter() + seconds
    while len(times[5]) < 3 or time.perf_counter() < end:
        for micro_steps, found in times.items():
            began = time.perf_counter()
            train_step(*training, tokens, micro_steps)
            found.append(time.perf_counter() - began)
    return {micro_steps: statistics.median(found[1:]) for micro_steps, found in times.items()}


def measure_machine(hosts: int, ranks: int, config: GPTConfig, log: Path) -> Machine:
    """So many ranks on each host. Their links are not limited while the costs of sending are measured."""
    (model,) = parts(config)
    with ProcessPoolExecutor(hosts * ranks, multiprocessing.get_context("fork")) as pool:
        of_ranks = list(pool.map(seconds_of_steps, [config] * hosts * ranks))
    one, five = (statistics.mean(times[micro_steps] for times in of_ranks) for micro_steps in (1, 5))
    a_pass = (five - one) / 4
    launch_and_wait(hosts, ranks, "", ["bench.all_reduce", str(sum(model.units))], log)
    copying = float(re.search(r"seconds per byte: (\S+)", log.read_text())[1])
    tokens = RUN["device_batch_size"] * config.sequence_len
    return Machine(tokens * model.flops / a_pass, sum(model.products) / (one - a_pass), copying)


def launch_and_wait(
    hosts: int, ranks: int, rate: str, command: list[str], log: Path,
    meanwhile: Callable[[Hosts], None] | None = None,
) -> None:
    """A module of this repo on hosts, each rank with its share of a core. SystemExit with what it said if it fails."""
    deadline, command = time.monotonic() + 400, ["bench.limited", str(SHARE), str(PERIOD), *command]
    with Hosts(hosts, rate) as network:
        launchers = [network.launch(host, command, log, ranks) for host in range(hosts)]
        while any(launcher.poll() is None for launcher in launchers):
            if time.monotonic() > deadline:
                raise SystemExit(f"no end within 400 s:\n{log.read_text()}")
            if meanwhile:
                meanwhile(network)
            time.sleep(0.002)
    if any(launcher.returncode for launcher in launchers):
        raise SystemExit(log.read_text())


def predicted(result: dict, machine: Machine, latency: float, bits: float) -> tuple[StepPlan, float]:
    """
    The planner's step, in float32 with gloo, and its seconds with those in which the cores copy what is sent. The ranks
    of a host share its link.
    """
    hosts, ranks, changes = result["layout"]
    config, stage, stages = result["config"], changes["zero_stage"], changes.get("pipeline_stages", 1)
    shards = changes.get("shard_size", hosts * ranks // stages) if stage else 1
    between = Link("limited", bits / 8 * PAYLOAD / ranks, latency)
    cluster = Cluster(hosts * ranks, ranks, Link("the same host", math.inf), between, gloo=True)
    layout = Layout(stage, shards, RUN["device_batch_size"], result["micro-steps"], pipeline_stages=stages)
    plan = plan_step(config, cluster, layout, machine.rate, torch.float32, RUN["total_batch_size"], machine.muon_rate)
    return plan, plan.seconds + machine.copying * (plan.within + plan.between)


def round_trip(rate: str) -> float:
    """Half the seconds that a packet needs to another host and back, as the median of many."""
    echo = "import socket; c = socket.create_server(('', 9)).accept()[0]; [c.sendall(c.recv(1)) for _ in range(200)]"
    ask = ("import socket, statistics, time; time.sleep(1); c = socket.create_connection(('host0', 9)); found = []\n"
           "for _ in range(200):\n"
           "    t = time.perf_counter(); c.sendall(b'x'); c.recv(1); found.append(time.perf_counter() - t)\n"
           "print(statistics.median(found) / 2)")
    with Hosts(2, rate) as network, tempfile.NamedTemporaryFile("r") as log:
        answering = network.start(0, [sys.executable, "-c", echo], Path(log.name))
        network.start(1, [sys.executable, "-c", ask], Path(log.name)).wait()
        answering.wait()
        return float(log.read())


def run(number: int, rate: str, folder: Path) -> dict:
    """One line of the table: a whole run; losses by step, bytes of a host and seconds of a step in its second half."""
    hosts, ranks, changes = LAYOUTS[number]
    tag = f"{rate}-{number}"
    settings = RUN | {"depth": 4, "num_iterations": num_iterations, "model_tag": tag} | changes
    arguments = ["scripts.base_train", *(f"--{key}={value}" for key, value in settings.items())]
    log, metrics = folder / f"{tag}.log", base_dir() / "base_checkpoints" / tag / "metrics.jsonl"
    half, sent = num_iterations // 2, {}

    def note_bytes(network: Hosts) -> None:
        done = metrics.read_text().count("\n") if metrics.exists() else 0
        if done not in sent:  # a step has just been written down
            sent[done] = sum(map(network.sent, range(hosts))) / hosts

    launch_and_wait(hosts, ranks, rate, arguments, log, note_bytes)
    records = [record for record in read_metrics(metrics) if "train/loss" in record]
    vocabulary = int(re.search(r"vocabulary ([\d,]+)", log.read_text())[1].replace(",", ""))
    return {
        "layout": LAYOUTS[number], "losses": [record["train/loss"] for record in records],
        "sent": (sent[num_iterations - 1] - sent[half]) / (num_iterations - 1 - half),
        "seconds": statistics.median(record["train/dt"] for record in records[half:]),
        "micro-steps": int(re.search(r"x (\d+) micro-step", log.read_text())[1]),
        "config": config_from_depth(4, vocabulary, RUN["max_seq_len"], arch=RUN["arch"]),
        "said": re.findall(r"^rank.* on host.*$", log.read_text(), re.MULTILINE),
    }


if reason := why_not():
    print(f"not measured: {reason}")
    sys.exit(0)
chosen = [int(part) for part in layouts.split(",")] if layouts else range(len(LAYOUTS))
rows, alone = [], None
with scratch_base():
    make_sums(base_dir() / "texts")
    for rate in rates.split(","):
        bits = float(rate.removesuffix("mbit").removesuffix("gbit")) * (1e9 if rate.endswith("gbit") else 1e6)
        for number in dict.fromkeys((0, *chosen)) if alone is None else chosen:
            hosts, ranks, changes = LAYOUTS[number]
            result = run(number, rate, base_dir())
            if alone is None:
                alone, latency = result, round_trip(rate)
            off = max(abs(a - b) for a, b in zip(alone["losses"], result["losses"], strict=True))
            # At once: others slow this machine down by the minute.
            machine = measure_machine(hosts, ranks, result["config"], base_dir() / f"{rate}-{number}-sending.log")
            remove_limits()
            plan, planned = predicted(result, machine, latency, bits)
            seconds = result["seconds"]
            rows.append([rate, hosts, ranks, " ".join(f"{k}={v}" for k, v in changes.items()), f"{off:.1e}",
                         f"{result['sent'] / 1e6:.3f} / {ranks * plan.between / 1e6:.3f}",
                         f"{seconds:.3f} / {planned:.3f}", f"{planned / seconds - 1:+.0%}"])
            print(rows[-1], plan, machine, result["said"], flush=True)
columns = ["link", "hosts", "ranks on each", "settings", "largest difference of a loss",
           "MB per step from a host, measured / formula", "seconds per step, measured / planned", "planned is off by"]
show(markdown_table(columns, rows), "many_hosts.md", "bench.hosts", write)
