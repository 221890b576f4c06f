"""Every test has a base folder and random numbers of its own; --shuffle=SEED runs all in another order."""
import random

import numpy as np
import pytest
import torch

from ranks import REPO, run_module  # first: it makes the repo importable; and for the tests to import from here

from nanochat.compiling import set_compile

__all__ = ["REPO", "run_module", "base_folder"]
LONG = ["test_many_ranks", "test_base_train", "test_speedrun", "test_chat_training", "test_zero", "test_doctor", "test_ui"]


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the files, and the tests within each file, in the order drawn with this seed")


def pytest_collection_modifyitems(config, items):
    """The longest files first: then all workers end at about the same time."""
    files = LONG
    if (seed := config.getoption("shuffle")) is not None:  # the same order in every worker
        random.Random(seed).shuffle(items)
        files = list(dict.fromkeys(item.path.stem for item in items))
    items.sort(key=lambda item: files.index(item.path.stem) if item.path.stem in files else len(files))


@pytest.fixture(autouse=True)
def base_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


@pytest.fixture(autouse=True)
def seeded():
    """No draw, and nothing that is compiled, depends on which tests ran before."""
    set_compile(False, "cpu")
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
