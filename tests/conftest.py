"""Every test has its own base folder and random numbers; --shuffle=SEED runs all tests in another order."""
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import REPO  # first: it makes the repo importable
from safetensors.torch import load_file
from warm_python import run_module, warm_python

# isort: split
from nanochat.corpus.learn_tokenizer import train_tokenizer
from nanochat.corpus.make_dataset import make
from nanochat.data.tokenizer import Tokenizer
from nanochat.runtime.compiling import set_compile
from nanochat.runtime.files import base_dir
from nanochat.training.records import read_metrics

__all__ = ["REPO", "run_module", "warm_python", "base_folder", "make_sums", "made", "base_run", "losses",
           "assert_same_run", "ALL_PIECES"]
ALL_PIECES = ("classic,rope_theta=1e5,qk_scale=1.2,short_windows=True,value_embeddings=True,smear=True,key_offset=True,"
              "document_token=3,embedding_std=0.8,fc_scale=0.4,narrow_gates=True,stream_scales=True,"
              "subtract_middle=True")  # base_train's --arch
LONG = ["test_many_ranks", "test_base_train", "test_chat_web", "test_speedrun", "test_zero",
        "test_pipeline", "test_chat_training", "test_tasks", "test_engine", "test_ui", "test_zero_bench",
        "test_many_hosts", "test_gpt", "test_step_page"]


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, metavar="SEED", help="random order of files and tests")


def pytest_collection_modifyitems(config, items):
    """The longest files first: then all workers end at about the same time."""
    files = LONG
    if (seed := config.getoption("shuffle")) is not None:  # the same order in every worker
        random.Random(seed).shuffle(items)
        files = list(dict.fromkeys(item.path.stem for item in items))

    def place(item) -> tuple[int, bool]:
        file = files.index(item.path.stem) if item.path.stem in files else len(files)
        return file, item.name.startswith("test_zz_")  # these end the server that a file's tests share

    items.sort(key=place)


@pytest.fixture(autouse=True)
def base_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.delenv("NANOCHAT_NO_VENV", raising=False)  # the tests of setup.sh set it themselves
    return tmp_path / "base"


@pytest.fixture(autouse=True)
def seeded():
    """No draw, and nothing that is compiled, depends on which tests ran before."""
    set_compile(False, "cpu")
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


SUM = "Document {i} says that {i} plus {i} is {twice}, and that {i} minus one is {less}."


def make_sums(folder: Path, documents: int = 400, text: str = SUM, vocab_size: int = 400) -> Tokenizer:
    """A small data set `sums` and its tokenizer in a base folder, to which NANOCHAT_BASE_DIR must point."""
    (folder / "texts").mkdir(parents=True)
    for i in range(documents):
        (folder / "texts" / f"{i}.txt").write_text(text.format(i=i, twice=2 * i, less=i - 1))
    make(str(folder / "texts"), "sums")
    return train_tokenizer("sums", vocab_size)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base folder with a small data set and its tokenizer, made once for the tests of a file."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(folder))
        make_sums(folder)
    return folder


def base_run(tag: str) -> Path:
    return base_dir() / "base_checkpoints" / tag


def losses(tag: str) -> dict[int, float]:
    """Of a run of pretraining, by step."""
    records = read_metrics(base_run(tag) / "metrics.jsonl")
    return {record["step"]: record["train/loss"] for record in records if "train/loss" in record}


def assert_same_run(a: str, b: str, step: int) -> None:
    """The same losses, and every tensor of the checkpoint (weights, masters, moments), to the bit."""
    names = sorted(path.name for path in (base_run(a) / f"step_{step:06d}").glob("*.safetensors"))
    assert len(names) > 1
    for name in names:
        first, second = (load_file(base_run(tag) / f"step_{step:06d}" / name) for tag in (a, b))
        assert first.keys() == second.keys()
        assert [key for key, tensor in first.items() if not torch.equal(tensor, second[key])] == [], name
    assert losses(a) == losses(b)
