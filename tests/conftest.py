"""Every test has a base folder of its own."""
import pytest

from ranks import REPO, run_module  # for the tests to import from here, too

__all__ = ["REPO", "run_module", "base_folder"]
LONG = ["test_base_train", "test_many_ranks", "test_speedrun", "test_chat_training", "test_zero"]


def pytest_collection_modifyitems(items):
    """The longest files first: then all workers end at about the same time."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(autouse=True)
def base_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"
