"""
One run on one host and on several, joined by slow links: losses, bytes between hosts, seconds of a step; the tables of
docs/many_hosts.md. Needs root on Linux; the hosts are made by bench/network.py on this machine.

    python -m bench.hosts --write    # without --write they are only printed
"""
import math
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

from configurator import configure

import torch

from bench.harness import scratch_base, show
from bench.network import MTU, RUN, Hosts, make_sums, why_not
from nanochat.files import base_dir
from nanochat.gpt import config_from_depth
from nanochat.plan.machines import Cluster, Layout, Link, StepPlan, plan_step
from nanochat.plan.memory import parts
from nanochat.records import read_metrics
from nanochat.report import markdown_table

rates = "100mbit,1gbit"     # of the links, as tc writes them
num_iterations = 30         # [4..] steps of each run
layouts = ""                # numbers of the lines to measure, such as 0,3; empty: all
write = False               # put the tables into docs/many_hosts.md
configure(globals())

PAYLOAD = (MTU - 52) / (MTU + 14)   # of what a link sends: without headers of TCP, IP and Ethernet
# hosts, ranks on each, settings
LAYOUTS = [
    (1, 1, {"zero_stage": 0}), (1, 2, {"zero_stage": 1}),
    (2, 1, {"zero_stage": 0}), (2, 1, {"zero_stage": 1}), (2, 1, {"zero_stage": 3}),
    (2, 2, {"zero_stage": 2}), (2, 2, {"zero_stage": 2, "shard_size": 2}), (2, 2, {"zero_stage": 3, "shard_size": 2}),
    (4, 1, {"zero_stage": 0}), (4, 1, {"zero_stage": 1}),
    (2, 1, {"zero_stage": 1, "pipeline_stages": 2}), (4, 1, {"zero_stage": 1, "pipeline_stages": 4}),
]


def predicted(result: dict, alone: dict, bits: float) -> StepPlan:
    """
    The planner's step, in float32 with gloo. The ranks of a host share its link. A rank computes as fast as the run on
    one host and one rank did, Muon's products included, or slower where ranks share a core.
    """
    hosts, ranks, changes = result["layout"]
    config = config_from_depth(4, result["vocabulary"], RUN["max_seq_len"], arch=RUN["arch"])
    stage, batch, (model,) = changes["zero_stage"], RUN["total_batch_size"], parts(config)
    pipeline_stages = changes.get("pipeline_stages", 1)
    shards = changes.get("shard_size", hosts * ranks // pipeline_stages) if stage else 1
    rate = (batch * model.flops + sum(model.products)) / alone["seconds"] * min(1, os.cpu_count() / (hosts * ranks))
    between = Link("limited", bits / 8 * PAYLOAD / ranks, alone["latency"])
    cluster = Cluster(hosts * ranks, ranks, Link("the same host", math.inf), between, gloo=True)
    layout = Layout(stage, shards, RUN["device_batch_size"], result["micro-steps"], pipeline_stages=pipeline_stages)
    return plan_step(config, cluster, layout, rate, torch.float32, batch)


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
    half, sent, deadline = num_iterations // 2, {}, time.monotonic() + 240
    with Hosts(hosts, rate) as network:
        launchers = [network.launch(host, arguments, log, ranks) for host in range(hosts)]
        while any(launcher.poll() is None for launcher in launchers):
            if time.monotonic() > deadline:
                raise SystemExit(f"no end within 240 s:\n{log.read_text()}")
            done = metrics.read_text().count("\n") if metrics.exists() else 0
            sent.setdefault(done, sum(map(network.sent, range(hosts))) / hosts)  # a step has just been written down
            time.sleep(0.002)
    if any(launcher.returncode for launcher in launchers):
        raise SystemExit(log.read_text())
    records = [record for record in read_metrics(metrics) if "train/loss" in record]
    return {
        "layout": LAYOUTS[number], "losses": [record["train/loss"] for record in records],
        "sent": (sent[num_iterations - 1] - sent[half]) / (num_iterations - 1 - half),
        "seconds": statistics.median(record["train/dt"] for record in records[half:]),
        "micro-steps": int(re.search(r"x (\d+) micro-step", log.read_text())[1]),
        "vocabulary": int(re.search(r"vocabulary ([\d,]+)", log.read_text())[1].replace(",", "")),
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
            alone = alone or result | {"latency": round_trip(rate)}
            off = max(abs(a - b) for a, b in zip(alone["losses"], result["losses"], strict=True))
            plan, seconds = predicted(result, alone, bits), result["seconds"]
            rows.append([rate, hosts, ranks, " ".join(f"{k}={v}" for k, v in changes.items()), f"{off:.1e}",
                         f"{result['sent'] / 1e6:.3f} / {ranks * plan.between / 1e6:.3f}",
                         f"{seconds:.3f} / {plan.seconds:.3f}", f"{plan.seconds / seconds - 1:+.0%}"])
            print(rows[-1], plan, result["said"], flush=True)
print(f"a packet takes {alone['latency'] * 1e6:.0f} µs to another host")
columns = ["link", "hosts", "ranks on each", "settings", "largest difference of a loss",
           "MB per step from a host, measured / formula", "seconds per step, measured / planned", "planned is off by"]
show(markdown_table(columns, rows), "many_hosts.md", "bench.hosts", write)
