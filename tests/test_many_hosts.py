"""Ranks that fall silent, and hosts: namespaces of Linux, made by bench/network.py where that is possible."""
import json
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPO, make_sums
from ranks import run_on_ranks
from test_many_ranks import TINY, arguments, difference, losses, rows_by_step, script

from bench.network import Hosts, why_not
from nanochat.gpt_config import config_from_depth
from nanochat.plan.memory import parameter_counts

SILENT = """
import ctypes, faulthandler, os, signal, subprocess, sys, threading, time
from pathlib import Path
from nanochat import heartbeat
if sys.argv[1] == "stops after a save":
    from nanochat import saving
class Guard(subprocess.Popen):
    def __init__(self, *command, **settings):
        super().__init__(*command, **settings)
        Guard.last = self
subprocess.Popen = Guard
heartbeat.BEAT, heartbeat.PATIENCE = 0.1, 10
faulthandler.enable()
ending = threading.Event()
heartbeat.start("rank 3 on host1", ["rank 3 on host1"], ending)
print("ready", flush=True)
def keeps_the_lock(seconds=60):
    ctypes.PyDLL(None).sleep(seconds)
def loses_its_guard():
    Guard.last.kill()
    time.sleep(2)
def stops_after_a_save():
    saving.save_file = lambda *_: keeps_the_lock(2)
    saving.sync = saving.sha256 = Path.chmod = lambda *_: ""
    saving.write_files(Path("."), {"file": ({}, {})})
    os.kill(os.getpid(), signal.SIGSTOP)
def ends_slowly():
    ending.set()
    time.sleep(2)
    assert Guard.last.returncode == 0
{"stops": lambda: os.kill(os.getpid(), signal.SIGSTOP), "keeps the lock": keeps_the_lock,
 "lives": lambda: time.sleep(2), "loses its guard": loses_its_guard, "ends slowly": ends_slowly,
 "stops after a save": stops_after_a_save}[sys.argv[1]]()
"""


@pytest.mark.parametrize("what, status, shown", [
    ("stops", -signal.SIGKILL, ""), ("keeps the lock", -signal.SIGABRT, "in keeps_the_lock"), ("lives", 0, None),
    ("loses its guard", 0, None), ("ends slowly", 0, None),
    ("stops after a save", -signal.SIGKILL, "")])
def test_a_silent_rank_is_named_and_ended(what, status, shown):
    """
    By the process beside it, unless it writes a checkpoint, here as older safetensors do; where a thread keeps the
    interpreter's lock, its line is shown.
    """
    done = subprocess.run([sys.executable, "-c", SILENT, what], cwd=REPO, text=True, capture_output=True, timeout=60)
    assert done.returncode == status, done.stderr
    if shown is None:
        assert done.stderr == ""
    else:
        assert done.stderr.startswith("rank 3 on host1: silent for 1 s: its process was stopped")
        assert shown in done.stderr


CUT_OFF = """
import sys, threading, time
from nanochat import heartbeat
heartbeat.BEAT, heartbeat.PATIENCE = 0.05, 10
class Store(dict):
    set = dict.__setitem__
    def multi_get(self, keys):
        if sys.argv[1] == "no answer":
            time.sleep(60)
        return [self.setdefault(key, "0") for key in keys]
node = 1 if sys.argv[1] == "no answer" else 0
heartbeat.start(f"rank {node}", ["rank 0 on a", "rank 1 on b"], threading.Event(), node, Store())
time.sleep(60)
"""


@pytest.mark.parametrize("what, said", [
    ("no beat", "rank 1 on b: silent for 0 s, cut off or stopped; this rank ends, too\n"),
    ("no answer", "rank 1: silent for 0 s: rank 0 on a does not answer; it is ended now\n")])
