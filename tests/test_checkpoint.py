"""Checkpoints survive kills, damage and re-saving; what is loaded is what was saved, or an error says why not."""
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from conftest import REPO
from nanochat.checkpoint import (
    checkpoint_dir, find_checkpoint, list_steps, load_model, load_training_state, optimizer_tensors, problem_with, save_checkpoint,
)
from nanochat.compiling import set_compile
from nanochat.errors import UserError
from nanochat.gpt import GPT, config_from_depth
from nanochat.tokenizer import Tokenizer

set_compile(False, "cpu")
TOKENIZER = Tokenizer.train(["a few words to learn merges from, a few words"], 280)


def trained(dtype=torch.float32, steps=2, depth=1, seed=0):
    """A small model after some steps, so that every state tensor holds something."""
    model = GPT(config_from_depth(depth, TOKENIZER.get_vocab_size(), 16))
    model.init_weights(seed)
    optimizers = model.setup_optimizers(weight_decay=0.1)
    model.to(dtype)
    model.accumulate_in_float32()
    for step in range(steps):
        tokens = torch.randint(TOKENIZER.get_vocab_size(), (2, 16), generator=torch.Generator().manual_seed(step))
        model(tokens, tokens.roll(-1, 1)).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return model, optimizers


def save(folder, step, model, optimizers, keep_last=-1):
    meta = {"tokenizer": TOKENIZER.fingerprint, "config": {}}
    return save_checkpoint(folder, step, model, optimizers, TOKENIZER, meta, keep_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_comes_back_bit_for_bit(dtype):
    """Into a model made from another seed with other state: weights, masters, moments, step count, random state."""
    folder = checkpoint_dir("base", "x")
    model, optimizers = trained(dtype, steps=3)
    torch.manual_seed(5)
    path = save(folder, 3, model, optimizers)
    expected = torch.rand(4)
    other, other_optimizers = trained(dtype, steps=1, seed=9)
    meta = load_training_state(path, other, other_optimizers)
    assert torch.equal(torch.rand(4), expected) and meta["step"] == 3
    assert other_optimizers[0].steps == 3, "bias correction goes on where it was"
    pairs = [(model.state_dict(), other.state_dict())]
    pairs += [(a.state_tensors(), b.state_tensors()) for a, b in zip(optimizers, other_optimizers)]
    for saved, loaded in pairs:
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(t, loaded[name]) for name, t in saved.items())
    names = optimizer_tensors(model, optimizers).keys()
    assert any("master" in name for name in names) == (dtype == torch.bfloat16), "float32 masters are not stored twice"


def test_load_model_is_the_model_and_its_tokenizer():
    model, optimizers = trained(torch.bfloat16)
    save(checkpoint_dir("base", "x"), 2, model, optimizers)
    loaded, tokenizer, meta = load_model("base", torch.device("cpu"), "eval")
    assert not loaded.training and meta["step"] == 2 and tokenizer.fingerprint == TOKENIZER.fingerprint
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(tokens), model(tokens)) and next(loaded.parameters()).dtype == torch.bfloat16


def test_the_newest_step_is_found_by_number_and_only_the_last_are_kept():
    folder = checkpoint_dir("base", "x")
    model, optimizers = trained()
    for step in (999_999, 1_000_000, 20):
        save(folder, step, model, optimizers)
    assert list_steps(folder) == [20, 999_999, 1_000_000] and find_checkpoint(folder).name == "step_1000000"
    save(folder, 1_000_001, model, optimizers, keep_last=2)
    assert list_steps(folder) == [1_000_000, 1_000_001]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing file", "missing manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(damage, capsys):
    folder = checkpoint_dir("base", "x")
    model, optimizers = trained()
    good, bad = save(folder, 10, model, optimizers), save(folder, 20, model, optimizers)
    victim = bad / "optimizer_rank_00000.safetensors"
    content = bytearray(victim.read_bytes())
    if damage == "truncated":
        victim.write_bytes(content[:-1])
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    else:
        (victim if damage == "missing file" else bad / "manifest.json").unlink()
    assert find_checkpoint(folder) == good
    said = capsys.readouterr().out
    assert "step_000020" in said and ("manifest.json" if damage == "missing manifest" else victim.name) in said
    with pytest.raises(UserError, match="no valid checkpoint of step 20 .*steps there: 10, 20"):
        find_checkpoint(folder, 20)
    (good / "meta.json").unlink()
    with pytest.raises(UserError, match="no valid checkpoint in"):
        find_checkpoint(folder)


