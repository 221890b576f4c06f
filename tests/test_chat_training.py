"""Mid-training, fine-tuning and RL as people run them: whole scripts, two ranks, real kills, bad input."""
import contextlib
import io
import json
import math
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import torch
from conftest import make_sums, run_module
from ranks import run_as_main, run_on_ranks
from safetensors.torch import load_file
from warm_python import Job

from nanochat.data.conversation_loader import epoch_order
from nanochat.eval.task_eval import seed_with
from nanochat.inference import engine
from nanochat.inference.logprobs import TokenLogprob, token_logprobs
from nanochat.inference.sampling import SamplingParams
from nanochat.tasks import make_task
from nanochat.tasks.arithmetic import Arithmetic
from nanochat.training.checkpoint import find_model, load_checkpoint
from nanochat.training.records import read_metrics, unfinished
from nanochat.training.rollouts import sample_rollouts

COMMON = {"compile": False, "dtype": "float32", "device_type": "cpu", "device_batch_size": 2, "model_tag": "tiny"}
STAGES = {  # what each stage is run with; every one has several micro-steps on each of two ranks, RL mostly
    "mid": ("scripts.mid_train", {"tasks": "json:{chats}", "total_batch_size": 1024, "eval_every": 4,
                                  "eval_tokens": 256, "zero_stage": 2}),
    "sft": ("scripts.chat_sft", {"tasks": "json:{chats}, arithmetic:easy[:20]", "target_examples_per_step": 7,
                                 "eval_every": 4, "zero_stage": 3}),
    "rl": ("scripts.chat_rl", {"task": "arithmetic:easy[:40]", "examples_per_step": 3, "num_samples": 3,
                               "max_new_tokens": 6, "eval_every": 4, "eval_examples": 3, "eval_samples": 2,
                               "zero_stage": 2}),
}


def run_script(rank: int, world_size: int, module: str, args: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):  # an early end is no error
        run_as_main(module, args)
    return printed.getvalue()


def reward_lengths() -> None:
    """Rewards that a model which can do nothing gets, too: for about half of its answers."""
    def evaluate(self, conversation: dict, answer: str) -> bool:
        return len(answer) % 2 == 0

    Arithmetic.evaluate = evaluate


def arguments(settings: dict) -> list[str]:
    return [f"--{key}={value}" for key, value in (COMMON | settings).items()]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base folder with a base model hardly trained and conversations, made once; each test copies it."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(folder))
        make_sums(folder, 200, "What is {i} plus {i}? The answer is {twice}. " * 3, vocab_size=350)
        base_run = {"data": "sums", "depth": 1, "max_seq_len": 128, "total_batch_size": 512, "num_iterations": 2,
                    "eval_every": -1, "sample_every": -1}
        run_on_ranks(1, run_script, "scripts.base_train", arguments(base_run))
        with open(folder / "chats.jsonl", "w") as file:
            for i in range(150):
                turns = [{"role": role, "content": f"{role} says {i} " * (1 + i % 4)} for role in ("user", "assistant")]
                file.write(json.dumps({"messages": turns * (1 + i % 2)}) + "\n")
    return folder


@pytest.fixture
def base(made, base_folder):
    shutil.copytree(made, base_folder)
    return base_folder


def stage_arguments(base: Path, stage: str, **settings) -> tuple[str, list[str]]:
    module, own = STAGES[stage]
    chats = base / "chats.jsonl"
    own = {key: value.format(chats=chats) if isinstance(value, str) else value for key, value in own.items()}
    return module, arguments(own | {"num_iterations": 10, "save_every": 2} | settings)


@pytest.mark.parametrize("stage", ["mid", "sft", "rl"])
def test_a_stage_killed_on_two_ranks_resumes_exactly(base, tmp_path, monkeypatch, stage):
    """
    SIGKILL of one rank in mid-step under torchrun --max-restarts: weights, masters, moments and the log end as those of
    a run that nobody disturbed.
    """
    monkeypatch.setenv("CHANGE", f"{__name__}.{reward_lengths.__name__}")
    module, args = stage_arguments(base, stage, **({} if stage == "mid" else {"source": "base"}))
    run_on_ranks(2, run_script, module, args)
    folder, undisturbed = base / f"{stage}_checkpoints" / "tiny", tmp_path / "undisturbed"
    shutil.move(folder, undisturbed)
    job = Job(tmp_path / "log", module, args, ("--max-restarts=1",), kill=("1", folder / "step_000004"))
    assert job.end() == 0, job.text()
    for file in (undisturbed / "step_000010").glob("*.safetensors"):
        expected, got = load_file(file), load_file(folder / "step_000010" / file.name)
        assert expected.keys() == got.keys()
        assert [name for name, t in expected.items() if not torch.equal(t, got[name])] == []
    timing = ("time", "train/dt", "train/tok_per_sec", "train/mfu")
    logs = [[{k: v for k, v in record.items() if k not in timing} for record in read_metrics(path / "metrics.jsonl")]
            for path in (undisturbed, folder)]
    assert logs[0] == logs[1]
    norms = [record["train/grad_norm"] for record in logs[0] if "train/grad_norm" in record]
    assert sum(norm > 0.001 for norm in norms) > 5, norms
    if stage == "rl":  # the rate falls to zero in ten steps, and goes with the root of the part that is trained on
        rates = {record["step"]: record["train/lrm"] for record in logs[0] if "train/lrm" in record}
        parts = {record["step"]: record["rl/trained_on"] for record in logs[0] if "rl/trained_on" in record}
        assert rates == pytest.approx({step: (1 - step / 10) * part**0.5 for step, part in parts.items()})
        assert len(set(parts.values())) > 2