def test_a_host_that_is_cut_off_is_named_on_both_sides(what, said):
    """Rank 0 misses the other host's count; there the store does not answer."""
    done = subprocess.run([sys.executable, "-c", CUT_OFF, what], cwd=REPO, text=True, capture_output=True, timeout=50)
    assert done.returncode != 0 and done.stderr == said


ENDS = """
import contextlib, threading, time
from datetime import timedelta
from torch.distributed import TCPStore
from nanochat import heartbeat
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
class Slow:
    set = store.set
    def multi_get(self, keys):
        with contextlib.suppress(Exception):
            store.wait(["never set"], timedelta(seconds=0.4))   # native code, where the end finds the thread
        return [b""] * len(keys)
heartbeat.BEAT, heartbeat.PATIENCE = 0.01, 1000
heartbeat.start("rank 0", ["rank 0 on a", "rank 1 on b"], threading.Event(), 0, Slow())
time.sleep(0.6)
"""


def test_a_rank_that_asks_the_store_ends_well():
    """Its thread may be in the store's native code; ended there, C++ would abort the process after a finished run."""
    done = subprocess.run([sys.executable, "-c", ENDS], cwd=REPO, text=True, capture_output=True, timeout=50)
    assert done.returncode == 0, done.stderr


# At a forward pass the sums of the step before are at their ends, and those of this one wait for this rank's gradients.
RECORDED = """
import json, os, sys
from pathlib import Path
import torch
from bench.network import sent_by_host
from nanochat.gpt import GPT
from test_many_ranks import script
rank, sent, forward = int(os.environ["RANK"]), [], GPT.forward
def counted(*args, **settings):
    if torch.is_grad_enabled():
        sent.append(sent_by_host())
    return forward(*args, **settings)
GPT.forward = counted
printed, rows = script(rank, int(os.environ["WORLD_SIZE"]), sys.argv[1:], "")
Path(os.environ["RECORDS"], f"{rank}.json").write_text(json.dumps([printed, rows, sent]))
"""


@pytest.mark.skipif(bool(why_not()), reason=f"no hosts: {why_not()}")
def test_two_hosts_are_one(base_folder, tmp_path):
    """
    Two ranks on each of two hosts, whose link has 100 Mbit/s: the rows and losses of one rank. With shard_size=2 the
    sums of the shards cross the link once per step, 4 bytes per parameter, and hardly anything else.
    """
    vocabulary = make_sums(base_folder).get_vocab_size()  # fewer than 400: the texts have no more pairs
    settings = dict(num_iterations=6, device_type="cpu", arch="classic", depth=2)
    (_, rows), = run_on_ranks(1, script, arguments("one", settings), "")
    (tmp_path / "recorded.py").write_text(RECORDED)
    environment = {"PYTHONPATH": f"{tmp_path}:{REPO / 'tests'}:{REPO}", "RECORDS": str(tmp_path)}
    log, command = tmp_path / "log", ["recorded", *arguments("two", settings | {"shard_size": 2})]
    with Hosts(2, "100mbit") as hosts:
        launchers = [hosts.launch(number, command, log, ranks=2, **environment) for number in (0, 1)]
        deadline = time.monotonic() + 200
        while any(launcher.poll() is None for launcher in launchers):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
    assert [launcher.returncode for launcher in launchers] == [0, 0], log.read_text()
    printed, recorded, sent = zip(*(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)))
    assert "ranks 0 to 1 on host0, ranks 2 to 3 on host1\n" in printed[0] and not any(printed[1:])
    recorded = [[[tuple(row) for row in part] for part in rank] for rank in recorded]
    assert rows_by_step(recorded, 6) == rows_by_step([rows], 6)
    assert difference(losses(base_folder, "one"), losses(base_folder, "two")) < 1e-4
    expected = 4 * sum(parameter_counts(config_from_depth(2, vocabulary, TINY["max_seq_len"], arch="classic")))
    for of_rank in sent:
        assert 1 < (of_rank[5] - of_rank[1]) / 4 / expected < 1.02  # headers are 0.8%
