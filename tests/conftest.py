"""Every test has a base folder of its own; two threads each, whatever the machine has."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
sys.path.insert(0, str(REPO))


@pytest.fixture(autouse=True)
def base_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


def run_module(module: str, *args: str, env: dict | None = None, timeout: float = 300) -> subprocess.CompletedProcess:
    """`python -m module args…` in a process of its own, from the repo's root, with the test's environment."""
    return subprocess.run(
        [sys.executable, "-m", module, *args], cwd=REPO, env=os.environ | (env or {}), timeout=timeout, text=True, capture_output=True
    )