def test_mid_training_is_one_pass_on_any_number_of_ranks(base):
    """As many steps as the rows fill; the learning rate only falls."""
    module, args = stage_arguments(base, "mid", num_iterations=-1, overwrite=True, eval_every=-1, save_every=-1,
                                   warmdown_ratio=0.8)
    seen = []
    for world_size in (1, 2):
        printed = run_on_ranks(world_size, run_script, module, args)[0]
        records = read_metrics(base / "mid_checkpoints" / "tiny" / "metrics.jsonl")
        rates = [record["train/lrm"] for record in records]
        assert rates == sorted(rates, reverse=True) and rates[0] == 1 and 0 < rates[-1] < 0.2
        assert f"{len(rates)} steps of 8 rows" in printed
        seen.append([record["train/loss"] for record in records])
    assert seen[0] == pytest.approx(seen[1], abs=1e-4)


def learn_own(base: Path, **settings) -> tuple[str, list[dict]]:
    """What fine-tuning on six conversations of one's own prints, and its log; with the defaults as far as possible."""
    with open(base / "mine.jsonl", "w") as file:
        for i in range(6):
            turns = {"user": f"Who lives at number {i}?", "assistant": f"Person {chr(97 + i)} does."}
            messages = [{"role": role, "content": content} for role, content in turns.items()]
            file.write(json.dumps({"messages": messages}) + "\n")
    quiet = {"eval_every": -1, "overwrite": True, "tasks": f"json:{base / 'mine.jsonl'}:all"}
    printed = run_on_ranks(1, run_script, "scripts.chat_sft", arguments(quiet | settings))[0]
    records = read_metrics(base / "sft_checkpoints" / "tiny" / "metrics.jsonl")
    return printed, [record for record in records if "train/loss" in record]


def test_few_conversations_are_learned_with_the_defaults(base):
    """Seven tokens of eight are the same in all answers: a model that has learned nothing before gets those right."""
    printed, records = learn_own(base, source="base")
    assert "each 500 x, beginning with 0.3 of the learning rates" in printed and len(records) == 94
    assert records[0]["train/loss"] > 5 and records[-1]["train/loss"] < 1


def test_replay(base):
    """As many of the old tasks' conversations as of these; nobody has to name them."""
    run_on_ranks(1, run_script, *stage_arguments(base, "mid", tasks="arithmetic:easy[:400]", num_iterations=1))
    printed, _ = learn_own(base, num_epochs=2, num_iterations=1)
    assert "training: 6 conversations" in printed and "earlier tasks (arithmetic:easy[:400]) is repeated" in printed
    printed, _ = learn_own(base, num_epochs=2, num_iterations=1, replay=1.5)
    assert "training on both: 30 conversations" in printed  # 2 · 6 · 2.5


def test_a_stage_resumes_only_from_the_model_it_began_with(base):
    """A newer checkpoint of the stage before is an error, unless the step is given, or all of them are gone."""
    models, chats = base / "base_checkpoints", f"json:{base / 'chats.jsonl'}"
    shutil.copytree(models / "tiny" / "step_000002", models / "other" / "step_000002")

    def run(**settings):
        module, args = stage_arguments(base, "sft", source="base", model_tag="other", tasks=chats, resume="auto",
                                       save_every=1, eval_every=-1, **settings)
        return run_module(module, *args)

    assert run(num_iterations=1).returncode == 0
    shutil.copytree(models / "other" / "step_000002", models / "other" / "step_000003")
    refused = run(num_iterations=2)
    assert refused.returncode == 1 and "step_000003" in refused.stderr and "step_000002" in refused.stderr
    assert "resuming from" in run(num_iterations=2, source_step=2).stdout
    shutil.rmtree(models / "other")
    assert "resuming from" in run(num_iterations=3).stdout


