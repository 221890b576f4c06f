"""CORE against an own computation by the plain model, one item at a time, on a bundle in the usual format made here."""
import csv
import io
import json
import os
import random
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import make_sums, run_module
from ranks import run_on_ranks

from nanochat.corpus.learn_tokenizer import learn_tokenizer
from nanochat.data.tokenizer import Tokenizer
from nanochat.eval import eval_bundle
from nanochat.eval.core_eval import core_interval, evaluate_core, load_items, load_tasks, rows_of
from nanochat.eval.eval_bundle import why_no_bundle
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig
from nanochat.optim.zero import shard_model
from nanochat.training.checkpoint import find_model, load_checkpoint
from nanochat.training.records import read_metrics

WORDS = "red blue sun moon tree a the in of cold water is not".split()
ENDS = ["red", "blue", "sun", "tree"]  # what continuations are made of, and what the model is made to say
TASKS = {  # label: (type, examples, delimiter, random baseline in percent)
    "choices": ("multiple_choice", 0, None, 30.0),  # None: not given, which means one blank
    "choices_with_examples": ("multiple_choice", 2, "\nAnswer: ", 25.0),
    "choices_with_blanks": ("multiple_choice", 0, "", 50),
    "schema": ("schema", 0, None, 50.0),
    "schema_with_examples": ("schema", 2, " ", 50.0),
    "continuations": ("language_modeling", 0, None, 0.0),
    "continuations_with_examples": ("language_modeling", 2, "\nAnswer: ", 5.0),
}
ITEMS = 45  # of each task: more than a block, and no multiple of two


def text(rng: random.Random, words: list[str], low: int, high: int) -> str:
    return " ".join(rng.choices(words, k=rng.randint(low, high)))


def make_items(kind: str, label: str) -> list[dict]:
    rng = random.Random(label)
    items = []
    for number in range(ITEMS):
        if kind == "multiple_choice":
            choices = rng.sample([text(rng, ENDS, 1, 3) + str(i) for i in range(5)], rng.randint(2, 5))  # all different
            if number % 5 == 0:  # one of two begins the other: they share all that it has
                choices = [choices[0], choices[0] + " red"][:: 1 if number % 2 else -1]
            if label == "choices_with_blanks":
                choices = [" " * rng.randint(1, 2) + choice for choice in choices]
            item = {"query": text(rng, WORDS, 2, 9), "choices": choices, "gold": rng.randrange(len(choices))}
        elif kind == "schema":
            contexts = [text(rng, WORDS, 1, 6) + str(i) for i in range(rng.randint(2, 3))]
            item = {"context_options": contexts, "continuation": text(rng, ENDS, 1, 4)}
            item["gold"] = rng.randrange(len(contexts))
        else:
            item = {"context": text(rng, WORDS, 2, 9) + " " * rng.randint(0, 2), "continuation": rng.choice(ENDS)}
        items.append(item)
    return items


def make_bundle(folder: Path) -> Path:
    entries = []
    for label, (kind, examples, delimiter, _) in TASKS.items():
        path = folder / "eval_data" / kind / f"{label}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(item) + "\n" for item in make_items(kind, label)))
        entry = {"label": label, "dataset_uri": f"{kind}/{label}.jsonl", "num_fewshot": [examples]}
        entry |= {"icl_task_type": kind} | ({} if delimiter is None else {"continuation_delimiter": delimiter})
        entries.append(entry)
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    with open(folder / "eval_meta_data.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["Eval Task", "Task Category", "Random baseline", "Description"])
        rows.writerows([label, "made, for tests", percent, "x, y"] for label, (_, _, _, percent) in TASKS.items())
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("made") / "bundle")


def make_tokenizer() -> Tokenizer:
    rng = random.Random(0)
    return learn_tokenizer([text(rng, WORDS + ENDS, 5, 20) for _ in range(200)], 256 + 9 + 40)


