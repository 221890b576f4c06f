"""
Where things are kept, and how they get there: a file or folder is either whole or absent.

Everything is written aside in the same folder, synced, then renamed. A process that is killed at any
moment leaves what was there before, and at most some `.tmp-…` debris, which the next writer removes.
"""
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def base_dir() -> Path:
    """The folder of all data, tokenizers, checkpoints and reports: NANOCHAT_BASE_DIR or ~/.cache/nanochat."""
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or Path.home() / ".cache" / "nanochat")


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a folder entry to the disk, so that a rename after it cannot overtake it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.tmp-", dir=path.parent))
    aside.chmod(0o755)
    return aside


def publish_folder(aside: Path, path: Path) -> None:
    """
    Sync the files of a folder and rename it to `path`. A folder that is already there is kept as `<name>.old` until
    the new one is in place: a kill between the two renames leaves the old one under that name, complete
    (`recover_folder` puts it back).
    """
    path = Path(path)
    old = path.with_name(path.name + ".old")
    for file in aside.rglob("*"):
        sync(file)
    sync(aside)
    recover_folder(path)
    if path.exists():
        os.rename(path, old)
    os.rename(aside, path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover_folder(path: Path) -> None:
    """Finish what a kill interrupted in `publish_folder`: keep the new folder if it is there, else the old."""
    old = path.with_name(path.name + ".old")
    if old.exists():
        if path.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, path)
