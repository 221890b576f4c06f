"""Downloads from a local server that answers like the hub, and fails like servers do. The oracle is hashlib."""
import hashlib
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat.corpus import download, make_dataset
from nanochat.data import shard_reader
from nanochat.runtime.errors import UserError

REPOSITORY = "somebody/something"


class Handler(BaseHTTPRequestHandler):
    """
    Serves `server.bodies` as the hub does, which states size and SHA-256. `server.faults[name]` is a list of what it
    does wrong with a file, one per request: a status, or "wrong" bytes.
    """

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        body = self.server.bodies.get(name, b"")
        tag = hashlib.sha256(body).hexdigest() if self.server.honest else "0" * 64
        fault = ""
        if self.command == "GET":
            self.server.requests.append(name)
            fault = self.server.faults[name].pop(0) if self.server.faults.get(name) else ""
        if fault == "wrong":
            body = bytes(len(body))
        self.send_response(int(fault) if fault.isdigit() else 200 if body else 404)
        for key, value in {"Content-Length": len(body), "X-Repo-Commit": "c" * 40, "ETag": f'"{tag}"'}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET


@pytest.fixture
def hub(base_folder, monkeypatch):
    """A shard set whose last shard is number 9; no pauses between tries."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies, server.texts, server.faults, server.requests, server.honest = {}, {}, {}, [], True
    for i in range(10):
        server.bodies[shard(i)], server.texts[i] = parquet_bytes(f"shard {i}")
    server.folder = base_folder / "data" / "climbmix"
    url = f"http://127.0.0.1:{server.server_port}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(download, "PAUSE_S", 0.01)
    hasty = types.SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    for module in ("file_download", "utils._http"):
        monkeypatch.setattr(f"huggingface_hub.{module}.time", hasty)
    monkeypatch.setitem(make_dataset.REMOTE, "climbmix", (REPOSITORY, 9))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


def shard(index: int) -> str:
    return f"shard_{index:05d}.parquet"


def parquet_bytes(tag: str, rows: int = 300) -> tuple[bytes, list[str]]:
    texts = [f"{tag} {i} " + np.random.default_rng(i).bytes(40).hex() for i in range(rows)]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=100)
    return sink.getvalue().to_pybytes(), texts


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fetched(server) -> set[str]:
    """The files whose bodies were asked for; asks anew."""
    # Once a day the hub's library asks which programs are agents.
    files = set(server.requests) - {"agent-harnesses"}
    server.requests.clear()
    return files


# ---- Data sets from the hub

def test_shards_come_verified_and_the_manifest_fits(hub):
    """A 503 and wrong bytes are tried again."""
    hub.faults = {shard(1): ["503"], shard(9): ["wrong"]}
    manifest = make_dataset.make("climbmix", num_shards=3)
    wanted = [0, 1, 2, 9]
    assert names(hub.folder) == ["manifest.json", *map(shard, wanted)]
    for entry, i in zip(manifest["shards"], wanted, strict=True):
        body = hub.bodies[shard(i)]
        assert (hub.folder / shard(i)).read_bytes() == body
        assert entry == {"file": shard(i), "rows": 300, "bytes": len(body), "text_bytes": sum(map(len, hub.texts[i])),
                         "sha256": hashlib.sha256(body).hexdigest()}
    assert list(shard_reader.iter_texts("climbmix", "val")) == hub.texts[9]
    assert list(shard_reader.iter_texts("climbmix", "train")) == hub.texts[0] + hub.texts[1] + hub.texts[2]


def test_more_shards_later_fetch_only_what_is_missing(hub):
    """What is there is compared with the hub, not fetched."""
    make_dataset.make("climbmix", num_shards=2)
    first = shard_reader.fingerprint("climbmix")
    assert fetched(hub) == {shard(0), shard(1), shard(9)}
    make_dataset.make("climbmix", num_shards=4)
    assert fetched(hub) == {shard(2), shard(3)}
    (hub.folder / shard(0)).unlink()
    (hub.folder / shard(1)).write_bytes(hub.bodies[shard(1)][:-1000])  # cut off on the disk
    (hub.folder / "manifest.json").unlink()
    make_dataset.make("climbmix", num_shards=2)
    assert fetched(hub) == {shard(0), shard(1)} and shard_reader.fingerprint("climbmix") == first
    assert (hub.folder / shard(1)).read_bytes() == hub.bodies[shard(1)]


def test_a_failed_download_is_no_data_set_and_keeps_the_old_one(hub, monkeypatch):
    monkeypatch.setattr(make_dataset, "DOWNLOADS", 1)
    body = hub.bodies.pop(shard(3))
    with pytest.raises(UserError, match=f"{shard(3)} of {REPOSITORY}: ") as caught:
        make_dataset.make("climbmix", num_shards=6)
    assert "\n" not in str(caught.value) and {shard(0), shard(1)} <= set(names(hub.folder))
    with pytest.raises(UserError, match="no data set 'climbmix'"):
        shard_reader.load_manifest("climbmix")
    make_dataset.make("climbmix", num_shards=1)
    with pytest.raises(UserError, match=shard(3)):
        make_dataset.make("climbmix", num_shards=6)
    assert len(shard_reader.load_manifest("climbmix")["shards"]) == 2
    hub.bodies[shard(3)] = body
    assert len(make_dataset.make("climbmix", num_shards=6)["shards"]) == 7


def test_what_is_not_the_shard_that_the_hub_states_is_not_kept(hub, monkeypatch):
    """A wrong checksum; and an error page, of whose checksum the server is sure."""
    monkeypatch.setattr(make_dataset, "DOWNLOADS", 1)
    hub.honest = False
    with pytest.raises(UserError, match=rf"{shard(0)} .*: wrong checksum"):
        make_dataset.make("climbmix", num_shards=1)
    hub.honest = True
    hub.bodies[shard(0)] = b"<html>please log in</html>"
    with pytest.raises(UserError, match=rf"{shard(0)} of {REPOSITORY}: .*parquet"):
        make_dataset.make("climbmix", num_shards=1)
    assert shard(0) not in names(hub.folder)
