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


def test_errors_a_user_can_act_on_are_one_line():
    assert one_line(UserError("do this")) == "do this"
    for number in (errno.ENOSPC, errno.EROFS, errno.ENOTDIR):
        assert f"{os.strerror(number)}: /disk/file" in one_line(OSError(number, "x", "/disk/file"))
    assert one_line(FileNotFoundError(errno.ENOENT, "x")) is None and one_line(ValueError("our own bug")) is None

    class OutOfMemoryError(RuntimeError):
        """As torch.OutOfMemoryError is named."""

    assert "--device_batch_size=16" in one_line(OutOfMemoryError("CUDA"), {"device_batch_size": 32})
    assert one_line(OutOfMemoryError("CUDA"), {}) is None
