"""A file or folder is either whole or absent."""
import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

from nanochat.runtime.errors import UserError, one_line
from nanochat.runtime.files import (
    base_dir,
    recover_folder,
    sha256,
    sync,
    write_aside,
    write_folder_aside,
    write_text,
)


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
    with pytest.raises(IsADirectoryError):
        write_text(path.parent, "a file never takes the place of a folder")
    assert path.read_text() == "second"


KILLED_AFTER_A_RENAME = """
import os, signal, sys
from nanochat.runtime import files
rename = os.rename
def then_killed(*paths):
    rename(*paths)
    os.kill(os.getpid(), signal.SIGKILL)
os.rename = then_killed
with files.write_folder_aside(files.Path(sys.argv[1])) as aside:
    (aside / "a").write_text("new")
"""


def test_a_folder_is_replaced_whole_and_recovered_between_the_renames(tmp_path):
    path = tmp_path / "step"
    for content in ("one", "two"):
        with write_folder_aside(path) as aside:
            (aside / "a").write_text(content)
    assert (path / "a").read_text() == "two" and os.listdir(tmp_path) == ["step"]
    killed = subprocess.run([sys.executable, "-c", KILLED_AFTER_A_RENAME, path], cwd=REPO)
    assert killed.returncode == -signal.SIGKILL and not path.exists() and len(os.listdir(tmp_path)) == 2
    for _ in range(2):
        recover_folder(path)
        assert (path / "a").read_text() == "two", "the next process that writes there puts it back"
    with pytest.raises(RuntimeError), write_folder_aside(path) as aside:
        (aside / "a").write_text("three")
        raise RuntimeError
    assert (path / "a").read_text() == "two" and os.listdir(tmp_path) == ["step"], "also what the kill left is gone"


def test_a_copy_of_the_users_is_no_debris(tmp_path):
    """`mv my-model my-model.old`, then a new one, twice: nothing but my-model is ours."""
    path, kept = tmp_path / "my-model", tmp_path / "my-model.old"
    for content in ("one", "two", "three"):
        with write_folder_aside(path) as aside:
            (aside / "a").write_text(content)
        if content == "one":
            path.rename(kept)
    assert (kept / "a").read_text() == "one" and (path / "a").read_text() == "three"
    assert sorted(os.listdir(tmp_path)) == ["my-model", "my-model.old"]


def test_a_file_system_that_does_not_sync_folders_still_keeps_what_is_written(tmp_path, monkeypatch):
    """Of folders the refusal means nothing, of files it means that nothing is safe; /proc refuses both."""
    sync(Path("/proc"))
    with pytest.raises(OSError, match="Invalid argument"):
        sync(Path("/proc/self/status"))
    fsync, refused = os.fsync, []

    def of_files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_only)
    write_text(tmp_path / "file", "text")
    with write_folder_aside(tmp_path / "folder") as aside:
        (aside / "inner").mkdir()
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"] and len(refused) == 4
    for number in (errno.EIO, errno.ENOSPC):  # a disk that fails is no such file system
        monkeypatch.setattr(os, "fsync", lambda _, number=number: (_ for _ in ()).throw(OSError(number, "failed")))
        with pytest.raises(OSError, match="failed"):
            sync(tmp_path)


def test_the_base_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "elsewhere"))
    assert base_dir() == tmp_path / "elsewhere"
    monkeypatch.delenv("NANOCHAT_BASE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert base_dir() == tmp_path / ".cache" / "nanochat" and not base_dir().exists()


def test_errors_a_user_can_act_on_are_one_line():
    assert one_line(UserError("do this")) == "do this"
    full = one_line(OSError(errno.ENOSPC, "x", "/disk/file"))
    assert full.startswith("No space left on device: /disk/file (free space")
    read_only = one_line(OSError(errno.EROFS, "x", "/disk/file"))
    assert read_only.startswith("Read-only file system: /disk/file (") and "free space" not in read_only
    assert one_line(KeyboardInterrupt(), {"resume": ""}) == "interrupted", "there may be no checkpoint"
    assert one_line(FileNotFoundError(errno.ENOENT, "x")) is None and one_line(ValueError("our own bug")) is None

    class OutOfMemoryError(RuntimeError):
        """As torch.OutOfMemoryError is named."""

    config = {"device_batch_size": 32}
    said = one_line(OutOfMemoryError("CUDA"), config)
    assert said == "out of memory with device_batch_size=32; try --device_batch_size=16"
    assert "try a smaller max_seq_len" in one_line(OutOfMemoryError("CUDA"), {"device_batch_size": 1})
    assert one_line(OutOfMemoryError("CUDA"), {}) is None