def test_what_does_not_fit_is_refused_before_anything_changes():
    model, optimizers = trained()
    path = save(checkpoint_dir("base", "x"), 1, model, optimizers)
    deeper, deeper_optimizers = trained(depth=2)
    with pytest.raises(UserError, match="does not fit this run"):
        load_training_state(path, deeper, deeper_optimizers)
    half, half_optimizers = trained(torch.bfloat16)
    before = {name: t.clone() for name, t in half.state_dict().items()}
    with pytest.raises(UserError, match="float32 there, .*bfloat16 here"):
        load_training_state(path, half, half_optimizers)
    assert all(torch.equal(t, before[name]) for name, t in half.state_dict().items())


def test_the_choice_of_a_model_is_never_guessed():
    with pytest.raises(UserError, match="0 models in .*base_checkpoints: train one first"):
        load_model("base", torch.device("cpu"), "eval")
    model, optimizers = trained()
    for tag in ("d1", "d2"):
        save(checkpoint_dir("base", tag), 1, model, optimizers)
    with pytest.raises(UserError, match="2 models in .*: d1, d2; choose one with --model_tag"):
        load_model("base", torch.device("cpu"), "eval")
    with pytest.raises(UserError, match="no valid checkpoint of step 7"):
        load_model("base", torch.device("cpu"), "eval", "d1", 7)
    with pytest.raises(UserError, match="source=pretrain is unknown"):
        load_model("pretrain", torch.device("cpu"), "eval")
    path = save(checkpoint_dir("base", "d3"), 1, model, optimizers)
    meta = json.loads((path / "meta.json").read_text()) | {"tokenizer": "another"}
    (path / "meta.json").write_text(json.dumps(meta))
    sums = json.loads((path / "manifest.json").read_text())
    sums.pop("meta.json")
    (path / "manifest.json").write_text(json.dumps(sums))
    with pytest.raises(UserError, match="the tokenizer there is not the one"):
        load_model("base", torch.device("cpu"), "eval", "d3")


def test_a_failed_save_leaves_the_old_checkpoint_and_no_debris(monkeypatch):
    """The disk fills up in the middle of saving a step that is there already."""
    folder = checkpoint_dir("base", "x")
    model, optimizers = trained()
    save(folder, 5, model, optimizers)
    with monkeypatch.context() as patch:
        patch.setattr("nanochat.checkpoint.sha256", lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device", str(path))))
        with pytest.raises(OSError):
            save(folder, 5, model, optimizers)
    assert [path.name for path in folder.iterdir()] == ["step_000005"] and problem_with(folder / "step_000005") is None


SAVE_FOR_EVER = """
import sys
sys.path[:0] = [{tests!r}, {repo!r}]
from test_checkpoint import save, trained
from nanochat.checkpoint import checkpoint_dir
model, optimizers = trained()
save(checkpoint_dir("base", "x"), 1, model, optimizers)
print("saved", flush=True)
while True:
    save(checkpoint_dir("base", "x"), 1, model, optimizers)
"""


def test_killed_at_any_moment_of_saving_the_same_step_a_valid_checkpoint_remains():
    """A real process that replaces step 1 over and over, stopped at four moments and then killed for real; three times."""
    folder = checkpoint_dir("base", "x")
    program = SAVE_FOR_EVER.format(tests=str(REPO / "tests"), repo=str(REPO))
    for life in range(3):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert process.stdout.readline() == b"saved\n"
        for moment in range(4):
            process.send_signal(signal.SIGCONT)
            time.sleep(0.013 * (1 + 4 * life + moment))
            process.send_signal(signal.SIGSTOP)  # the folder as a kill at this moment would leave it
            names = {path.name for path in folder.iterdir()}
            assert names & {"step_000001", "step_000001.old"}, f"nothing left but {names}"
        process.kill()
        process.wait()
        path = find_checkpoint(folder)
        assert path.name == "step_000001" and problem_with(path) is None
        model, optimizers = trained(steps=0)
        load_training_state(path, model, optimizers)
