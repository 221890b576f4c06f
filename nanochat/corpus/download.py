"""
Shards from the Hugging Face hub, whole and checked, or absent.

They come by the hub's own library, which goes on where a connection broke. Its environment variables hold:
HF_ENDPOINT names a mirror, HF_TOKEN an account. The library compares only sizes; here the SHA-256 is compared.
"""
import re
import time
from pathlib import Path

from nanochat.corpus.shards import describe
from nanochat.runtime.errors import UserError, first_line
from nanochat.runtime.files import sha256, sync

TRIES = 3       # of a file; the hub's library tries several times to connect besides
PAUSE_S = 2     # before the second try, twice as long before the third


def fetch_shard(repository: str, file: str, folder: Path) -> dict:
    """
    One shard of a dataset repository on the hub into a folder; returns its manifest entry. A file that is there with
    the hub's checksum is kept. Raises UserError, in one line.
    """
    import huggingface_hub as hub  # here: making data from other sources does without it
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # one for each file; make_dataset counts the files
    where = {"repo_id": repository, "filename": file, "repo_type": "dataset"}
    for attempt in range(1, TRIES + 1):
        try:
            path = Path(hub.hf_hub_download(**where, local_dir=folder))
            return check_shard(path, hub.get_hf_file_metadata(hub.hf_hub_url(**where)).etag)
        except Exception as error:  # of httpx, of the hub's library, of xet
            if isinstance(error, OSError) and error.errno:
                raise  # the disk's, not the network's
            # FileNotFoundError is raised after the library's own tries to reach the hub.
            if attempt == TRIES or isinstance(error, FileNotFoundError):
                while error.__cause__ is not None:  # libraries nest an error of the network
                    error = error.__cause__
                raise UserError(f"{file} of {repository}: {type(error).__name__}: {first_line(error)};"
                                " the same command goes on from here, HF_ENDPOINT=… names a mirror") from error
            time.sleep(attempt * PAUSE_S)
    raise AssertionError("the last attempt returns or raises")


def check_shard(path: Path, etag: str | None) -> dict:
    """The shard's manifest entry. ValueError, and the file is removed, when it differs from the hub's."""
    checksum = sha256(path)
    try:
        if re.fullmatch("[0-9a-f]{64}", etag or "") and checksum != etag:
            raise ValueError(f"wrong checksum: expected {etag}, got {checksum}")
        entry = describe(path, checksum)
    except ValueError:
        path.unlink()
        raise
    sync(path)
    return entry
