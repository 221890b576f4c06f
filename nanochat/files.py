"""
Where things are kept, and how they get there: a file or folder is either whole or absent.

Everything is written aside in the same folder, synced, then renamed. A process that is killed at any
moment leaves what was there before, and at most some `.tmp-…` debris, which the next writer removes.
"""
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

# What a file system answers that does not sync folders, as some across a network: their renames are as safe as they get.
REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EPERM, errno.EBADF)


def base_dir() -> Path:
    """The folder of all data, tokenizers, checkpoints and reports: NANOCHAT_BASE_DIR or ~/.cache/nanochat."""
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or Path.home() / ".cache" / "nanochat")


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a folder entry to the disk, so that a rename after it cannot overtake it. OSError if the disk refuses."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in REFUSED or not path.is_dir():
            raise


def locked(path: Path, wait: bool = True) -> TextIO:
    """
    One process at a time goes on, by a lock on this file: until what is returned is closed, or its holder dies. Instead
    of waiting for another holder: BlockingIOError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        pass  # some cluster file systems have no locks
    return file


@contextlib.contextmanager
def write_aside(path: Path) -> Iterator[Path]:
    """
    Yields a temporary path beside `path` to write a file to; on success it is synced and renamed to `path`.
    After an exception nothing of it remains and `path` is as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.tmp-", dir=path.parent)
    os.close(descriptor)
    aside = Path(name)
    try:
        yield aside
        aside.chmod(0o644)  # mkstemp makes files private; what we keep is as readable as any other file
        sync(aside)
        os.replace(aside, path)
        sync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a whole text file (UTF-8) or leave the old one untouched."""
    with write_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def write_folder_aside(path: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `path` to fill; on success it becomes `path`, else nothing of it remains."""
    aside = make_folder_aside(path)
    try:
        yield aside
        publish_folder(aside, path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def make_folder_aside(path: Path) -> Path:
    """A new temporary folder beside `path`, for one or several processes to fill."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    recover_folder(path)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.tmp-", dir=path.parent))
    aside.chmod(0o755)
    return aside


def publish_folder(aside: Path, path: Path) -> None:
    """
    Sync the files of a folder and rename it to `path`. A folder that is already there keeps a hidden name of ours until
    the new one is in place: after a kill between the two renames it is there, complete, and the next process that
    writes this path puts it back (`recover_folder`).
    """
    path = Path(path)
    for file in aside.rglob("*"):
        sync(file)
    sync(aside)
    if path.exists():
        os.rename(path, previous(path))
    os.rename(aside, path)
    sync(path.parent)
    shutil.rmtree(previous(path), ignore_errors=True)


def previous(path: Path) -> Path:
    """The hidden name of a folder while the one that replaces it takes its place."""
    return path.with_name(f".{path.name}.nanochat-previous")


def recover_folder(path: Path) -> None:
    """
    Finish what a kill interrupted in `publish_folder`: keep the new folder if it is there, else the old. For processes
    that are about to write this path; those that read it change nothing.
    """
    old = previous(path)
    if old.exists():
        if path.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, path)
