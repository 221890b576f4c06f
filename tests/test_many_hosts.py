"""Ranks that fall silent, and several hosts: namespaces of Linux, made by hosts.py where that is possible."""
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import REPO, make_sums
from hosts import Hosts, why_not
from ranks import run_on_ranks
from test_many_ranks import TINY, arguments, difference, losses, script

from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.memory import split_into_stages
from nanochat.runtime import distributed
from nanochat.runtime.stopping import StopRequest
from nanochat.training.checkpoint import list_steps

SILENT = """
import ctypes, faulthandler, os, signal, subprocess, sys, threading, time
from nanochat.runtime import heartbeat
class Guard(subprocess.Popen):
    def __init__(self, *command, **settings):
        super().__init__(*command, **settings)
        Guard.last = self
subprocess.Popen = Guard
heartbeat.BEAT, heartbeat.MISSED_BEATS = 0.1, int(sys.argv[2])
lasting = 0.2 * heartbeat.MISSED_BEATS      # seconds: twice as long as it may be silent
faulthandler.enable()
ending = threading.Event()
heartbeat.start("rank 3 on host1", ["rank 3 on host1"], ending)
print("ready", flush=True)
def keeps_the_lock(seconds=1000):
    ctypes.PyDLL(None).sleep(seconds)
def loses_its_guard():
    Guard.last.kill()
    time.sleep(lasting)
def ends_slowly():
    ending.set()
    time.sleep(lasting)
    assert Guard.last.returncode == 0
{"stops": lambda: os.kill(os.getpid(), signal.SIGSTOP), "keeps the lock": keeps_the_lock,
 "lives": lambda: time.sleep(lasting), "loses its guard": loses_its_guard, "ends slowly": ends_slowly}[sys.argv[1]]()
"""


@pytest.mark.parametrize("what, status, shown", [
    ("stops", -signal.SIGKILL, ""), ("keeps the lock", -signal.SIGABRT, "in keeps_the_lock"), ("lives", 0, None),
    ("loses its guard", 0, None), ("ends slowly", 0, None)])
def test_a_silent_rank_is_named_and_ended(what, status, shown):
    """
    By the process beside it; where a thread keeps the interpreter's lock, its line is shown.
    """
    for patience in (10, 100, 1000):  # tenths of a second: on a busy machine a rank that lives may be silent for long
        command = [sys.executable, "-c", SILENT, what, str(patience)]
        done = subprocess.run(command, cwd=REPO, text=True, capture_output=True, timeout=500)
        if done.returncode == status:
            break
    assert done.returncode == status, done.stderr
    if shown is None:
        assert done.stderr == ""
    else:
        assert done.stderr.startswith(f"rank 3 on host1: silent for {patience // 10} s: its process was stopped")
        assert shown in done.stderr


CUT_OFF = """
import sys, threading, time
from nanochat.runtime import heartbeat
heartbeat.BEAT, heartbeat.MISSED_BEATS = 0.05, int(sys.argv[2])
class Store(dict):
    set = dict.__setitem__
    def multi_get(self, keys):
        if sys.argv[1] == "no answer":
            time.sleep(1000)
        return [self.setdefault(key, "0") for key in keys]
node = 1 if sys.argv[1] == "no answer" else 0
heartbeat.start(f"rank {node}", ["rank 0 on a", "rank 1 on b"], threading.Event(), node, Store())
time.sleep(1000)
"""


@pytest.mark.parametrize("what, said", [
    ("no beat", "rank 1 on b: silent for {} s, cut off or stopped; this rank ends, too\n"),
    ("no answer", "rank 1: silent for {} s: rank 0 on a does not answer; it is ended now\n")])
def test_a_host_that_is_cut_off_is_named_on_both_sides(what, said):
    """Rank 0 misses the other host's count; there the store does not answer."""
    for patience in (10, 100, 1000):  # twentieths of a second: on a busy machine its own guard may not hear of it, too
        command = [sys.executable, "-c", CUT_OFF, what, str(patience)]
        done = subprocess.run(command, cwd=REPO, text=True, capture_output=True, timeout=300)
        if done.stderr == (expected := said.format(round(patience / 20))):
            break
    assert done.returncode != 0 and done.stderr == expected


ENDS = """
import contextlib, threading, time
from datetime import timedelta
from torch.distributed import TCPStore
from nanochat.runtime import heartbeat
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
class Slow:
    set = store.set
    def multi_get(self, keys):
        with contextlib.suppress(Exception):
            store.wait(["never set"], timedelta(seconds=0.4))   # native code, where the end finds the thread
        return [b""] * len(keys)
heartbeat.BEAT, heartbeat.MISSED_BEATS = 0.01, 1000
heartbeat.start("rank 0", ["rank 0 on a", "rank 1 on b"], threading.Event(), 0, Slow())
time.sleep(0.6)
"""


