"""The CORE evaluation bundle: download and unpack."""
import zipfile
import zlib
from pathlib import Path

from nanochat.corpus.download import fetch
from nanochat.eval.core_eval import bundle_dir
from nanochat.runtime.collectives import first_problem, from_rank0
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir, locked, recover_folder, write_aside

URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"


def why_no_bundle(url: str = URL) -> str | None:
    """
    None when the bundle is there on every disk, downloaded now if it has to be; else one line that says why it is not,
    the same on every rank. COLLECTIVE.
    """
    return from_rank0(make_bundle, url) or first_problem(make_bundle(url))  # others would fail as slowly as rank 0


def make_bundle(url: str) -> str | None:
    """`why_no_bundle` on the disk of this rank."""
    folder, archive = bundle_dir(), base_dir() / "eval_bundle.zip"
    try:
        with locked(base_dir() / ".eval_bundle.lock"):
            recover_folder(folder)
            if not folder.exists():
                fetch(url, archive)
                unpack(archive, folder)
    except UserError as error:
        return f"no CORE bundle in {folder}, and it cannot be downloaded: {error}; put one there to measure CORE"
    return None


def unpack(archive: Path, folder: Path) -> None:
    """
    Make the part of the archive that holds core.yaml the folder, and remove the archive. UserError when it is damaged
    or no bundle. Members that would lead out of the folder stay inside: zipfile sees to that.
    """
    try:
        with write_aside(folder) as aside:
            with zipfile.ZipFile(archive) as file:
                file.extractall(aside.with_name("all"))  # in the same temporary folder
            roots = sorted((path.parent for path in aside.parent.rglob("core.yaml")), key=lambda path: len(path.parts))
            if not roots:
                raise UserError(f"{archive.name} has no core.yaml")
            roots[0].rename(aside)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise UserError(f"{archive.name} is damaged ({error})") from error
    finally:
        archive.unlink()
