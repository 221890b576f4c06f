"""
Shards from the Hugging Face hub, whole and checked, or absent.

The hub's own library downloads them, and resumes after a broken connection. Its environment variables apply:
HF_ENDPOINT names a mirror, HF_TOKEN an account. The library compares only sizes; here the SHA-256 is compared.
"""
import time
from pathlib import Path

from nanochat.corpus.shards import describe
from nanochat.runtime.errors import UserError, first_line
from nanochat.runtime.files import sha256, sync

TRIES = 3       # the hub's library itself resumes after a cut connection, but not after an answer such as 503
PAUSE_S = 2     # before the second try, twice as long before the third


def fetch_shard(repository: str, file: str, folder: Path) -> dict:
    """
    Fetch one shard of a dataset repository on the hub into a folder; returns its manifest entry. An existing file with
    the hub's checksum is kept. Raises UserError, in one line.
    """
    # Imported late: other sources do not need it.
    import huggingface_hub as hub
    from huggingface_hub.utils import disable_progress_bars

    # The library would show a bar for each file; make_dataset counts the files.
    disable_progress_bars()
    attempt = 0
    while True:
        attempt += 1
        try:
            path = Path(hub.hf_hub_download(repository, file, repo_type="dataset", local_dir=folder))
            stated = hub.get_hf_file_metadata(hub.hf_hub_url(repository, file, repo_type="dataset"))
            return check_shard(path, stated.etag)
        # httpx, the hub's library and xet raise all kinds of exceptions.
        except Exception as error:
            if isinstance(error, OSError) and error.errno:
                # An errno means this machine's disk, not the network: another try would fail in the same way.
                raise
            # FileNotFoundError comes after the library's own tries to reach the hub: more tries would only take longer.
            if attempt == TRIES or isinstance(error, FileNotFoundError):
                raise UserError(f"{file} of {repository}: {type(error).__name__}: {first_line(error)};"
                                " the same command goes on from here, HF_ENDPOINT=… names a mirror") from error
        time.sleep(attempt * PAUSE_S)


def check_shard(path: Path, etag: str | None) -> dict:
    """The shard's manifest entry. ValueError, and the file is removed, if it differs from the hub's."""
    # The library compares only sizes, and a proxy may send an error page of any size.
    checksum = sha256(path)
    try:
        if etag and len(etag) == len(checksum) and checksum != etag:
            raise ValueError(f"wrong checksum: expected {etag}, got {checksum}")
        entry = describe(path, checksum)
    except ValueError:
        path.unlink()
        raise
    sync(path)
    return entry
