"""
Files from the network: whole and verified, or absent.

A file grows under `NAME.part`, with what the server said about it in `NAME.part.json`, and gets its name only when its
size and its SHA-256 are right. A broken connection goes on where it stopped (Range), provided that the file is still
the same (If-Range); a killed process leaves the part for the next one. What passes by itself (timeouts, 429, 5xx, a
cut or spoiled body) is tried again with growing pauses; anything else ends in one line.
"""
import contextlib
import json
import os
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import requests
import urllib3

from nanochat.errors import UserError
from nanochat.files import sha256, sync, write_text

CHUNK = 1 << 16
PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}
NOT_AN_ADDRESS = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    requests.exceptions.MissingSchema,
)
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Patience:
    """How long to wait, and how often to try again."""

    connect_s: float = 10      # until a connection stands
    read_s: float = 60         # without a single byte
    tries: int = 7             # in a row that bring nothing new
    first_pause_s: float = 1   # doubled each time, with jitter, up to
    longest_pause_s: float = 60


class Again(Exception):
    """This try failed, the next may not. `wait_s`: what the server asked for."""

    def __init__(self, reason: str, wait_s: float = 0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Stopped(Exception):
    """Another download failed, so this one was left where it was."""


def ignore(*_: object) -> None:
    """For those who do not want to know."""


@dataclass(frozen=True)
class Watch:
    """What to tell while files come; called from the workers' threads."""

    came: Callable[[int], None] = ignore     # bytes over the network
    line: Callable[[str], None] = ignore     # something to read: a pause and its reason


def fetch_all(
    files: list[tuple[str, Path]],
    inspect: Callable[[Path, str], None],
    workers: int,
    patience: Patience = Patience(),
    watch: Watch = Watch(),
) -> None:
    """
    Fetch (url, path) pairs, `workers` at a time. The first error stops all of them and is raised; what has come so
    far stays for the next call.

    inspect(file, SHA-256): called for every file before it gets its name, and for those that have it; ValueError
    from it means that the content is not what it should be.
    """
    stop = threading.Event()

    def work(url: str, path: Path) -> None:
        if stop.is_set():
            raise Stopped
        try:
            if path.exists():
                inspect_present(path, inspect)
            else:
                fetch(url, path, inspect, patience, watch, stop)
        except BaseException:
            stop.set()  # here, before this worker takes the next file
            raise

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, url, path) for url, path in files]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # an interrupt from the keyboard comes this way as well
            stop.set()
            pool.shutdown(cancel_futures=True)
    errors = [error for future in done if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error


def inspect_present(path: Path, inspect: Callable[[Path, str], None]) -> None:
    """Look at a file that has its name already; UserError when the disk has spoilt it since."""
    try:
        inspect(path, sha256(path))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it and run the same command again") from error


def fetch(
    url: str,
    path: Path,
    inspect: Callable[[Path, str], None] = ignore,
    patience: Patience = Patience(),
    watch: Watch = Watch(),
    stop: threading.Event | None = None,
) -> None:
    """Fetch one file, see `fetch_all`. Raises UserError when the server will not give it."""
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    stop = stop or threading.Event()
    failures, furthest = 0, size_of(part)
    while True:
        try:
            checksum = attempt(url, part, patience, watch, stop)
            try:
                inspect(part, checksum)
            except ValueError as error:
                discard(part)
                raise Again(f"this is not the file that it should be: {error}") from error
            sync(part)
            os.replace(part, path)
            sync(path.parent)
            note_of(part).unlink(missing_ok=True)
            return
        except Again as error:
            # Only a try that gets further than any before it counts as progress: no server can keep us here for ever.
            failures = 1 if size_of(part) > furthest else failures + 1
            furthest = max(furthest, size_of(part))
            if failures >= patience.tries:
                raise UserError(
                    f"{url}: {error} ({failures} times in a row); "
                    "the same command goes on from here, --url=… tries a mirror"
                ) from error
            pause = min(patience.longest_pause_s, patience.first_pause_s * 2 ** (failures - 1))
            pause = max(pause * random.uniform(0.5, 1), min(error.wait_s, patience.longest_pause_s))
            watch.line(f"{path.name}: {error}; next try in {pause:.0f} s")
            if stop.wait(pause):
                raise Stopped from None


def attempt(url: str, part: Path, patience: Patience, watch: Watch, stop: threading.Event) -> str:
    """One request that starts, or goes on with, the part. Returns its SHA-256 once it is whole; else raises Again."""
    note = read_note(part)
    start = size_of(part) if note.get("validator") or note.get("sha256") else 0
    if start and start == note.get("size"):  # it was whole when the last process was killed
        return verified(part, note)
    headers = {"Accept-Encoding": "identity"}  # or the length would be that of the compressed body
    if start:
        headers["Range"] = f"bytes={start}-"
        if note.get("validator"):
            headers["If-Range"] = note["validator"]
    try:
        with requests.get(url, headers=headers, stream=True, timeout=(patience.connect_s, patience.read_s)) as response:
            check_status(url, response, start, part)
            told = what_is_told(response)
            if response.status_code == 206:
                check_continuation(response, start, note, told, part)
            else:
                part.unlink(missing_ok=True)
                write_text(note_of(part), json.dumps(told))
            receive(response, part, watch, stop)
    except NOT_AN_ADDRESS as error:
        raise UserError(f"{url} is not an address to download from: {error}") from error
    except (requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError, TimeoutError) as error:
        raise Again(reason_of(error)) from error
    return verified(part, told)


def check_status(url: str, response: requests.Response, start: int, part: Path) -> None:
    """Sort the answers: go on, try again, give up."""
    status = response.status_code
    if status in (200, 206) and not (status == 206 and start == 0):
        return
    if status in (206, 416):  # a range nobody asked for, or one beyond the end: the part is not of this file
        discard(part)
        raise Again("the server has other ranges than were asked for")
    reason = f"{status} {response.reason}"
    if status in PASSING_STATUS:
        asked = response.headers.get("Retry-After", "")
        raise Again(reason, float(asked) if asked.isdigit() else 0)
    raise UserError(f"{url}: {reason}")


def what_is_told(response: requests.Response) -> dict:
    """
    What the server says of the file: `size`, `sha256` and `validator` (for If-Range), None where it does not.
    The hub tells size and SHA-256 in X-Linked headers of the redirect, not of the storage that it leads to; the
    storage's own ETag is of any kind, so a plain ETag counts as a checksum only where there was no redirect.
    """
    told: dict = {"size": None, "sha256": None}
    for answer in [*response.history, response]:
        tag = answer.headers.get("X-Linked-ETag") or (answer.headers.get("ETag", "") if not response.history else "")
        if SHA256.fullmatch(tag.removeprefix("W/").strip('"')):
            told["sha256"] = tag.removeprefix("W/").strip('"')
        if answer.headers.get("X-Linked-Size", "").isdigit():
            told["size"] = int(answer.headers["X-Linked-Size"])
    if told["size"] is None:
        length = response.headers.get("Content-Range", "").rpartition("/")[2]
        length = length if response.status_code == 206 else response.headers.get("Content-Length", "")
        told["size"] = int(length) if length.isdigit() else None
    tag = response.headers.get("ETag", "")
    weak = not tag or tag.startswith("W/")  # equal weak tags do not promise equal bytes
    told["validator"] = response.headers.get("Last-Modified") if weak else tag
    return told


def check_continuation(response: requests.Response, start: int, note: dict, told: dict, part: Path) -> None:
    """Make sure that a 206 continues the file the part was begun from."""
    begins = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    same = all(told[key] == note.get(key) for key in ("size", "sha256"))
    if begins != str(start) or not same:
        discard(part)
        raise Again("the file has changed on the server, or the server continued it at the wrong place")


def receive(response: requests.Response, part: Path, watch: Watch, stop: threading.Event) -> None:
    """Append the body to the part as it comes."""
    with open(part, "ab") as file:
        for chunk in response.iter_content(CHUNK):
            file.write(chunk)
            watch.came(len(chunk))
            if stop.is_set():
                raise Stopped


def verified(part: Path, told: dict) -> str:
    """The SHA-256 of a part that is as large as was told and, where a checksum was told, has it; else Again."""
    size, expected = size_of(part), told.get("size")
    if expected is not None and size < expected:
        raise Again(f"the connection ended after {size} of {expected} bytes")
    checksum = sha256(part)
    if expected is not None and size > expected:
        discard(part)
        raise Again(f"wrong size: expected {expected} bytes, got {size}")
    if told.get("sha256") and told["sha256"] != checksum:
        discard(part)
        raise Again(f"wrong checksum: expected {told['sha256']}, got {checksum}")
    return checksum


def reason_of(error: Exception) -> str:
    """A network error in a few words; the libraries nest them several deep."""
    while isinstance(error.__cause__ or error.__context__, Exception):
        error = error.__cause__ or error.__context__
    return f"{type(error).__name__}: {error}"[:200]


def note_of(part: Path) -> Path:
    """Where a part's origin is written down."""
    return part.with_name(part.name + ".json")


def read_note(part: Path) -> dict:
    """What was told of the file when the part was begun; empty where that is lost."""
    with contextlib.suppress(OSError, ValueError):
        note = json.loads(note_of(part).read_text())
        return note if isinstance(note, dict) else {}
    return {}


def size_of(path: Path) -> int:
    """A file's size, 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def discard(part: Path) -> None:
    """Remove a part that is of no use."""
    part.unlink(missing_ok=True)
    note_of(part).unlink(missing_ok=True)