def test_a_rank_that_asks_the_store_ends_well():
    """Its thread may be in the store's native code; ended there, C++ would abort the process after a finished run."""
    done = subprocess.run([sys.executable, "-c", ENDS], cwd=REPO, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr


def ends_asked(rank: int, world_size: int) -> bool:
    """Rank 0 is asked to stop, rank 1 a second later, rank 2 never: whether this one was when it ended."""
    stop = StopRequest()
    if rank < 2:
        threading.Timer(float(rank), os.kill, (os.getpid(), signal.SIGTERM)).start()
    else:
        distributed.MAX_SIGNAL_DELAY = 0.1
    while rank == 0 and not stop.asked:
        time.sleep(0.01)
    distributed.compute_cleanup(stop)
    return stop.asked


def test_a_rank_that_ends_for_another_host_waits_for_its_own_torchrun(monkeypatch):
    """
    Each host's torchrun notices by itself that a host has come. One that finds its ranks gone before takes that for the
    end of the run.
    """
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    assert run_on_ranks(3, ends_asked) == [True, True, False]


# At a forward pass the sums of the step before are at their ends, and those of this one wait for this rank's gradients.
RECORDED = """
import json, os, sys
from pathlib import Path
import torch
from hosts import sent_by_host
from nanochat.model.gpt import GPT
from test_many_ranks import script
rank, sent, forward = int(os.environ["RANK"]), [], GPT.forward
def counted(*args, **settings):
    if torch.is_grad_enabled():
        sent.append(sent_by_host())
    return forward(*args, **settings)
GPT.forward = counted
printed = script(rank, int(os.environ["WORLD_SIZE"]), sys.argv[1:])
Path(os.environ["RECORDS"], f"{rank}.json").write_text(json.dumps([printed, sent]))
"""


@pytest.mark.skipif(bool(why_not()), reason=f"no hosts: {why_not()}")
def test_two_hosts_are_one(base_folder, tmp_path):
    """
    Two ranks on each of two hosts, whose link has 100 Mbit/s: the losses of one rank. With shard_size=2 the
    sums of the shards cross the link once per step, 4 bytes per parameter, and hardly anything else.
    """
    vocabulary = make_sums(base_folder).get_vocab_size()  # fewer than 400: the texts have no more pairs
    settings = dict(num_iterations=6, device_type="cpu", arch="classic", depth=2)
    run_on_ranks(1, script, arguments("one", settings))
    (tmp_path / "recorded.py").write_text(RECORDED)
    environment = {"PYTHONPATH": f"{tmp_path}:{REPO / 'tests'}:{REPO}", "RECORDS": str(tmp_path)}
    log, command = tmp_path / "log", ["recorded", *arguments("two", settings | {"shard_size": 2})]
    with Hosts(2, "100mbit") as hosts:
        launchers = [hosts.launch(number, command, log, ranks=2, **environment) for number in (0, 1)]
        deadline = time.monotonic() + 500
        while any(launcher.poll() is None for launcher in launchers):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
    assert [launcher.returncode for launcher in launchers] == [0, 0], log.read_text()
    printed, sent = zip(*(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)))
    line = "ranks 0 to 1 on host0 (local ranks 0 to 1), ranks 2 to 3 on host1 (local ranks 0 to 1)\n"
    assert line in printed[0] and not any(printed[1:])
    assert difference(losses(base_folder, "one"), losses(base_folder, "two")) < 1e-4
    config = config_from_depth(2, vocabulary, TINY["max_seq_len"], arch="classic")
    expected = 4 * sum(split_into_stages(config)[0].units)
    for of_rank in sent:
        assert 1 < (of_rank[5] - of_rank[1]) / 4 / expected < 1.02  # headers are 0.8%


@pytest.mark.skipif(bool(why_not()), reason=f"no hosts: {why_not()}")
def test_a_third_host_joins_two(base_folder, tmp_path):
    """
    Of an elastic run with --overwrite, in whose folder an older run's checkpoint is: that one goes, the run's own is
    what three go on from, among whom four micro-batches do not divide. Neither of the two takes it for the end.
    """
    make_sums(base_folder)
    run_on_ranks(1, script, arguments("elastic", {"num_iterations": 7, "device_type": "cpu"}))
    settings = {"num_iterations": 10**6, "device_type": "cpu", "overwrite": True}
    log, command = tmp_path / "log", ["scripts.base_train", *arguments("elastic", settings)]
    deadline = time.monotonic() + 250

    def wait_for(*words: str) -> None:
        while not all(word in log.read_text() for word in words):
            assert time.monotonic() < deadline and all(one.poll() is None for one in launchers), log.read_text()
            time.sleep(0.05)

    with Hosts(3, "") as hosts:
        launchers = []
        for number in (0, 1, 2):
            launchers.append(hosts.launch(number, command, log, 1, NNODES="2:3", PET_RDZV_CONF="last_call_timeout=1"))
            if number == 1:
                wait_for("2 rank(s) on cpu", "step 00020/")
        wait_for("3 rank(s) on cpu", "resuming from", "3 rank(s) do not divide the batch")
        first = int(re.search(r"resuming from .*step_(\d+)", log.read_text())[1])
        wait_for(f"step {first + 20:05d}/")
    assert list_steps(base_folder / "base_checkpoints" / "elastic") == [first] and first > 20
    assert log.read_text().count("resuming from") == 1
