"""Several hosts: namespaces of Linux, made by hosts.py where that is possible."""
import json
import re
import time

import pytest
from conftest import REPO, losses, make_sums
from hosts import Hosts, why_not
from ranks import run_on_ranks
from test_many_ranks import TINY, arguments, difference, script

from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.memory import counted
from nanochat.training.checkpoint import list_steps

# At a forward pass the sums of the step before are at their ends, and those of this one wait for this rank's gradients.
RECORDED = """
import json, os, sys, types
from pathlib import Path
import torch
from hosts import sent_by_host
from nanochat.model.gpt import GPT
from nanochat.runtime import distributed
distributed.os = types.SimpleNamespace(**vars(os) | {"_exit": sys.exit})    # this process has more to do
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
    Two ranks on each of two hosts, whose link has 100 Mbit/s: the losses of one rank. With shard_size=2 the sums of the
    shards cross the link once per step of two micro-steps, 4 bytes per parameter, and hardly anything else.
    """
    vocabulary = make_sums(base_folder).get_vocab_size()  # fewer than 400: the texts have no more pairs
    settings = dict(num_iterations=6, device_type="cpu", arch="classic", depth=2, device_batch_size=2)
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
    assert "2 ranks on host0, 2 ranks on host1\n" in printed[0] and not any(printed[1:])
    assert difference(losses("one"), losses("two")) < 1e-4
    config = config_from_depth(2, vocabulary, TINY["max_seq_len"], arch="classic")
    expected = 4 * sum(counted(config).units)
    for of_rank in sent:
        assert 1 < (of_rank[10] - of_rank[2]) / 4 / expected < 1.02  # headers are 0.8%


@pytest.mark.skipif(bool(why_not()), reason=f"no hosts: {why_not()}")
def test_a_third_host_joins_two(base_folder, tmp_path):
    """
    Of an elastic run: the three go on from the two's checkpoint, though four micro-batches do not divide among them.
    Neither torchrun of the two takes the end of its ranks for the end of the run.
    """
    make_sums(base_folder)
    settings = {"num_iterations": 10**6, "device_type": "cpu", "resume": "auto"}
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
