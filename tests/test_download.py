"""Downloads against a local server that does everything servers do wrong. The oracle is hashlib on what it meant to send."""
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import dataset
from nanochat.corpus import make_dataset
from nanochat.corpus.download import Patience, fetch_all
from nanochat.errors import UserError

ROOT = Path(__file__).parent.parent
QUICK = Patience(connect_s=2, read_s=0.5, tries=4, first_pause_s=0.01, longest_pause_s=0.05)
BODY = np.random.default_rng(0).bytes(600_000)
DIGEST = hashlib.sha256(BODY).hexdigest()


class Bar:
    """Stands for the progress bar and keeps what it is told."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.lines: list[str] = []
        self.update, self.write = self.came.append, self.lines.append


def fetch(url: str, path: Path, inspect=lambda file, digest: None, patience=QUICK, bar=None) -> None:
    fetch_all([(url, path)], inspect, 1, patience, bar or Bar())


class Handler(BaseHTTPRequestHandler):
    """Serves `server.bodies` by path; `server.faults[path]` is a list of what to do wrong, one per request."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_GET(self) -> None:
        server, path = self.server, self.path.lstrip("/")
        with server.lock:
            faults = server.faults.get(path, [])
            fault = faults.pop(0) if faults else ""
            server.requests.append((path, self.headers.get("Range"), fault))
        target = path.removeprefix("storage/")
        if target not in server.bodies:
            return self.send_error(404)
        if fault.isdigit():
            self.send_response(int(fault))
            self.send_header("Retry-After", "1")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if fault == "hang before":
            return server.released.wait(5)
        body = server.bodies[target]
        tag = hashlib.sha256(body).hexdigest() if fault != "wrong tag" else "0" * 64
        if server.hub and path == target:  # like the hub: what counts is told in a redirect
            self.send_response(302)
            self.send_header("Location", f"/storage/{path}")
            self.send_header("X-Linked-ETag", f'"{tag}"')
            self.send_header("X-Linked-Size", str(len(body)))
            self.send_header("ETag", '"of the redirect"')
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.serve(body, f'"{tag[:32] if server.hub else tag}"', fault)

    def serve(self, body: bytes, tag: str, fault: str) -> None:
        start = 0
        asked = self.headers.get("Range")
        unchanged = self.headers.get("If-Range", tag) == tag
        if asked and unchanged and fault != "no ranges":
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(body):
                self.send_response(416)
                self.send_header("Content-Length", "0")
                return self.end_headers()
            self.send_response(206)
            shown = start + 7 if fault == "other range" else start
            self.send_header("Content-Range", f"bytes {shown}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        sent = body[start:]
        if fault == "spoilt":
            sent = sent[:100] + bytes(100) + sent[200:]
        if self.server.tags:
            self.send_header("ETag", tag)
        self.send_header("Connection", "close")
        if fault not in ("no length", "short without length"):
            self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        if fault in ("drop", "short without length"):
            sent = sent[: min(200_000, len(sent) // 2)]
        if fault.startswith("hang"):
            self.wfile.write(sent[:150_000])
            self.wfile.flush()
            self.server.released.wait(5)
        elif fault == "slow":
            for i in range(0, len(sent), 20_000):
                self.wfile.write(sent[i : i + 20_000])
                time.sleep(self.server.pause)
        else:
            self.wfile.write(sent)
        self.close_connection = True


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        pass  # clients that hang up are part of the tests


@pytest.fixture(params=["plain", "hub"])
def server(request):
    server = QuietServer(("127.0.0.1", 0), Handler)
    server.bodies, server.faults, server.requests = {"file": BODY}, {}, []
    server.hub, server.tags, server.pause = request.param == "hub", True, 0.05
    server.lock, server.released = threading.Lock(), threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join(10)
    server.server_close()


def fault(server, *faults: str, path: str = "file") -> None:
    """What goes wrong, request by request; on a hub-like server it does so in the storage behind the redirect."""
    server.faults[f"storage/{path}" if server.hub else path] = list(faults)


def asked(server, path: str = "file") -> list[tuple[str | None, str]]:
    """(Range, fault) of the requests for a file's body."""
    wanted = f"storage/{path}" if server.hub else path
    return [(span, fault) for name, span, fault in server.requests if name == wanted]


def whole(tmp_path: Path) -> bool:
    """Whether the file is there, right, and alone."""
    return [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == BODY


def test_a_file_that_comes_at_once(server, tmp_path):
    bar, seen = Bar(), []
    fetch(f"{server.url}/file", tmp_path / "file", lambda path, digest: seen.append(digest), bar=bar)
    assert whole(tmp_path) and sum(bar.came) == len(BODY) and seen == [DIGEST] and not bar.lines


@pytest.mark.parametrize("what", ["drop", "hang after", "hang before", "500", "502", "503", "429", "spoilt", "no ranges"])
def test_what_passes_is_tried_again(server, tmp_path, what):
    fault(server, what, what)
    fetch(f"{server.url}/file", tmp_path / "file")
    assert whole(tmp_path)
    assert len(asked(server)) == (1 if what == "no ranges" else 3)


@pytest.mark.parametrize("what", ["hang before", "500", "429", "spoilt"])
def test_what_never_passes_ends_in_one_line(server, tmp_path, what):
    fault(server, *[what] * 20)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"/file: .* \(\d times in a row\); the same command goes on from here") as caught:
        fetch(f"{server.url}/file", tmp_path / "file")
    assert "\n" not in str(caught.value) and time.monotonic() - began < 60
    assert not (tmp_path / "file").exists()
    fault(server)
    fetch(f"{server.url}/file", tmp_path / "file")
    assert whole(tmp_path)


def test_a_dropped_connection_goes_on_where_it_stopped(server, tmp_path):
    """More drops than tries: as long as each try brings something, it goes on."""
    fault(server, *["drop"] * 6)
    bar = Bar()
    fetch(f"{server.url}/file", tmp_path / "file", bar=bar)
    spans = [span for span, _ in asked(server)]
    starts = [int(span.removeprefix("bytes=").rstrip("-")) for span in spans[1:]]
    assert whole(tmp_path) and len(spans) == 7 and spans[0] is None
    assert starts == sorted(starts) and sum(bar.came) == len(BODY)  # no byte travelled twice


def test_a_server_that_ignores_ranges_starts_anew_and_cannot_keep_us_for_ever(server, tmp_path):
    fault(server, "drop", "no ranges")
    fetch(f"{server.url}/file", tmp_path / "file")
    assert whole(tmp_path)
    (tmp_path / "file").unlink()

    class OnlyHalf(Handler):
        def serve(self, body, tag, fault):
            del self.headers["Range"]
            super().serve(body, tag, "drop")

    server.RequestHandlerClass = OnlyHalf
    server.requests.clear()
    with pytest.raises(UserError, match="4 times in a row"):
        fetch(f"{server.url}/file", tmp_path / "file")
    assert len(asked(server)) == 4 and not (tmp_path / "file").exists()


def test_a_file_that_changes_on_the_server_is_not_stitched_together(server, tmp_path):
    fault(server, "drop", "503", "503", "503", "503")
    with pytest.raises(UserError, match="503"):
        fetch(f"{server.url}/file", tmp_path / "file")
    assert 0 < (tmp_path / "file.part").stat().st_size < len(BODY)
    server.bodies["file"] = new = BODY[::-1]
    fault(server)
    fetch(f"{server.url}/file", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == new


def test_a_continuation_at_the_wrong_place_starts_anew(server, tmp_path):
    fault(server, "drop", "other range")
    fetch(f"{server.url}/file", tmp_path / "file")
    assert whole(tmp_path)


def test_a_part_of_another_file_is_not_trusted(server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"wrong" * 1000)
    fetch(f"{server.url}/file", tmp_path / "file")
    assert whole(tmp_path)


def test_a_part_larger_than_the_file_starts_anew(server, tmp_path):
    fault(server, "drop", "503", "503", "503", "503")
    with pytest.raises(UserError):
        fetch(f"{server.url}/file", tmp_path / "file")
    with open(tmp_path / "file.part", "ab") as file:
        file.write(bytes(len(BODY)))
    fault(server)
    fetch(f"{server.url}/file", tmp_path / "file")
    assert whole(tmp_path)


def test_a_whole_part_of_a_killed_process_does_no_harm(server, tmp_path):
    for body in (BODY, BODY[:-1] + b"?"):
        (tmp_path / "file").unlink(missing_ok=True)
        (tmp_path / "file.part").write_bytes(body)
        fetch(f"{server.url}/file", tmp_path / "file")
        assert whole(tmp_path)


def test_a_wrong_checksum_is_never_given_the_name(server, tmp_path):
    server.faults["file"] = ["wrong tag"] * 20  # the hub tells it in the redirect, a plain server in the answer
    with pytest.raises(UserError, match=rf"wrong checksum: expected {'0' * 64}, got {DIGEST} \(4 times"):
        fetch(f"{server.url}/file", tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_the_storage_behind_a_redirect_may_have_any_etag(server, tmp_path):
    """Storage servers use 64 hex digits of hashes of their own: only the hub's own word is a SHA-256."""
    if not server.hub:
        pytest.skip("there is no redirect")

    class OtherHash(Handler):
        def serve(self, body, tag, fault):
            super().serve(body, f'"{"f" * 64}"', fault)

    server.RequestHandlerClass = OtherHash
    fetch(f"{server.url}/file", tmp_path / "file")
    assert whole(tmp_path)


def test_nothing_told_but_the_content_is_looked_at(server, tmp_path):
    """No length, no checksum and a connection that just ends: only the content shows that it is cut."""
    server.hub = server.tags = False

    def inspect(file: Path, digest: str) -> None:
        if digest != DIGEST:
            raise ValueError("cut")

    fault(server, "short without length")
    server.faults["file"].append("no length")
    fetch(f"{server.url}/file", tmp_path / "file", inspect)
    assert whole(tmp_path) and len(asked(server)) == 2


@pytest.mark.parametrize("status", ["401", "403", "404", "410", "451"])
def test_a_refusal_is_final(server, tmp_path, status):
    server.faults["file"] = [status] * 5
    with pytest.raises(UserError, match=f"/file: {status} "):
        fetch(f"{server.url}/file", tmp_path / "file")
    assert len(server.requests) == 1 and list(tmp_path.iterdir()) == []


def test_no_server_and_no_address(tmp_path):
    with socket.socket() as silent, pytest.raises(UserError, match=r"ConnectionRefused.* \(4 times in a row\)"):
        silent.bind(("127.0.0.1", 0))  # nobody listens, and nobody else can
        fetch(f"http://127.0.0.1:{silent.getsockname()[1]}/file", tmp_path / "file")
    for url in ("nonsense", "ftp://127.0.0.1/file", "http://"):
        with pytest.raises(UserError, match="not an address to download from"):
            fetch(url, tmp_path / "file")


def test_pauses_double_and_follow_the_server(server, tmp_path, monkeypatch):
    """What is waited for is asked of the event that stops it; that so much time passes, the server's clock says."""
    bar, pauses = Bar(), []

    class Recorded(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            return super().wait(timeout)

    monkeypatch.setattr("nanochat.corpus.download.threading", types.SimpleNamespace(Event=Recorded))
    patience = Patience(connect_s=2, read_s=0.5, tries=5, first_pause_s=0.1, longest_pause_s=0.4)
    server.faults["file"] = ["hang before", "hang before", "503", "503"]
    times = []

    class Clocked(Handler):
        def do_GET(self):
            times.append(time.monotonic())
            super().do_GET()

    server.RequestHandlerClass = Clocked
    fetch(f"{server.url}/file", tmp_path / "file", patience=patience, bar=bar)
    pauses = [pause for pause in pauses if pause is not None]
    assert all(low <= pause <= high for low, pause, high in zip([0.05, 0.1, 0.4, 0.4], pauses, [0.1, 0.2, 0.4, 0.4], strict=True)), pauses
    assert all(np.diff(times[:5]) >= np.add(pauses, [0.45, 0.45, 0, 0])), "the first two include the read timeout"
    assert len(bar.lines) == 4 and all(line.startswith("file: ") for line in bar.lines)


def test_one_failure_stops_all_and_keeps_what_came(server, tmp_path):
    """Two workers: 0 and 1 have come when 3 fails; 2 is slow and is left where it is; 4 and 5 are not begun."""
    server.bodies |= {f"{i}": BODY for i in range(6)}
    fault(server, "slow", path="2")
    server.pause = 0.3
    fault(server, "404", path="3")
    jobs = [(f"{server.url}/{i}", tmp_path / f"{i}") for i in range(6)]
    began = time.monotonic()
    with pytest.raises(UserError, match="/3: 404"):
        fetch_all(jobs, lambda file, digest: None, 2, QUICK, Bar())
    assert time.monotonic() - began < 8  # the slow one would take 9 s
    assert {path.name for path in tmp_path.iterdir()} - {"2.part"} == {"0", "1"}
    server.requests.clear()
    fetch_all(jobs, lambda file, digest: None, 2, QUICK, Bar())
    assert all((tmp_path / f"{i}").read_bytes() == BODY for i in range(6)) and len(list(tmp_path.iterdir())) == 6
    assert not {"0", "1"} & {path for path, _, _ in server.requests}


# ---- Whole data sets

def parquet_bytes(tag: str, rows: int = 300) -> tuple[bytes, list[str]]:
    texts = [f"{tag} {i} " + np.random.default_rng(i).bytes(40).hex() for i in range(rows)]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=100)
    return sink.getvalue().to_pybytes(), texts


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    """A mirror of a shard set whose last shard is number 9."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(make_dataset, "PATIENCE", QUICK)
    monkeypatch.setitem(make_dataset.HUB, "climbmix", ("somebody/something", 9))
    server.texts = {}
    for i in range(10):
        server.bodies[f"shard_{i:05d}.parquet"], server.texts[i] = parquet_bytes(f"shard {i}")
    return server


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "data" / "climbmix").iterdir())


def test_shards_come_verified_and_the_manifest_fits(hub, tmp_path, capsys):
    fault(hub, "drop", "503", path="shard_00001.parquet")
    fault(hub, "spoilt", path="shard_00009.parquet")
    manifest = make_dataset.make("climbmix", num_shards=3, url=hub.url + "/")
    wanted = [0, 1, 2, 9]
    assert names(tmp_path) == ["manifest.json"] + [f"shard_{i:05d}.parquet" for i in wanted]
    for entry, i in zip(manifest["shards"], wanted, strict=True):
        body = hub.bodies[f"shard_{i:05d}.parquet"]
        assert entry == {
            "file": f"shard_{i:05d}.parquet", "rows": 300, "bytes": len(body),
            "text_bytes": sum(map(len, hub.texts[i])), "sha256": hashlib.sha256(body).hexdigest(),
        }
    assert list(dataset.iter_texts("climbmix", "val")) == hub.texts[9]
    assert list(dataset.iter_texts("climbmix", "train")) == hub.texts[0] + hub.texts[1] + hub.texts[2]
    assert "climbmix: 1,200 documents" in capsys.readouterr().out
    dataset.verify("climbmix")


def test_more_shards_later_fetch_only_what_is_missing(hub, tmp_path):
    make_dataset.make("climbmix", num_shards=2, url=hub.url)
    first = dataset.fingerprint("climbmix")
    hub.requests.clear()
    make_dataset.make("climbmix", num_shards=2, url=hub.url)
    assert not hub.requests and dataset.fingerprint("climbmix") == first
    make_dataset.make("climbmix", num_shards=4, url=hub.url)
    assert {path.removeprefix("storage/") for path, _, _ in hub.requests} == {"shard_00002.parquet", "shard_00003.parquet"}
    make_dataset.make("climbmix", url=hub.url)  # all there are
    assert len(dataset.load_manifest("climbmix")["shards"]) == 10
    hub.requests.clear()
    make_dataset.make("climbmix", num_shards=2, url=hub.url)
    assert not hub.requests and dataset.fingerprint("climbmix") == first
    (tmp_path / "data" / "climbmix" / "shard_00000.parquet").unlink()
    (tmp_path / "data" / "climbmix" / "manifest.json").unlink()  # what is there is looked at again, not fetched
    make_dataset.make("climbmix", num_shards=2, url=hub.url)
    assert {path.removeprefix("storage/") for path, _, _ in hub.requests} == {"shard_00000.parquet"}
    assert dataset.fingerprint("climbmix") == first


def test_a_failed_download_is_no_data_set_and_keeps_the_old_one(hub, tmp_path):
    del hub.bodies["shard_00001.parquet"]
    with pytest.raises(UserError, match=r"shard_00001\.parquet: 404"):
        make_dataset.make("climbmix", num_shards=3, url=hub.url, workers=1)
    with pytest.raises(UserError, match="no data set 'climbmix'"):
        dataset.load_manifest("climbmix")
    make_dataset.make("climbmix", num_shards=1, url=hub.url)
    with pytest.raises(UserError, match=r"shard_00001\.parquet: 404"):
        make_dataset.make("climbmix", num_shards=3, url=hub.url)
    assert len(dataset.load_manifest("climbmix")["shards"]) == 2


def test_a_shard_that_is_no_parquet_file_or_has_no_text(hub, tmp_path):
    """The server is sure of what it sends, size and checksum agree, and yet it is an error page."""
    hub.bodies["shard_00000.parquet"] = b"<html>please log in</html>"
    with pytest.raises(UserError, match=r"shard_00000\.parquet: this is not the file that it should be: not a whole parquet"):
        make_dataset.make("climbmix", num_shards=1, url=hub.url, workers=1)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"body": ["a"]}), sink)
    hub.bodies["shard_00000.parquet"] = sink.getvalue().to_pybytes()
    with pytest.raises(UserError, match="it has no column 'text'"):
        make_dataset.make("climbmix", num_shards=1, url=hub.url, workers=1)
    assert not [name for name in names(tmp_path) if "00000" in name]


def test_a_shard_that_was_damaged_on_disk_is_mended(hub, tmp_path, capsys):
    make_dataset.make("climbmix", num_shards=2, url=hub.url)
    shard = tmp_path / "data" / "climbmix" / "shard_00001.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1000])
    hub.requests.clear()
    make_dataset.make("climbmix", num_shards=2, url=hub.url)
    assert "shard_00001.parquet is damaged (not a whole parquet file" in capsys.readouterr().out
    assert shard.read_bytes() == whole and {path.removeprefix("storage/") for path, _, _ in hub.requests} == {shard.name}


def test_a_killed_download_goes_on(hub, tmp_path):
    """SIGKILL in mid-file: no data set is there; the next run asks only for the rest."""
    body, texts = parquet_bytes("large", rows=10_000)
    hub.bodies["shard_00000.parquet"] = body
    fault(hub, "slow", path="shard_00000.parquet")
    code = "from nanochat.corpus import make_dataset; make_dataset.HUB['climbmix'] = ('', 9);"
    code += f"make_dataset.make('climbmix', num_shards=1, url={hub.url!r})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part = tmp_path / "data" / "climbmix" / "shard_00000.parquet.part"
    deadline = time.monotonic() + 200
    while not (part.exists() and part.stat().st_size > 200_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = part.stat().st_size
    with pytest.raises(UserError, match="no data set"):
        dataset.load_manifest("climbmix")
    hub.requests.clear()
    make_dataset.make("climbmix", num_shards=1, url=hub.url)
    assert asked(hub, "shard_00000.parquet") == [(f"bytes={kept}-", "")] and 200_000 < kept < len(body)
    assert list(dataset.iter_texts("climbmix", "train")) == texts
    assert names(tmp_path) == ["manifest.json", "shard_00000.parquet", "shard_00009.parquet"]


def test_the_command_downloads_and_fails_in_one_line(hub, tmp_path):
    hub.bodies["shard_01822.parquet"] = hub.bodies["shard_00009.parquet"]
    arguments = ["--source=fineweb-edu", "--num_shards=1", f"--url={hub.url}", "--workers=2"]
    command = [sys.executable, "-m", "scripts.dataset", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "fineweb-edu: 600 documents" in done.stdout and len(dataset.load_manifest("fineweb-edu")["shards"]) == 2
    del hub.bodies["shard_00000.parquet"]
    failed = subprocess.run([*command, "--name=other"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert failed.returncode == 1
    assert failed.stderr.strip().splitlines()[-1].startswith(f"error: {hub.url}/shard_00000.parquet: 404")
    assert "Traceback" not in failed.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_keeps_the_part_and_goes_on(hub, tmp_path, monkeypatch):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        monkeypatch.setenv("NANOCHAT_BASE_DIR", str(small))
        make_dataset.make("climbmix", num_shards=1, url=hub.url)
        before = dataset.fingerprint("climbmix")
        hub.bodies["shard_00001.parquet"], texts = parquet_bytes("large", rows=15_000)
        with pytest.raises(UserError, match="cannot make .*climbmix: No space left on device") as caught:
            make_dataset.make("climbmix", num_shards=2, url=hub.url)
        assert "\n" not in str(caught.value) and dataset.fingerprint("climbmix") == before
        dataset.verify("climbmix")
        kept = (small / "data" / "climbmix" / "shard_00001.parquet.part").stat().st_size
        assert kept > 200_000
        subprocess.run(["mount", "-o", "remount,size=8m", str(small)], check=True)
        make_dataset.make("climbmix", num_shards=2, url=hub.url)
        assert asked(hub, "shard_00001.parquet")[-1][0] == f"bytes={kept}-"
        assert list(dataset.iter_texts("climbmix", "train"))[300:] == texts
    finally:
        subprocess.run(["umount", str(small)], check=True)
