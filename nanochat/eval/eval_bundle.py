"""The CORE evaluation bundle: downloaded and unpacked if it is not there yet."""
import shutil
import urllib.request
import zipfile
from pathlib import Path

from nanochat.eval.core_eval import bundle_dir
from nanochat.runtime.collectives import first_problem, from_rank0
from nanochat.runtime.files import base_dir, locked, write_aside

URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
TIMEOUT = 30  # seconds without a byte


def why_no_bundle() -> str | None:
    """
    None if the bundle is on every disk, downloaded now if necessary; else one line that says why it is not there, the
    same on every rank. COLLECTIVE.
    """
    # After a failure on rank 0 the other ranks do not try: each would wait for the same timeout.
    return from_rank0(make_bundle) or first_problem(make_bundle())


def make_bundle() -> str | None:
    """`why_no_bundle` on the disk of this rank."""
    folder = bundle_dir()
    lock = base_dir() / ".eval_bundle.lock"
    with locked(lock):
        try:
            if not folder.exists():
                download(folder)
        # The network, the archive and the disk raise different errors. CORE is optional, so none of them ends a run.
        except Exception as error:
            # A run that is refused leaves nothing.
            lock.unlink(missing_ok=True)
            return (f"no CORE bundle in {folder}; put one there to measure CORE; it cannot be downloaded from {URL}: "
                    f"{type(error).__name__}: {error}")
    return None


def download(folder: Path) -> None:
    """Make the archive's folder the bundle. zipfile keeps every member inside it."""
    with write_aside(folder) as aside:
        # The archive lies beside `aside`, in a temporary folder that is removed with it.
        archive = aside.with_name("eval_bundle.zip")
        with urllib.request.urlopen(URL, timeout=TIMEOUT) as response, open(archive, "wb") as file:
            shutil.copyfileobj(response, file)
        with zipfile.ZipFile(archive) as file:
            # The archive's own folder is called eval_bundle, and so is `aside`: the content lands where it belongs.
            file.extractall(aside.parent)
