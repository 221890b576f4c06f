"""Bits per byte, exact answers and the log, against their definitions."""
import itertools
import json
import math

import numpy as np
import pytest
import torch

from nanochat.corpus.learn_tokenizer import learn_tokenizer
from nanochat.optimizers import setup_optimizers
from nanochat.compiling import set_compile
from nanochat.distributed import compute_dtype, compute_init
from nanochat.errors import UserError
from nanochat.flops import Peak, measured_matmul_flops, peak_flops
from nanochat.gpt import GPT, GPTConfig
from nanochat.loss_eval import document_nats, evaluate_bpb, greedy_completes, sample
from nanochat.corpus.tinyworld import entropy_floor
from nanochat.corpus.make_dataset import make
from nanochat.metrics import Metrics, read_metrics
from nanochat.corpus.tinyworld import document
from nanochat.zero import Sharding, StepStats

set_compile(False, "cpu")
TOKENIZER = learn_tokenizer(["the cat sat on the mat, and 日本語 too"] * 3, 290)
TEXTS = ["the cat sat", "日本語 on the mat", "a", "é" * 9, "the mat, and the cat, and the mat"]


@pytest.fixture(scope="module")
def model():
    model = GPT(GPTConfig(sequence_len=24, vocab_size=TOKENIZER.get_vocab_size(), n_layer=2, n_embd=32, n_head=2, n_kv_head=2))
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.normal_(0, 0.4, generator=generator)
    return model.eval()


def nats_one_by_one(model, ids):
    """The sum over text tokens of −log p, each from a forward pass of its own."""
    total = 0.0
    for i in range(1, len(ids)):
        if ids[i] < TOKENIZER.get_vocab_size() - 9:
            total -= model(torch.tensor([ids[:i]]))[0, -1].double().log_softmax(-1)[ids[i]].item()
    return total


def test_document_nats_and_bytes_are_those_of_each_document_alone(model):
    """Batches, padding and order change nothing; multi-byte characters split over tokens count their true bytes."""
    bos = TOKENIZER.get_bos_token_id()
    documents = [[bos, *TOKENIZER.encode(text)][:25] for text in TEXTS]
    for batch_size in (1, 2, 5):
        results = document_nats(model, documents, TOKENIZER.token_bytes(), batch_size)
        for ids, (nats, count) in zip(documents, results):
            assert count == len(TOKENIZER.decode_bytes(ids[1:])) and nats == pytest.approx(nats_one_by_one(model, ids), rel=1e-4)


def test_bits_per_byte_is_nats_over_bytes_without_special_tokens(model):
    bos = TOKENIZER.get_bos_token_id()
    rows = [[bos, *TOKENIZER.encode("the cat"), bos, *TOKENIZER.encode("日本")][:10] for _ in range(2)]
    tokens = torch.tensor(rows)
    batch = tokens[:, :-1], tokens[:, 1:]
    nats, count = sum(nats_one_by_one(model, row) for row in rows), sum(len(TOKENIZER.decode_bytes([t for t in row[1:] if t != bos])) for row in rows)
    endless = itertools.repeat((*batch, {}))  # a validation loader never ends; the evaluation must
    assert evaluate_bpb(model, endless, 3, TOKENIZER.token_bytes()) == pytest.approx(nats / math.log(2) / count, rel=1e-4)
    with pytest.raises(UserError, match="zero bytes"):
        evaluate_bpb(model, endless, 1, np.zeros_like(TOKENIZER.token_bytes()))


def test_greedy_completes_agrees_with_decoding():
    """A model that has learnt one sentence by heart; right and wrong completions of different lengths in one batch."""
    model = GPT(GPTConfig(sequence_len=24, vocab_size=TOKENIZER.get_vocab_size(), n_layer=1, n_embd=32, n_head=1, n_kv_head=1))
    model.init_weights(0)
    sharding = Sharding(model, model.units(), torch.device("cpu"), torch.float32, stage=0)
    optimizers = setup_optimizers(model, sharding)
    tokens = torch.tensor([TOKENIZER.encode("the cat sat on the mat, and 日本語 too", prepend="<|bos|>")])
    for _ in range(60):
        with sharding.accumulate(last=True):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        stats = sharding.reduce_and_clip(loss)
        for optimizer in optimizers:
            optimizer.step(stats)
        sharding.all_gather_params()
    assert sample(model, TOKENIZER, "the cat", 12).startswith(" sat on the mat, and")
    pairs = [("the cat", " sat on the mat,"), ("the cat", " sat on the cat"), ("the", " cat"), ("the cat sat on", " too"), ("the cat sat on", " the mat, and 日本語")]
    assert greedy_completes(model, TOKENIZER, pairs, batch_size=3) == [True, False, True, False, True]


def test_the_floor_is_known_for_the_embedded_world_alone(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for i in range(50):
        (tmp_path / "texts" / f"{i}.txt").write_text(document(0, i))
    make(str(tmp_path / "texts"), "copied")
    assert entropy_floor("copied") is None


def stats(loss: float, ok: bool = True, stops: int = 0) -> StepStats:
    return StepStats(torch.tensor(float(ok)), torch.tensor([loss if ok else float("nan"), 0.5, ok, stops, 0]))


def test_steps_without_a_finite_loss_are_counted_and_do_not_reach_the_smoothed_loss(tmp_path, capsys):
    metrics = Metrics(tmp_path, "", {}, 0, 9, 1000, flops_per_token=10, peak=Peak(1e6, "datasheet", None))
    for step, (ok, stops) in enumerate(((True, 0), (False, 0), (False, 0), (True, 0), (False, 1))):
        metrics.log_step(step, stats(2.0, ok, stops), 1.0)
        assert metrics.bad_in_a_row == (0, 1, 2, 0, 1)[step] and metrics.stop_requested == (step == 4)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record.get("train/skipped") for record in records] == [None, 1, 2, None, 3]
    assert [record.get("train/loss") for record in records] == [2.0, None, None, 2.0, None]
    said = capsys.readouterr().out
    assert said.count("loss 2.0000") == 5 and "nan" not in said and "step 00004: skipped on every rank" in said


