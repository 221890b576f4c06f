"""
Files from the network: whole and verified, or absent.

A file grows under `NAME.part` and gets its name only when its size and its SHA-256 are what the server said, and its
content is what the caller expects. A broken connection or a killed process leaves the part, and the next try asks for
the rest (Range); were the file another one by then, the checksum of the whole would tell. What passes by itself
(timeouts, 429, 5xx, a cut or spoiled body) is tried again with growing pauses; anything else ends in one line.
"""
import os
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import requests
import urllib3
from tqdm import tqdm

from nanochat.errors import PassingError, UserError
from nanochat.files import sha256, sync

CHUNK = 1 << 16
PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class Patience:
    """How long to wait, and how often to try again."""

    connect_s: float = 10      # until a connection stands
    read_s: float = 60         # without a single byte
    tries: int = 7             # in a row that bring nothing new
    first_pause_s: float = 1   # doubled each time, with jitter, up to
    longest_pause_s: float = 60


class Again(Exception):
    """This try failed, the next may not. Its second argument, if any: the seconds that the server asked to wait."""


def fetch_all(
    files: list[tuple[str, Path]],
    inspect: Callable[[Path, str], None],
    workers: int,
    patience: Patience,
    bar: tqdm,
) -> None:
    """
    Fetch (url, path) pairs, `workers` at a time. The first error stops all of them and is raised; what has come so
    far stays for the next call.

    inspect(file, SHA-256): called for every file before it gets its name, and for those that have it; ValueError
    from it means that the content is not what it should be.
    bar: told of bytes that come, and of pauses and their reason, from the workers' threads.
    """
    stop = threading.Event()

    def work(url: str, path: Path) -> None:
        try:
            if not stop.is_set():
                fetch(url, path, inspect, patience, bar, stop)
        except CancelledError:  # another download failed, so this one was left where it was
            pass
        except BaseException:
            stop.set()  # here, before this worker takes the next file
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            for future in as_completed([pool.submit(work, *file) for file in files]):
                future.result()
        finally:  # an interrupt from the keyboard comes this way as well
            stop.set()


def fetch(
    url: str, path: Path, inspect: Callable[[Path, str], None], patience: Patience, bar: tqdm, stop: threading.Event
) -> None:
    """Fetch one file, see `fetch_all`. Raises UserError when the server will not give it, CancelledError on `stop`."""
    if path.exists():
        try:
            return inspect(path, sha256(path))
        except ValueError as error:
            bar.write(f"{path} is damaged ({error}); fetching it anew")
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    failures, furthest = 0, size_of(part)
    while True:
        try:
            checksum = attempt(url, part, patience, bar, stop)
            try:
                inspect(part, checksum)
            except ValueError as error:
                part.unlink()
                raise Again(f"this is not the file that it should be: {error}") from error
            sync(part)
            os.replace(part, path)
            return sync(path.parent)
        except Again as error:
            # Only a try that gets further than any before it counts as progress: no server can keep us here for ever.
            failures = 1 if size_of(part) > furthest else failures + 1
            furthest = max(furthest, size_of(part))
            reason, asked = (*error.args, 0)[:2]
            if failures >= patience.tries:
                raise PassingError(
                    f"{url}: {reason} ({failures} times in a row); "
                    "the same command goes on from here, --url=… tries a mirror"
                ) from error
            pause = random.uniform(0.5, 1) * patience.first_pause_s * 2 ** (failures - 1)
            pause = min(max(pause, asked), patience.longest_pause_s)
            bar.write(f"{path.name}: {reason}; next try in {pause:.0f} s")
            if stop.wait(pause):
                raise CancelledError from None


def attempt(url: str, part: Path, patience: Patience, bar: tqdm, stop: threading.Event) -> str:
    """One request that starts, or goes on with, the part. Returns its SHA-256 once it is whole; else raises Again."""
    start = size_of(part)
    headers = {"Accept-Encoding": "identity"}  # or the length would be that of the compressed body
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        with requests.get(url, headers=headers, stream=True, timeout=(patience.connect_s, patience.read_s)) as response:
            check_status(url, response, start, part)
            size, expected = what_is_told(response)
            with open(part, "ab" if response.status_code == 206 else "wb") as file:
                for chunk in response.iter_content(CHUNK):
                    file.write(chunk)
                    bar.update(len(chunk))
                    if stop.is_set():
                        raise CancelledError
    except (requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError, TimeoutError) as error:
        if isinstance(error, ValueError):  # so are the complaints of requests about a url
            raise UserError(f"{url} is not an address to download from: {error}") from error
        raise Again(reason_of(error)) from error
    if size is not None and size_of(part) < size:
        raise Again(f"the connection ended after {size_of(part)} of {size} bytes")
    checksum = sha256(part)
    for what, told, found in (("size", size, size_of(part)), ("checksum", expected, checksum)):
        if told is not None and found != told:
            part.unlink()
            raise Again(f"wrong {what}: expected {told}, got {found}")
    return checksum


def check_status(url: str, response: requests.Response, start: int, part: Path) -> None:
    """Sort the answers: go on, try again, give up."""
    status = response.status_code
    if status == 416 or status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        part.unlink(missing_ok=True)  # a range beyond the end or at another place: the part is not of this file
        raise Again("the server has other ranges than were asked for")
    if status in PASSING_STATUS:
        asked = response.headers.get("Retry-After", "")
        raise Again(f"{status} {response.reason}", float(asked) if asked.isdigit() else 0)
    if status not in (200, 206):
        raise UserError(f"{url}: {status} {response.reason}")


def what_is_told(response: requests.Response) -> tuple[int | None, str | None]:
    """
    What the server says of the whole file: size and SHA-256, None where it does not.
    The hub tells the SHA-256 in a header of the redirect, not of the storage that it leads to; the storage's own
    ETag is of any kind, so a plain ETag counts as a checksum only where there was no redirect.
    """
    first = response.history[0] if response.history else response
    tag = first.headers.get("X-Linked-ETag") or ("" if response.history else first.headers.get("ETag", ""))
    sha = re.fullmatch(r'(?:W/)?"?([0-9a-f]{64})"?', tag)
    if response.status_code == 206:
        length = response.headers["Content-Range"].rpartition("/")[2]
    else:
        length = response.headers.get("Content-Length", "")
    return int(length) if length.isdigit() else None, sha and sha[1]


def reason_of(error: Exception) -> str:
    """A network error in a few words; the libraries nest them several deep."""
    while isinstance(error.__cause__ or error.__context__, Exception):
        error = error.__cause__ or error.__context__
    return f"{type(error).__name__}: {error}"[:200]


def size_of(path: Path) -> int:
    """A file's size, 0 where there is none."""
    return path.stat().st_size if path.exists() else 0
