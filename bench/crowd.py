"""
How long a newcomer waits while many connections keep a running server waiting.

    python -m scripts.chat_web
    python -m bench.crowd

600 connections send half of a request; 100 ask for a long stream and never read it. The newcomer comes from another
address of this machine, asks for the health, the page, and an answer of one token, five times each.
"""
import http.client
import json
import socket
import time
from contextlib import ExitStack

from configurator import configure

port = 8000                 # [1..65535] of the server on this machine
unfinished = 600            # [0..] connections that send half of a request
unread = 100                # [0..] connections that do not read the stream that they asked for
max_tokens = 400            # [1..] of each of these streams
repeats = 5                 # [1..] of the newcomer's requests
configure(globals())


def request(path: str, **fields) -> bytes:
    body = json.dumps(fields).encode() if fields else b""
    head = f"{'POST' if fields else 'GET'} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def timed(data: bytes) -> tuple[int, float]:
    """The status that a newcomer gets, and the seconds until the whole response is there."""
    start = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), timeout=300, source_address=("127.0.0.2", 0)) as raw:
        raw.sendall(data)
        response = http.client.HTTPResponse(raw)
        response.begin()
        response.read()
    return response.status, time.perf_counter() - start


def show(when: str) -> None:
    for name, data in (("health", request("/health")), ("the page", request("/")), ("one token", ask)):
        statuses, seconds = zip(*(timed(data) for _ in range(repeats)))
        print(f"{when:34} {name:10} status {sorted(set(statuses))}, at most {max(seconds):.3f} s")


def crowd(count: int, data: bytes) -> None:
    """Open that many connections that send the data, and never read."""
    for _ in range(count):
        raw = opened.enter_context(socket.socket())
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", port))
        raw.sendall(data)


connection = http.client.HTTPConnection("127.0.0.1", port)
connection.request("GET", "/v1/models")
model = json.loads(connection.getresponse().read())["data"][0]["id"]
chat = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}]}
ask = request("/v1/chat/completions", max_tokens=1, **chat)
show("alone")
with ExitStack() as opened:
    crowd(unfinished, request("/v1/chat/completions", **chat)[:-10])
    show(f"{unfinished} unfinished requests")
with ExitStack() as opened:
    crowd(unread, request("/v1/chat/completions", max_tokens=max_tokens, ignore_eos=True, stream=True, **chat))
    show(f"{unread} unread streams")
    crowd(unfinished, request("/v1/chat/completions", **chat)[:-10])
    show(f"{unread} and {unfinished} together")
show("afterwards")
