"""Bits per byte, exact answers and the log, against their definitions."""
import itertools
import math

import pytest
import torch
from test_engine import draw_weights

from nanochat.corpus.learn_tokenizer import learn_tokenizer
from nanochat.eval.loss_eval import evaluate_bpb
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig
from nanochat.runtime.compiling import set_compile
from nanochat.runtime.devices import compute_dtype
from nanochat.training.metrics import Metrics
from nanochat.training.records import read_metrics

set_compile(False, "cpu")
TOKENIZER = learn_tokenizer(["the cat sat on the mat, and 日本語 too"] * 3, 290)
V, BOS = TOKENIZER.get_vocab_size(), TOKENIZER.get_bos_token_id()
CONFIG = GPTConfig(sequence_len=24, vocab_size=V, n_layer=2, n_embd=32, n_head=2, n_kv_head=2)
CPU = torch.device("cpu")


def nats_one_by_one(model, ids):
    """The sum over text tokens of −log p, each from a forward pass of its own."""
    total = 0.0
    for i in range(1, len(ids)):
        if ids[i] < V - 9:
            total -= model(torch.tensor([ids[:i]]))[0, -1].double().log_softmax(-1)[ids[i]].item()
    return total


def test_bits_per_byte_is_nats_over_bytes_without_special_tokens():
    model = draw_weights(GPT(CONFIG))
    row = [BOS, *TOKENIZER.encode("the cat"), BOS, *TOKENIZER.encode("日本")][:10]
    tokens = torch.tensor([row, row])
    size = len(TOKENIZER.decode_bytes([token for token in row[1:] if token != BOS]))
    endless = itertools.repeat((tokens[:, :-1], tokens[:, 1:], None, {}))  # as a validation loader; this must end
    expected = nats_one_by_one(model, row) / math.log(2) / size
    assert evaluate_bpb(model, endless, 3, TOKENIZER.token_bytes()) == pytest.approx(expected, rel=1e-4)


def stats(loss: float, ok: bool = True, stops: int = 0) -> torch.Tensor:
    return torch.tensor([loss if ok else float("nan"), 0.5, float(ok), float(stops), 0.0])  # no rank asks for a save


def new_metrics(folder, start_step=0) -> Metrics:
    """Of a run of four steps."""
    metrics = Metrics(folder, {"run": ""}, start_step, 4, total_batch_size=1000, flops_per_token=10, peak_flops=1e9)
    metrics.begin_file()  # a Session does after the first step
    return metrics


def test_skipped_steps_are_counted_and_have_no_loss(tmp_path):
    metrics = new_metrics(tmp_path)
    for step, (ok, stops, bad_steps) in enumerate([(True, 0, 0), (False, 0, 1), (False, 0, 2), (True, 0, 0),
                                                   (False, 1, 1)]):
        metrics.log_step(step, stats(2.0, ok, stops), 1.0)
        assert (metrics.bad_steps, metrics.stop_requested) == (bad_steps, stops)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record.get("train/skipped") for record in records] == [None, 1, 2, None, 3]
    assert [record.get("train/loss") for record in records] == [2.0, None, None, 2.0, None]


def test_a_damaged_log_costs_only_its_damaged_lines(tmp_path):
    """A byte that is no UTF-8, JSON that is no record, and half a line: a run goes on, and its log is clean."""
    path = tmp_path / "metrics.jsonl"
    good = [f'{{"step": {step}, "train/loss": {step}.5}}'.encode() for step in range(3)]
    bad = b"\xff\xfe", b"7", b"[1]", b'{"a": 1}', b'{"step": \xff1}'
    path.write_bytes(b"\n".join([good[0], *bad, good[1], good[2][:9]]))
    assert [record["train/loss"] for record in read_metrics(path)] == [0.5, 1.5]
    new_metrics(tmp_path, start_step=1)
    assert path.read_bytes() == good[0] + b"\n"


def test_smoothed_loss(tmp_path, capsys):
    """Exponential weights, divided by their sum; a step without a loss changes nothing."""
    metrics, smoothed, weights = new_metrics(tmp_path), 0.0, 0.0
    for step, loss in enumerate((4.0, 2.0, None, 1.0)):
        metrics.log_step(step, stats(loss or 0, loss is not None), 1.0)
        if loss:
            smoothed, weights = 0.9 * smoothed + 0.1 * loss, 0.9 * weights + 0.1
        assert f"smoothed loss {smoothed / weights:.4f} " in capsys.readouterr().out


def test_auto_dtype_follows_the_hardware(monkeypatch):
    for capability, used, expected in (
        ("none", "AVX512", torch.float32), ("avx512_bf16", "AVX512", torch.bfloat16),
        ("amx_bf16", "AVX512", torch.bfloat16),
        ("avx512_bf16", "AVX2", torch.float32),  # limited by ATEN_CPU_CAPABILITY
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=capability: {name: True})
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=used: name)
        assert compute_dtype("auto", CPU) == expected
