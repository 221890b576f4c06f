"""
One run on one host and on several, joined by slow links: losses, bytes between hosts, seconds of a step; the tables of
docs/many_hosts.md. Needs root on Linux; the hosts are made by bench/network.py on this machine.

    python -m bench.hosts --write    # without --write they are only printed
"""
import re
import statistics
import sys
import time
from pathlib import Path

from configurator import configure

import torch

from bench.harness import scratch_base, show
from bench.network import RUN, Hosts, make_sums, why_not
from nanochat.files import base_dir
from nanochat.gpt import GPTConfig, config_from_depth
from nanochat.plan.memory import parameter_counts
from nanochat.plan.traffic import collectives
from nanochat.records import read_metrics
from nanochat.report import markdown_table

rates = "100mbit,1gbit"     # of the links, as tc writes them
num_iterations = 30         # [4..] steps of each run
layouts = ""                # numbers of the lines to measure, such as 0,3; empty: all
write = False               # put the tables into docs/many_hosts.md
configure(globals())

# hosts, ranks on each, settings
LAYOUTS = [
    (1, 1, {"zero_stage": 0}), (1, 2, {"zero_stage": 1}),
    (2, 1, {"zero_stage": 0}), (2, 1, {"zero_stage": 1}), (2, 1, {"zero_stage": 3}),
    (2, 2, {"zero_stage": 2}), (2, 2, {"zero_stage": 2, "shard_size": 2}), (2, 2, {"zero_stage": 3, "shard_size": 2}),
    (4, 1, {"zero_stage": 1}),
]


def crossing(hosts: int, ranks: int, stage: int, shards: int, micro_steps: int, config: GPTConfig) -> float:
    """
    Bytes that a host sends to the others in an optimizer step, in float32 with gloo. Shards are those of one host, or
    of all ranks (stage 0: one, with a rank on each host). Where all ranks share a copy, an all-gather goes round a ring
    in the order of ranks, which leaves each host once; what is reduced or redistributed goes straight to its owner.
    """
    world, replicas, (adamw, muon) = hosts * ranks, hosts * ranks // shards, parameter_counts(config)
    head, sent = config.padded_vocab_size * config.n_embd, 0.0
    float32 = torch.float32, torch.float32
    for c in collectives(stage, shards, replicas, micro_steps, *float32, adamw + muon, muon, head):
        size = c.bytes * c.times * c.passes
        if c.among == "replicas":
            sent += ranks * size * (replicas - 1) / replicas
        elif shards > ranks:
            sent += size * ((world - 1) / world if c.kind == "all-gather" else ranks * (world - ranks) / world)
    return sent


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
            sent.setdefault(done, network.sent(hosts - 1))  # when a step has just been written down
            time.sleep(0.002)
    if any(launcher.returncode for launcher in launchers):
        raise SystemExit(log.read_text())
    records = [record for record in read_metrics(metrics) if "train/loss" in record]
    return {
        "losses": [record["train/loss"] for record in records],
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
rows, reference = [], None
with scratch_base():
    make_sums(base_dir() / "texts")
    for rate in rates.split(","):
        for number in chosen:
            hosts, ranks, changes = LAYOUTS[number]
            result = run(number, rate, base_dir())
            reference = reference or result["losses"]
            off = max(abs(a - b) for a, b in zip(reference, result["losses"], strict=True))
            config = config_from_depth(4, result["vocabulary"], 64, arch="classic")
            stage = changes["zero_stage"]
            shards = changes.get("shard_size", hosts * ranks) if stage else 1
            expected = crossing(hosts, ranks, stage, shards, result["micro-steps"], config) if hosts > 1 else 0.0
            rows.append([rate, hosts, ranks, " ".join(f"{k}={v}" for k, v in changes.items()), f"{off:.1e}",
                         f"{result['sent'] / 1e6:.3f} / {expected / 1e6:.3f}", f"{result['seconds']:.3f}"])
            print(rows[-1], result["said"], flush=True)
columns = ["link", "hosts", "ranks on each", "settings", "largest difference of a loss",
           "MB per step from a host, measured / formula", "seconds per step"]
show(markdown_table(columns, rows), "many_hosts.md", "bench.hosts", write)