def make_model(tokenizer: Tokenizer, sequence_len: int = 256) -> GPT:
    """Random in every weight (c_proj starts at zero), and loud about the ends, so that it is right now and then."""
    model = GPT(GPTConfig(sequence_len, tokenizer.get_vocab_size(), n_layer=2, n_embd=32, n_head=4, n_kv_head=2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
        for word in ENDS:
            model.lm_head.weight[tokenizer.encode(f" {word}")] *= 4
    return model


# ---- The oracle: nothing of core_eval but the bundle's files


def variants(kind: str, item: dict, delimiter: str) -> list[str]:
    if kind == "multiple_choice":
        return [item["query"] + delimiter + choice for choice in item["choices"]]
    contexts = item["context_options"] if kind == "schema" else [item["context"].strip()]
    return [context + delimiter + item["continuation"] for context in contexts]


@torch.no_grad()
def centered(model: GPT, tokenizer: Tokenizer, bundle: Path, label: str) -> float:
    """(accuracy − guessing) / (1 − guessing) of a task."""
    kind, num_examples, delimiter, percent = TASKS[label]
    delimiter = " " if delimiter is None else delimiter
    items = [json.loads(line) for line in (bundle / "eval_data" / kind / f"{label}.jsonl").open()]
    random.Random(1337).shuffle(items)
    longest = model.config.sequence_len + 1

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, prepend="<|bos|>")

    def ending(tokens: list[int], count: int) -> tuple[torch.Tensor, list[int]]:
        """The last `count` tokens, and log p of all tokens there. A row that is too long loses what follows <|bos|>."""
        if len(tokens) > longest:
            tokens = tokens[:1] + tokens[1 - longest :]
        count = min(count, len(tokens) - 1)
        return model(torch.tensor([tokens[:-1]])).double().log_softmax(-1)[0, -count:], tokens[-count:]

    right = 0
    for index, item in enumerate(items):
        drawn = random.Random(1234 + index).sample(items[:index] + items[index + 1 :], num_examples)
        shots = "".join(variants(kind, example, delimiter)[example.get("gold", 0)] + "\n\n" for example in drawn)
        rows = [encode(shots + variant) for variant in variants(kind, item, delimiter)]
        if kind == "language_modeling":
            before = encode((shots + item["context"].strip() + delimiter).rstrip())
            assert rows[0][: len(before)] == before
            log_p, end = ending(rows[0], len(rows[0]) - len(before))
            right += log_p.argmax(-1).tolist() == end
            continue
        if kind == "multiple_choice":
            shared = len(os.path.commonprefix(rows))
            counts = [max(len(row) - shared, 1) for row in rows]
        else:
            counts = [len(os.path.commonprefix([row[::-1] for row in rows]))] * len(rows)
        losses = []
        for row, count in zip(rows, counts):
            log_p, end = ending(row, count)
            losses.append(-log_p[range(len(end)), end].mean().item())
        right += losses.index(min(losses)) == item["gold"]
    accuracy = right / len(items)
    assert 0 < accuracy < 0.95, f"{label} could not fail: {accuracy}"
    return (accuracy - percent / 100) / (1 - percent / 100)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def test_scores_are_those_of_the_plain_model_one_item_at_a_time(bundle, tokenizer):
    model = make_model(tokenizer)
    core = evaluate_core(model, tokenizer, load_tasks(bundle), -1, tokens_per_forward=512)
    expected = {label: centered(model, tokenizer, bundle, label) for label in TASKS}
    assert core.tasks == pytest.approx(expected, abs=1e-12)
    assert core.score == pytest.approx(sum(expected.values()) / len(TASKS), abs=1e-12) and core.name == "CORE"
    assert core.low < core.score < core.high


def test_the_interval_is_that_of_items_drawn_again():
    """Item by item, of tasks with other sizes and guesses. 5%: of 2,000 draws a percentile is off by a few."""
    correct, sizes, baselines = np.array([30, 5, 0]), np.array([100, 10, 25]), np.array([0.25, 0.5, 0.0])
    items = [np.arange(size) < right for right, size in zip(correct, sizes)]
    rng = np.random.default_rng(1)
    drawn = []
    for _ in range(2000):
        accuracies = np.array([rng.choice(task, len(task)).mean() for task in items])
        drawn.append(((accuracies - baselines) / (1 - baselines)).mean())
    low, high = core_interval(correct, sizes, baselines)
    assert high - low == pytest.approx(np.subtract(*np.percentile(drawn, [97.5, 2.5])), rel=0.05)
    assert (high + low) / 2 == pytest.approx(np.mean(drawn), abs=0.05 * (high - low))


def test_rows_that_are_too_long_lose_what_follows_bos(bundle, tokenizer):
    """With examples most rows are longer than the model's; it is asked about the end all the same."""
    tasks = [task for task in load_tasks(bundle) if task.num_fewshot]
    rows = [tokens for task in tasks for tokens, _ in rows_of(task, load_items(task), 0, tokenizer, 25)]
    assert {row[0] for row in rows} == {tokenizer.get_bos_token_id()} and max(map(len, rows)) == 25
    cut = make_model(tokenizer, sequence_len=24)
    expected = {task.label: centered(cut, tokenizer, bundle, task.label) for task in tasks}
    assert evaluate_core(cut, tokenizer, tasks, -1, 16384).tasks == pytest.approx(expected, abs=1e-12)


def core_on_a_rank(rank: int, world_size: int, bundle: Path, stage: int) -> tuple:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    if stage >= 0:
        shard_model(model, model.units(), torch.device("cpu"), torch.float32, stage)
    tasks = load_tasks(bundle)[::-1]  # first one that does not call the model as a whole: on stage 3 it begins with it
    return evaluate_core(model, tokenizer, tasks, -1, tokens_per_forward=300)


@pytest.mark.parametrize("world_size,stage", [(3, -1), (2, 3)], ids=["3 ranks", "2 ranks, ZeRO 3"])
def test_any_number_of_ranks_gives_the_same(bundle, world_size, stage):
    """45 items in blocks of 32: some ranks have fewer forward passes, or none, which on stage 3 would never end."""
    alone = core_on_a_rank(0, 1, bundle, -1)
    assert run_on_ranks(world_size, core_on_a_rank, bundle, stage) == [alone] * world_size


# ---- Download


def zipped(bundle: Path) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path in sorted(bundle.rglob("*")):
            archive.write(path, f"eval_bundle/{path.relative_to(bundle)}")
    return out.getvalue()


@pytest.fixture
def served(tmp_path, monkeypatch) -> Path:
    """The file that is downloaded: urllib opens file:// addresses like others."""
    path = tmp_path / "bundle.zip"
    monkeypatch.setattr(eval_bundle, "URL", path.as_uri())
    return path


def test_the_bundle_is_downloaded_once_and_whole(served, bundle, base_folder):
    """After half a zip, which is refused in one line and leaves nothing."""
    whole = zipped(bundle)
    served.write_bytes(whole[: len(whole) // 2])
    assert "not a zip file" in why_no_bundle() and not any(base_folder.iterdir())
    served.write_bytes(whole)
    assert why_no_bundle() is None
    for path in bundle.rglob("*.*"):
        assert (base_folder / "eval_bundle" / path.relative_to(bundle)).read_bytes() == path.read_bytes()
    served.unlink()
    assert why_no_bundle() is None, "a second download would have failed"


# ---- The scripts


def test_base_eval_measures_core(bundle, base_folder):
    """Under a name that says how many items it is of. Validation has the same rows as in training."""
    def run(script: str, *arguments: str):
        no_network = {"HTTPS_PROXY": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
        return run_module(f"scripts.{script}", "--eval_tokens=64", *arguments, env=no_network)

    make_sums(base_folder, 100, vocab_size=300)
    tiny = ("--data=sums --depth=1 --max_seq_len=32 --device_batch_size=2 --total_batch_size=64 --compile=False "
            "--dtype=float32 --sample_every=-1 --eval_every=3 --seed=5 --num_iterations=3").split()
    shutil.copytree(bundle, base_folder / "eval_bundle")
    trained = run("base_train", *tiny)
    assert trained.returncode == 0, trained.stderr
    records, name = read_metrics(base_folder / "base_checkpoints/d1/metrics.jsonl"), "CORE (up to 10 items a task)"
    evaluated = run("base_eval", "--core_metric_max_per_task=10")
    assert evaluated.returncode == 0, evaluated.stderr
    results = json.loads((base_folder / "report/sections/sums/d1/base_eval.json").read_text())["results"]
    model, tokenizer, _ = load_checkpoint(find_model("base"), torch.device("cpu"))
    core = evaluate_core(model, tokenizer, load_tasks(bundle), 10, 64)
    assert results[name] == pytest.approx(core.score, abs=1e-6)
    assert {f"{name}: {label}" for label in TASKS} < results.keys()
    last = [record["val/bpb"] for record in records if "val/bpb" in record][-1]
    assert results["validation bits per byte"] == pytest.approx(last, rel=1e-6)
