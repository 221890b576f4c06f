"""A file or folder is either whole or absent."""
import errno
import os

import pytest

from nanochat.errors import UserError, one_line
from nanochat.files import base_dir, recover_folder, sha256, write_aside, write_folder_aside, write_text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "first")
    with pytest.raises(RuntimeError), write_aside(path) as aside:
        aside.write_text("half of the sec")
        raise RuntimeError
    assert path.read_text() == "first" and os.listdir(path.parent) == ["file.txt"]
    write_text(path, "second")
    assert path.read_text() == "second" and path.stat().st_mode & 0o777 == 0o644
    assert sha256(path) == "16367aacb67a4a017c8da8ab95682ccb390863780f7114dda0a0e0c55644c7c4"


def test_a_folder_is_replaced_whole_and_recovered_between_the_renames(tmp_path):
    path = tmp_path / "step"
    for content in ("one", "two"):
        with write_folder_aside(path) as aside:
            (aside / "a").write_text(content)
    assert (path / "a").read_text() == "two" and os.listdir(tmp_path) == ["step"]
    path.rename(tmp_path / "step.old")  # killed after the first rename
    recover_folder(path)
    assert (path / "a").read_text() == "two"
    (tmp_path / "step.old").mkdir()     # killed after the second
    recover_folder(path)
    assert os.listdir(tmp_path) == ["step"]
    with pytest.raises(RuntimeError), write_folder_aside(path) as aside:
        (aside / "a").write_text("three")
        raise RuntimeError
    assert (path / "a").read_text() == "two" and os.listdir(tmp_path) == ["step"]


def test_the_base_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "elsewhere"))
    assert base_dir() == tmp_path / "elsewhere"
    monkeypatch.delenv("NANOCHAT_BASE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert base_dir() == tmp_path / ".cache" / "nanochat" and not base_dir().exists()


def test_errors_a_user_can_act_on_are_one_line():
    assert one_line(UserError("do this")) == "do this"
    assert one_line(OSError(errno.ENOSPC, "x", "/disk/file")).startswith("No space left on device: /disk/file (free space")
    assert one_line(FileNotFoundError(errno.ENOENT, "x")) is None and one_line(ValueError("our own bug")) is None

    class OutOfMemoryError(RuntimeError):
        """As torch.OutOfMemoryError is named."""

    config = {"device_batch_size": 32}
    assert one_line(OutOfMemoryError("CUDA"), config) == "out of memory with device_batch_size=32; try --device_batch_size=16"
    assert "try a smaller max_seq_len" in one_line(OutOfMemoryError("CUDA"), {"device_batch_size": 1})
    assert one_line(OutOfMemoryError("CUDA"), {}) is None