def test_the_log_is_complete_and_later_records_win(tmp_path, capsys):
    metrics = Metrics(tmp_path, "", {}, 0, 4, 1000, flops_per_token=10, peak=Peak(1e6, "datasheet", None))
    for step, loss in enumerate((4.0, 2.0)):
        metrics.log_step(step, stats(loss), 1.0)
    metrics.pause()
    metrics.log_validation(2, 1.5)
    path = tmp_path / "metrics.jsonl"
    with open(path, "a") as file:
        file.write('{"step": 2, "train/lo')  # killed while writing
    metrics = Metrics(tmp_path, "", {}, 1, 4, 1000, 10, Peak(1e6, "datasheet", None), state=metrics.state)
    for step, loss in ((1, 3.0), (2, 1.0)):
        metrics.log_step(step, stats(loss), 0.5)
    metrics.close()
    records = read_metrics(path)
    assert [(r["step"], r.get("train/loss"), r.get("val/bpb")) for r in records] == [
        (0, 4.0, None), (1, 3.0, None), (2, 1.0, None)
    ], "what a killed run wrote beyond its checkpoint is gone"
    for record in records[:3]:
        assert record["train/tok_per_sec"] == pytest.approx(1000 / record["train/dt"])
        assert record["train/mfu"] == pytest.approx(1000 * 10 / record["train/dt"] / 1e6)
    ema, weights = 0.0, 0.0
    for loss in (4.0, 2.0, 3.0, 1.0):
        ema, weights = 0.9 * ema + 0.1 * loss, 0.9 * weights + 0.1
    assert f"step 00002/00004 ( 75.0%) | loss {ema / weights:.4f} | lrm 0.50" in capsys.readouterr().out
    assert metrics.state["min_val_bpb"] == 1.5


def test_mfu_says_what_it_is_a_share_of(monkeypatch):
    peak = peak_flops(torch.device("cpu"), torch.float32)
    assert 1e9 < peak.flops < 1e14 and peak.source.startswith("measured float32 matmul") and peak.measure
    for name, expected in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA GeForce RTX 4090", 165.2e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda"), torch.bfloat16) == (expected, f"{name} datasheet", None)


def test_mfu_on_a_cpu_is_at_most_what_it_says(tmp_path, monkeypatch, capsys):
    """
    The rate at the start was measured beside another process, as a millionth of what it is: the run's own rate is the
    reference then, until a pause in which it is measured again. A slower measurement later changes nothing.
    """
    cpu, rates = torch.device("cpu"), []

    def measure() -> float:
        rates.append(measured_matmul_flops(cpu, torch.float32, size=128) if not rates else 1.0)
        return rates[-1]

    metrics = Metrics(tmp_path, "", {}, 0, 4, total_batch_size=1000, flops_per_token=1, peak=Peak(1.0, "measured", measure))
    for step in range(2):
        metrics.log_step(step, stats(2.0), 1.0)
    metrics.pause()
    assert not rates, "too soon"
    monkeypatch.setattr("nanochat.metrics.MEASURE_EVERY", 0)
    for step in range(2, 4):
        metrics.resume()
        metrics.pause()
        metrics.log_step(step, stats(2.0), 1.0)
    metrics.close()
    shares = [record["train/mfu_at_most"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    speeds = [record["train/tok_per_sec"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert shares[:2] == [1.0, speeds[1] / max(speeds[:2])] and len(rates) == 2 and rates[0] > max(speeds)
    assert shares[2:] == pytest.approx([speed / rates[0] for speed in speeds[2:]])
    assert "| mfu at most 100.0% |" in capsys.readouterr().out


def test_auto_dtype_follows_the_hardware(monkeypatch):
    cpu = torch.device("cpu")
    bf16 = {"avx512_bf16": True}
    for capabilities, used, expected in (({}, "AVX512", torch.float32), (bf16, "AVX512", torch.bfloat16), ({"amx_bf16": True}, "AVX512", torch.bfloat16),
                                         (bf16, "AVX2", torch.float32)):  # the last: limited by ATEN_CPU_CAPABILITY
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda c=capabilities: c)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=used: c)
        assert compute_dtype("auto", cpu) == expected
        assert compute_dtype("float32", cpu) == torch.float32
    assert compute_init("cpu")[:4] == (False, 0, 0, 1)
    with pytest.raises(UserError, match="device_type=gpu is unknown"):
        compute_init("gpu")


def test_metrics_file_is_one_json_object_per_line(tmp_path):
    metrics = Metrics(tmp_path, "", {}, 0, 1, 8, 1, Peak(1.0, "datasheet", None))
    metrics.log_step(0, stats(1.0), 1.0)
    metrics.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line).keys() == {"step", "train/loss", "train/grad_norm", "train/lrm", "train/dt", "train/tok_per_sec", "train/mfu"}
