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

from bench.harness import scratch_base, show
from bench.network import RUN, Hosts, make_sums, why_not
from nanochat.files import base_dir
from nanochat.gpt import GPTConfig, config_from_depth
from nanochat.metrics import read_metrics
from nanochat.plan.memory import parameter_counts
from nanochat.report import markdown_table

rates = "100mbit,1gbit"     # of the links, as tc writes them
num_iterations = 30         # [4..] steps of each run
layouts = ""                # numbers of the lines to measure, such as 0,3; empty: all
write = False               # put the tables into docs/many_hosts.md
configure(globals())

# hosts, ranks on each, settings
LAYOUTS = [
    (1, 1, {}), (1, 2, {"zero_stage": 1}),
    (2, 1, {"zero_stage": 0}), (2, 1, {"zero_stage": 1}), (2, 1, {"zero_stage": 3}),
    (2, 2, {"zero_stage": 2}), (2, 2, {"zero_stage": 2, "shard_size": 2}), (2, 2, {"zero_stage": 3, "shard_size": 2}),
    (4, 1, {"zero_stage": 1}),
]


def crossing(hosts: int, ranks: int, stage: int, shard_size: int, micro_steps: int, config: GPTConfig) -> float:
    """
    Bytes that a host sends to the others in an optimizer step, in float32, with gloo: what is summed by shard goes
    straight to its owner, all other collectives go round a ring in the order of ranks, which leaves each host once.
    Muon's matrices travel to an owner and back.
    """
    world, (adamw, muon) = hosts * ranks, parameter_counts(config)
    whole = 4 * (adamw + muon)
    if hosts == 1:
        return 0.0
    if stage == 0:
        return 2 * (world - 1) / world * whole
    if shard_size == ranks:  # only the sums of shards, over replicas: the ranks of a host hold the model once
        return 2 * (hosts - 1) / hosts * whole
    gathered = (world - 1) / world * whole
    scattered = ranks * (world - ranks) / world * whole  # a rank sends to each rank of other hosts
    matrices = 2 * ranks * (world - ranks) / world**2 * 4 * muon
    if stage == 3:
        head = 4 * config.padded_vocab_size * config.n_embd
        return micro_steps * (scattered + (2 * whole - head) * (world - 1) / world) + matrices
    return (scattered * (micro_steps if stage == 2 else 1)) + gathered + matrices


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
            expected = crossing(hosts, ranks, changes.get("zero_stage", 2), changes.get("shard_size", -1),
                                result["micro-steps"], config)
            rows.append([rate, hosts, ranks, " ".join(f"{k}={v}" for k, v in changes.items()), f"{off:.1e}",
                         f"{result['sent'] / 1e6:.3f} / {expected / 1e6:.3f}", f"{result['seconds']:.3f}"])
            print(rows[-1], result["said"], flush=True)
columns = ["link", "hosts", "ranks on each", "settings", "largest difference of a loss",
           "MB per step from a host, measured / formula", "seconds per step"]
show(markdown_table(columns, rows), "many_hosts.md", "bench.hosts", write)
