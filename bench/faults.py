"""
What happens, and how soon, when something goes wrong in a run: the tables of docs/many_hosts.md.

    python -m bench.faults --write            # without --write they are only printed; about ten minutes
    python -m bench.faults --only=SIGSTOP     # one fault of one rank of two, on one host
    python -m bench.faults --only=host        # a host is killed and comes back; needs root, as the next one does
    python -m bench.faults --only=link        # a cable is out, first shortly, then for longer
"""
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from configurator import configure

from bench.faulty import FAULTS
from bench.harness import scratch_base, show
from bench.network import REPO, RUN, Hosts, make_sums, why_not
from nanochat.files import base_dir
from nanochat.records import read_metrics
from nanochat.report import markdown_table

only = ""                   # one fault, or host, or link; empty: all
write = False               # put the tables into docs/many_hosts.md
configure(globals())

TOLD = (r"stopped after step|silent for|Fatal Python error|ArithmeticError|another rank of this node is dead"
        r"|Signal \d+ \(\w+\)|RuntimeError")


def arguments(tag: str, **changes: object) -> list[str]:
    settings = RUN | {"depth": 2, "model_tag": tag, "save_every": 5, "num_iterations": 100000} | changes
    return [f"--{key}={value}" for key, value in settings.items()]


def wait_for(happened: Callable[[], object], log: Path, seconds: float = 200) -> float:
    """Seconds until it has happened. SystemExit with the log after so many."""
    began = time.monotonic()
    while not happened():
        if time.monotonic() > began + seconds:
            raise SystemExit(f"not within {seconds:.0f} s:\n{log.read_text()}")
        time.sleep(0.02)
    return time.monotonic() - began


def of_rank(fault: str, folder: Path) -> list:
    """Two ranks on this machine, one of them faulty: the first line about it, when it came, when torchrun ended."""
    tag = fault.replace(" ", "-")
    log, trigger = folder / f"{tag}.log", folder / f"{tag}.now"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "--shutdown-timeout=300", "-m", "bench.faulty", "--", *arguments(tag)]
    env = os.environ | {"FAULT": fault, "FAULT_RANK": "1", "FAULT_AT": str(trigger), "OMP_NUM_THREADS": "1"}
    with open(log, "w", encoding="utf-8") as output:
        job = subprocess.Popen(command, cwd=REPO, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: "step 00007/" in log.read_text(), log)
        before = len(log.read_text())
        trigger.touch()
        told = wait_for(lambda: re.search(TOLD, log.read_text()[before:]), log)
        line = next(line for line in log.read_text()[before:].splitlines() if re.search(TOLD, line))
        ended = told + wait_for(lambda: job.poll() is not None, log)
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(60)
    saved = max(path.name for path in (base_dir() / "base_checkpoints" / tag).glob("step_*"))
    return [fault, line.strip()[:150], f"{told:.1f}", f"{ended:.1f}", saved]


def losses(tag: str) -> dict[int, float]:
    records = read_metrics(base_dir() / "base_checkpoints" / tag / "metrics.jsonl")
    return {record["step"]: record["train/loss"] for record in records if "train/loss" in record}


def host(folder: Path) -> list[list]:
    """Two hosts, --nnodes=1:2: one is killed, the other goes on, the first comes back."""
    steps, rows = 60, []
    settings = dict(num_iterations=steps, resume="auto")
    log = folder / "host.log"
    command = ["scripts.base_train", *arguments("elastic", **settings)]

    def step() -> int:
        return max(map(int, re.findall(r"^step (\d+)/", log.read_text(), re.MULTILINE)), default=0)

    def rounds(ranks: int) -> int:
        return len(re.findall(rf"^{ranks} rank\(s\) on", log.read_text(), re.MULTILINE))

    with Hosts(2, "1gbit") as network:
        whole = [network.launch(number, ["scripts.base_train", *arguments("whole", **settings)], log, nodes="1:2")
                 for number in (0, 1)]
        wait_for(lambda: all(launcher.poll() == 0 for launcher in whole), log)
        log.unlink()
        first, second = (network.launch(number, command, log, nodes="1:2") for number in (0, 1))
        wait_for(lambda: step() > 15, log)
        network.kill(1)
        at = step()
        gone = wait_for(lambda: rounds(1) and log.read_text().count("resuming from"), log)
        resumed = int(re.findall(r"resuming from .*step_(\d+)", log.read_text())[-1])
        rows.append(["host1 is killed", f"host0 goes on alone, from step {resumed} (it came at {at})", f"{gone:.0f}"])
        wait_for(lambda: step() > at + 8, log)
        network.boot(1)
        second = network.launch(1, command, log, nodes="1:2")
        back = wait_for(lambda: rounds(2) == 2 and log.read_text().count("resuming from") == 2, log)
        rows.append(["host1 is back", "host0 finishes its step and saves; both go on from it", f"{back:.0f}"])
        wait_for(lambda: first.poll() is not None and second.poll() is not None, log)
    a, b = losses("whole"), losses("elastic")
    assert a.keys() == b.keys() and (first.returncode, second.returncode) == (0, 0), log.read_text()
    off = max(abs(a[number] - b[number]) for number in a)
    return [*rows, ["the end", f"all {steps} losses within {off:.1e} of a run that was left alone", ""]]


def link(folder: Path) -> list[list]:
    """Two hosts, one cable: out for 15 s, then for good."""
    log, rows = folder / "link.log", []
    with Hosts(2, "1gbit") as network:
        launchers = [network.launch(number, ["scripts.base_train", *arguments("link")], log, MAX_RESTARTS="0")
                     for number in (0, 1)]
        wait_for(lambda: "step 00020/" in log.read_text(), log)
        network.cable(1, connected=False)
        time.sleep(15)
        network.cable(1, connected=True)
        lines = log.read_text().count("\nstep ")
        again = wait_for(lambda: log.read_text().count("\nstep ") > lines + 2, log)
        rows.append(["link down for 15 s", "no error; steps go on so long after it is back", f"{again:.0f}"])
        network.cable(1, connected=False)
        began = time.monotonic()
        for line in ("rank 1 on host1: silent", "rank 0 on host0 does not answer"):
            wait_for(lambda line=line: line in log.read_text(), log)
            told = next(told for told in log.read_text().splitlines() if line in told)
            rows.append(["link down for longer", told, f"{time.monotonic() - began:.0f}"])
        wait_for(lambda: all(launcher.poll() for launcher in launchers), log)
        rows.append(["link down for longer", "both launchers have ended", f"{time.monotonic() - began:.0f}"])
    return rows


with scratch_base():
    make_sums(base_dir() / "texts")
    rows = []
    for fault in [fault for fault in FAULTS if only in ("", fault)]:
        rows.append(of_rank(fault, base_dir()))
        print(rows[-1], flush=True)
    tables = [(["rank 1 of 2", "the first line about it", "after s", "torchrun has ended after s", "newest checkpoint"],
               rows)]
    events = []
    if reason := why_not():
        print(f"hosts are not tried: {reason}")
    else:
        for name, function in (("host", host), ("link", link)):
            events += function(base_dir()) if only in ("", name) else []
    tables.append((["on two hosts", "what happens", "after s"], events))
    show("\n\n".join(markdown_table(*table) for table in tables if table[1]), "many_hosts.md", "bench.faults",
         write and not only)
