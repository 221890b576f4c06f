"""The CORE evaluation bundle: download, check and unpack."""
import shutil
import stat
import zipfile
from pathlib import Path, PurePosixPath

from nanochat.core_eval import bundle_dir
from nanochat.corpus.download import fetch
from nanochat.errors import UserError
from nanochat.files import base_dir, locked, recover_folder, write_folder_aside

URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"


def why_no_bundle(url: str = URL) -> str | None:
    """None when the bundle is there, downloaded now if it has to be; else one line that says why it is not."""
    folder, archive = bundle_dir(), base_dir() / "eval_bundle.zip"
    try:
        with locked(base_dir() / ".eval_bundle.lock"):
            recover_folder(folder)
            if not folder.exists():
                if not archive.exists():
                    fetch(url, archive)
                try:
                    with write_folder_aside(folder) as aside:
                        unpack(archive, aside)
                finally:
                    archive.unlink()
    except (UserError, ValueError) as error:
        return f"no CORE bundle in {folder}, and it cannot be downloaded: {error}; put one there to measure CORE"
    return None


def core_root(archive: Path) -> PurePosixPath:
    """The folder inside the archive that holds core.yaml. ValueError when that is no bundle or would leave its folder."""
    try:
        with zipfile.ZipFile(archive) as file:
            members, damaged = file.infolist(), file.testzip()
    except zipfile.BadZipFile as error:
        raise ValueError(f"not a zip file ({error})") from error
    if damaged:
        raise ValueError(f"its member {damaged!r} is damaged")
    for member in members:
        path = PurePosixPath(member.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in member.filename or stat.S_ISLNK(member.external_attr >> 16):
            raise ValueError(f"its member {member.filename!r} leads out of its folder")
    roots = [path.parent for member in members if (path := PurePosixPath(member.filename)).name == "core.yaml"]
    if not roots:
        raise ValueError("it has no core.yaml")
    return min(roots, key=lambda root: len(root.parts))


def unpack(archive: Path, folder: Path) -> None:
    """The files below core_root into a folder."""
    root = core_root(archive)
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            path = PurePosixPath(member.filename)
            if path.is_relative_to(root) and not member.is_dir():
                target = folder / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                with file.open(member) as source, open(target, "wb") as copy:
                    shutil.copyfileobj(source, copy)
