"""
Files and folders that are either whole or absent, and locks.

Everything is written to a temporary name in the same folder, synced, then renamed. A process that is killed at any
moment leaves what was there before, and at most some `.tmp-…` debris, which the next writer removes.
"""
import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

DISK_ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)


def base_dir() -> Path:
    """The folder of all data, tokenizers, checkpoints and reports: NANOCHAT_BASE_DIR or ~/.cache/nanochat."""
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or Path.home() / ".cache" / "nanochat")


def read_toml(name: str) -> dict[str, Any]:
    """A table of data of this program, such as "runtime/gpus.toml"."""
    return tomllib.loads((Path(__file__).parents[1] / name).read_text(encoding="utf-8"))


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a folder entry to the disk, before a rename relies on it. OSError if the disk refuses."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # Some network file systems do not sync folders: there a rename is all one can do.
        if error.errno in DISK_ERRORS or not path.is_dir():
            raise


def locked(path: Path, wait: bool = True) -> TextIO:
    """
    Take the exclusive lock on this file, until the returned file is closed or every process that has it open has ended.
    BlockingIOError when another process holds it and wait is False. No lock where the file system has none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+", encoding="utf-8")
    how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        # Some cluster file systems have no locks. It is better to write without one than not at all.
        pass
    return file


@contextlib.contextmanager
def write_aside(path: Path) -> Iterator[Path]:
    """
    Yields a temporary path beside `path` to make a file or folder at; on success it is synced and renamed to `path`.
    After an exception nothing of it remains and `path` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.tmp-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent, ignore_cleanup_errors=True) as folder:
        aside = Path(folder, path.name)
        yield aside
        put_in_place(aside, path)


def put_in_place(aside: Path, path: Path) -> None:
    """Sync a finished file or folder and rename it to `path`, in the same file system."""
    for written in aside.rglob("*"):
        sync(written)
    sync(aside)
    # A rename can replace only an empty folder.
    if aside.is_dir() and path.is_dir():
        os.rename(path, previous(path))
    os.replace(aside, path)
    sync(path.parent)
    shutil.rmtree(previous(path), ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file (UTF-8) or leave the old one untouched."""
    with write_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def write_folder_aside(path: Path) -> Iterator[Path]:
    """
    `write_aside` with a new folder to fill. An existing folder is renamed to `previous(path)`, then the new one to
    `path`. After a kill in between, the next process that writes there puts the old one back, by `recover_folder`.
    Only one process may write a folder at a time.
    """
    recover_folder(path)
    with write_aside(path) as aside:
        aside.mkdir()
        yield aside


def previous(path: Path) -> Path:
    """The hidden name of a folder while another takes its place."""
    return path.with_name(f".{path.name}.nanochat-previous")


def recover_folder(path: Path) -> None:
    """
    Clear up after a process that was killed while it wrote a folder: the old one comes back unless the new one is
    there. For processes that are about to write there; readers change nothing.
    """
    if previous(path).exists() and not path.exists():
        os.rename(previous(path), path)
    shutil.rmtree(previous(path), ignore_errors=True)
    for debris in path.parent.glob(f".{glob.escape(path.name)}.tmp-*"):
        # NFS keeps a file that is in use; the next writer removes it.
        shutil.rmtree(debris, ignore_errors=True)
