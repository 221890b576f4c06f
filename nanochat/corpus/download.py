"""
Files from the network: whole and checked, or absent.

Shards come from the Hugging Face hub by its own library. It goes on where a connection broke, and its environment
variables hold here as well: HF_ENDPOINT names a mirror, HF_TOKEN an account. The library compares only sizes with what
the hub states; the SHA-256 is compared here.
"""
import http.client
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import CancelledError
from pathlib import Path

from tqdm import tqdm

from nanochat.corpus.shards import describe
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import sha256, sync, write_aside

TRIES = 3        # of a file; the hub's own library tries several times to connect besides
PAUSE_S = 2      # before the next try, and again as much for every further one
TIMEOUT_S = 30   # without a byte, where that library is not used


def fetch_shard(repository: str, file: str, folder: Path, stop: threading.Event) -> dict:
    """
    One shard of a dataset repository on the hub into a folder; returns its manifest entry. A file that is there with
    the hub's checksum is kept. Raises UserError, in one line; CancelledError when `stop` is set meanwhile.
    """
    import huggingface_hub as hub  # here: making data from other sources does without it
    from huggingface_hub.utils import tqdm as hub_bar

    class Bar(hub_bar):
        """The progress of one file, where a person is watching; it is also called for every chunk that comes."""

        def __init__(self, *args, **settings):
            super().__init__(*args, **settings | {"leave": False})

        def update(self, n: float = 1) -> bool | None:
            if stop.is_set():
                raise CancelledError
            return super().update(n)

    for attempt in range(1, TRIES + 1):
        try:
            of_hub = {"repo_id": repository, "filename": file, "repo_type": "dataset"}
            path = Path(hub.hf_hub_download(**of_hub, local_dir=folder, tqdm_class=Bar))
            expected = hub.get_hf_file_metadata(hub.hf_hub_url(**of_hub)).etag
            checksum = sha256(path)
            if re.fullmatch("[0-9a-f]{64}", expected or "") and checksum != expected:
                path.unlink()
                raise ValueError(f"wrong checksum: expected {expected}, got {checksum}")
            sync(path)
            break
        except CancelledError:
            raise
        except Exception as error:  # of httpx, of the hub's library, of xet
            if isinstance(error, OSError) and error.errno:
                raise  # the disk's, not the network's
            status = getattr(getattr(error, "response", None), "status_code", 0)
            # What the hub refuses will not change; FileNotFoundError ends its library's own tries to reach the hub.
            if attempt == TRIES or 400 <= status < 500 or isinstance(error, FileNotFoundError):
                raise UserError(
                    f"{file} of {repository}: {in_one_line(error)};"
                    " the same command goes on from here, HF_ENDPOINT=… names a mirror"
                ) from error
            stop.wait(attempt * PAUSE_S)
    try:
        return describe(path, checksum)
    except ValueError as error:
        path.unlink()
        raise UserError(f"{file} of {repository} is not a shard: {error}") from error


def fetch(url: str, path: Path) -> None:
    """A file from a plain address, of the size that the server states. Raises UserError, in one line."""
    for attempt in range(1, TRIES + 1):
        try:
            with (
                urllib.request.urlopen(url, timeout=TIMEOUT_S) as response,
                write_aside(path) as aside,
                open(aside, "wb") as file,
                tqdm.wrapattr(response, "read", total=response.length, desc=path.name, delay=5) as body,
            ):
                shutil.copyfileobj(body, file)
                if response.length:  # the bytes that have not come
                    raise http.client.IncompleteRead(b"", response.length)
            return
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: not an address
            final = isinstance(error, urllib.error.HTTPError) and error.code < 500 or isinstance(error, ValueError)
            if final or attempt == TRIES:
                raise UserError(f"{url}: {in_one_line(error)}") from error
            time.sleep(attempt * PAUSE_S)


def in_one_line(error: BaseException) -> str:
    """What is behind an error of the network, which libraries nest and tell at length."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