def rl_step(rank: int, world_size: int, args: list[str]) -> None:
    """With an engine whose log-probabilities are wrong by 0.25."""
    def shifted(*args) -> list[TokenLogprob]:
        return [token._replace(logprob=token.logprob - 0.25) for token in token_logprobs(*args)]

    reward_lengths()
    engine.token_logprobs = shifted
    run_script(rank, world_size, "scripts.chat_rl", args)


@pytest.mark.parametrize("world_size,device_batch_size,stage,problems", [
    (1, 4, 0, 5), (2, 1, 3, 5), (3, 64, 2, 5),
    (2, 4, 3, 1),  # nothing to train on
])
def test_rl_step_is_the_policy_gradient(
    base, monkeypatch, world_size, device_batch_size, stage, problems
):
    """
    Loss and gradient are those of -sum of (reward - mean reward of the problem) * log p / sampled tokens, written here
    in float64 over every sample; the model itself only sees those that are not rewarded as their problem's mean.
    """
    monkeypatch.setattr(Arithmetic, "evaluate", Arithmetic.evaluate)  # is put back after this test
    settings = {"source": "base", "num_iterations": 1, "examples_per_step": problems, "eval_every": -1,
                "device_batch_size": device_batch_size, "zero_stage": stage, "task": "arithmetic:easy[:40]"}
    if problems == 1:
        settings["task"] = "arithmetic:easy[19:20]"
    run_on_ranks(world_size, rl_step, stage_arguments(base, "rl", **settings)[1])
    records = read_metrics(base / "rl_checkpoints" / "tiny" / "metrics.jsonl")
    (record,) = (r for r in records if "train/loss" in r)

    reward_lengths()
    model, tokenizer, _ = load_checkpoint(find_model("base", "tiny"), torch.device("cpu"))
    task = make_task(settings["task"], "train")
    rollouts = sample_rollouts(task, epoch_order(len(task), 0, 0)[:problems], model, tokenizer, 3,
                               seed_with(SamplingParams(6, 1.0, 0, seed=0), 0), 64)
    model, loss, trained_on = model.double(), 0.0, 0
    for number, r in enumerate(rollouts):
        group = rollouts[number // 3 * 3 :][:3]
        advantage = r.reward - fmean(other.reward for other in group)
        trained_on += len({other.reward for other in group}) > 1  # of three rewards of 0 or 1 none is their mean, then
        ids = torch.tensor([r.ids])
        logits = 15 * torch.tanh(model.hidden(ids[:, :-1]) @ model.lm_head.weight[:350].T / 15)
        log_p = logits.log_softmax(-1)[0, range(len(r.ids) - 1), r.ids[1:]]
        loss -= advantage * log_p[torch.tensor(r.sampled[1:])].sum()
    loss = loss / sum(sum(r.sampled) for r in rollouts)
    loss.backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
    assert 0 < trained_on < len(rollouts) if problems > 1 else trained_on == 0, "both kinds, or nothing at all"
    assert record["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert record["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    (off,) = (r["rl/sampler_off"] for r in records if "rl/sampler_off" in r)
    assert off == pytest.approx(0.25 if trained_on else 0, abs=1e-5), "as much as the engine was made wrong"


def test_rl_of_a_model_that_solves_nothing_ends_with_its_weights(base):
    """After one step, whose checkpoint is the run's end: the next commands of a recipe take it as any other."""
    printed = run_on_ranks(2, run_script, *stage_arguments(base, "rl", source="base"))[0]
    saved = base / "rl_checkpoints" / "tiny" / "step_000001"
    assert "no sample is right" in printed and find_model("rl", "tiny") == saved and not unfinished(saved)
    expected = load_file(base / "base_checkpoints" / "tiny" / "step_000002" / "model.safetensors")
    got = load_file(saved / "model.safetensors")
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("module, settings, message", [
    ("scripts.mid_train", {"model_tag": "nobody"}, "nobody"),
    ("scripts.chat_sft", {"source": "base", "max_seq_len": 999, "tasks": "arithmetic[:9]"}, "max_seq_len=999"),
    ("scripts.chat_sft", {"source": "base", "replay": 1, "tasks": "arithmetic[:9]"}, "step_000002"),
    ("scripts.chat_rl", {"source": "base", "task": "json:{chats}"}, "chats.jsonl"),
])
def test_bad_input_is_one_clear_line(base, module, settings, message):
    args = [value.replace("{chats}", str(base / "chats.jsonl")) for value in arguments(settings)]
    result = run_module(module, *args)
    assert result.returncode == 1 and message in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == 1
