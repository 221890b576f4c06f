"""The chat server as its clients meet it: a real process, the official client, raw sockets; some parts inside this process."""
import asyncio
import contextlib
import json
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
import uvicorn

import nanochat.responses
import nanochat.serving
import nanochat.web
from nanochat.answers import Unavailable, Work
from nanochat.conversation import render_prompt
from nanochat.engine import Engine
from nanochat.errors import UserError
from nanochat.gpt import GPT, GPTConfig
from nanochat.pieces import Piece, StopStrings, to_parts
from nanochat.responses import MAX_CONNECTIONS, Impatient
from nanochat.sampling import Sampling
from nanochat.serving import ServedModel, Worker
from nanochat.web import Limits, create_app
from conftest import REPO
from test_engine import SPECIAL, TOKENIZER, V, write_checkpoint

KEY = "a-secret"
MARKER = "xyzzy"            # in what users write here, never in the log
PLACES, QUEUE = 8, 28
GREEDY = {"temperature": 0}
LIMITS = Limits(10**6, 10, 10**5, 2000, 60.0, 0.0, 0)
# What the talking model says, every time. Its tokens are single bytes.
SAID = [{"type": "text", "text": "Wel 😀:"}, {"type": "python", "text": "12*3"}, {"type": "python_output", "text": "36"}, {"type": "text", "text": "so,北!"}]


def writing_model() -> GPT:
    """Random, with a long context, and stop tokens that are hardly ever drawn: its answers are as long as one likes."""
    model = GPT(GPTConfig(sequence_len=2048, vocab_size=V, n_layer=2, n_embd=64, n_head=4, n_kv_head=2))
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        p.data.normal_(0, 0.5 if "lm_head" in name else 1 if "wte" in name else 1.5 * p.size(1) ** -0.5, generator=generator)
    model.lm_head.weight.data[[SPECIAL("<|assistant_end|>"), SPECIAL("<|bos|>")]] = 0
    return model


def talking_model() -> GPT:
    """After each token one other is certain: blocks that do nothing, embeddings that are unit vectors, and a head that maps them."""
    model = GPT(GPTConfig(sequence_len=256, vocab_size=V, n_layer=1, n_embd=320, n_head=5, n_kv_head=5))
    for p in model.parameters():
        p.data.zero_()
    model.transformer.wte.weight.data.copy_(torch.eye(320))
    ids = [SPECIAL("<|assistant_start|>"), *SAID[0]["text"].encode(), SPECIAL("<|python_start|>"), *b"12*3", SPECIAL("<|python_end|>")]
    for chain in (ids, [SPECIAL("<|output_end|>"), *SAID[3]["text"].encode(), SPECIAL("<|assistant_end|>")]):
        for before, after in zip(chain, chain[1:]):
            model.lm_head.weight.data[after, before] = 10.0
    return model


def chat(*contents) -> list[dict]:
    return [{"role": role, "content": content} for role, content in zip(["user", "assistant"] * len(contents), contents)]


def prompt_of(messages: list[dict]) -> list[int]:
    return render_prompt(TOKENIZER, {"messages": messages})


def text_of(tokens: list[int]) -> str:
    return "".join(part["text"] for part in to_parts(TOKENIZER, tokens) if part["type"] == "text")


# ---- A server, in a process of its own


class Running:
    def __init__(self, folder):
        write_checkpoint(folder / "sft_checkpoints" / "tiny" / "step_000001", writing_model())
        write_checkpoint(folder / "rl_checkpoints" / "tiny" / "step_000001", talking_model())
        self.log = folder / "log"
        command = [sys.executable, "-m", "scripts.chat_web", "--source=sft, rl", "--port=0", "--device_type=cpu", "--dtype=float32", f"--max_batch={PLACES}",
                   f"--max_queue={QUEUE}", "--max_body_bytes=100000", "--max_messages=9", "--max_chars=50000", "--max_new_tokens=2000"]
        env = os.environ | {"NANOCHAT_BASE_DIR": str(folder), "NANOCHAT_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, cwd=REPO, env=env, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 300
        while not (found := re.match(r"(http://127.0.0.1:(\d+)) serves tiny-sft, tiny-rl", self.log.read_text())):
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        self.url, self.port = found[1], int(found[2])
        self.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=300)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def connect(self, length: int) -> socket.socket:
        """A raw connection on which the head of a request for chat was sent, whose body is that long."""
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=200)
        head = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", "Content-Type: application/json", f"Content-Length: {length}"]
        raw.sendall("\r\n".join([*head, "", ""]).encode())
        return raw

    def metric(self, name: str) -> float:
        return sum(float(line.split()[-1]) for line in self.http.get("/metrics").text.splitlines() if line.startswith(name + "{"))

    def wait_until(self, name: str, value: float) -> None:
        deadline = time.monotonic() + 200
        while (now := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} stays {now}"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Those that were started: the last one may be alive."""
    started = []
    yield started
    for running in started:
        running.process.kill()
        running.process.wait()


@pytest.fixture
def server(servers, tmp_path_factory):
    """One for all tests; another one after the test that ends it, which is the last in the file."""
    if not servers or servers[-1].process.poll() is not None:
        servers.append(Running(tmp_path_factory.mktemp("server")))
    return servers[-1]


@pytest.fixture(scope="module")
def engines():
    """The same models in this process."""
    return {"tiny-sft": Engine(writing_model(), TOKENIZER), "tiny-rl": Engine(talking_model(), TOKENIZER)}


def test_the_official_client_chats(server, engines):
    """Whole and as a stream: the text of Engine.generate, the calculator's part apart from it, usage, and characters whole."""
    parts = [{"type": "text", "text": f"{MARKER} <|assistant_end|>"}, {"type": "text", "text": "?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    same = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{MARKER} <|assistant_end|>?"}]
    prompt = prompt_of(same)
    assert SPECIAL("<|assistant_end|>") not in prompt, "what users write is text"
    expected = engines["tiny-rl"].generate([prompt])[0]
    assert to_parts(TOKENIZER, expected.tokens) == SAID, "the model does what it was made for"

    ask = {"model": "tiny-rl", "messages": messages}
    whole = server.client.chat.completions.create(**ask, user="me", store=False, presence_penalty=0, response_format={"type": "text"})
    [choice] = whole.choices
    assert (whole.object, whole.model, choice.finish_reason, choice.message.role) == ("chat.completion", "tiny-rl", "stop", "assistant")
    assert choice.message.content == "Wel 😀:so,北!" and choice.message.parts == SAID
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(expected.tokens), "total_tokens": len(prompt) + len(expected.tokens)}
    assert whole.usage.model_dump(include=set(usage)) == usage

    *chunks, last = server.client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.model_dump(include=set(usage)) == usage
    assert len({chunk.id for chunk in [*chunks, last]}) == 1 and chunks[0].id != whole.id
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant" and not any(delta.role for delta in deltas[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    texts = [delta.content for delta in deltas if delta.content]
    assert "".join(texts) == choice.message.content and not any("\ufffd" in text for text in texts)
    parts = [delta.part for delta in deltas if hasattr(delta, "part")]
    assert ["".join(part["text"] for part in parts if part["type"] == kind) for kind in ("python", "python_output")] == ["12*3", "36"]

    # What was received can be sent back as it is, and is what the model wrote.
    again = server.client.chat.completions.create(model="tiny-rl", messages=[*messages, choice.message, {"role": "user", "content": "Go on"}])
    sent = [*same, {"role": "assistant", "content": SAID}, {"role": "user", "content": "Go on"}]
    assert again.usage.prompt_tokens == len(prompt_of(sent)) and again.choices[0].message.content == choice.message.content


def test_stop_strings_whatever_the_tokens(server):
    """Every token of this model is a byte: each string begins in one token and ends in another, one even beyond the calculator's part."""
    for stop, content in (("o,北", "Wel 😀:s"), (["zz", " 😀"], "Wel"), (":s", "Wel 😀"), (["never", "北!?"], "Wel 😀:so,北!")):
        ask = {"model": "tiny-rl", "messages": chat("?"), "stop": stop}
        [choice] = server.client.chat.completions.create(**ask).choices
        assert (choice.message.content, choice.finish_reason) == (content, "stop")
        chunks = list(server.client.chat.completions.create(**ask, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content


def test_samples_seeds_and_lengths(server, engines):
    """n samples of one seed are the engine's; greedy is greedy; a length ends an answer, the server's own limit as well."""
    messages = chat(f"{MARKER} what?")
    ask = {"model": "tiny-sft", "messages": messages, "max_tokens": 20, "temperature": 1.5, "top_p": 0.9, "extra_body": {"top_k": 40}, "seed": 5}
    sampling = Sampling(20, 1.5, 40, 0.9, seed=5)
    expected = [text_of(answer.tokens) for answer in engines["tiny-sft"].generate([prompt_of(messages)], sampling, num_samples=3)]
    assert len(set(expected)) == 3
    three = server.client.chat.completions.create(**ask, n=3)
    assert [choice.message.content for choice in three.choices] == expected and three.usage.completion_tokens == 60
    assert {choice.finish_reason for choice in three.choices} == {"length"}
    streamed = {}
    for chunk in server.client.chat.completions.create(**ask, n=3, stream=True):
        [choice] = chunk.choices
        streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[i] for i in range(3)] == expected
    limited = server.client.chat.completions.create(model="tiny-sft", messages=messages, max_completion_tokens=10**6, **GREEDY)
    assert limited.usage.completion_tokens == 2000 and limited.choices[0].finish_reason == "length"


def test_completions_and_models(server, engines):
    engine, bos = engines["tiny-sft"], TOKENIZER.get_bos_token_id()
    texts = [f"the {MARKER}", "another"]
    prompts = [[bos, *TOKENIZER.encode(text)] for text in texts]
    answers = engine.generate(prompts, Sampling(16, temperature=0, tools=False))
    expected = ["".join(part["text"] for part in to_parts(TOKENIZER, answer.tokens)) for answer in answers]
    several = server.client.completions.create(model="tiny-sft", prompt=texts, n=2, **GREEDY)
    assert [choice.text for choice in several.choices] == [expected[0]] * 2 + [expected[1]] * 2
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (sum(map(len, prompts)), 64)
    for prompt in (prompts[0], prompts[0][1:], [prompts[0]]):
        assert server.client.completions.create(model="tiny-sft", prompt=prompt, **GREEDY).choices[0].text == expected[0]
    chunks = list(server.client.completions.create(model="tiny-sft", prompt=texts[1], stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[1] and chunks[-1].choices[0].finish_reason == "length"

    listed = list(server.client.models.list())
    assert [model.id for model in listed] == ["tiny-sft", "tiny-rl"] and server.client.models.retrieve("tiny-rl") == listed[1]
    assert (listed[0].context_length, listed[0].max_tokens, listed[1].max_tokens) == (2048, 2000, 256)


def test_errors_are_the_official_clients(server):
    create, client = server.client.chat.completions.create, server.client

    def fails(kind: type[openai.APIStatusError], words: str, **changes) -> openai.APIStatusError:
        with pytest.raises(kind, match=words) as caught:
            create(**{"model": "tiny-sft", "messages": chat(MARKER), "max_tokens": 3} | changes)
        assert set(caught.value.body) == {"message", "type", "param", "code"}
        return caught.value

    for key in ("wrong", KEY + "x"):
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key=key).chat.completions.create(model="tiny-sft", messages=chat("?"))
    for header in (b"", b"Bearer", b"Basic " + KEY.encode(), KEY.encode(), b"Bearer cl\xe9"):
        assert server.http.get("/v1/models", headers={"Authorization": header}).status_code == 401
    assert server.http.get("/health", headers={"Authorization": ""}).status_code == 200
    assert fails(openai.NotFoundError, "no model 'gpt'; this server has tiny-sft, tiny-rl", model="gpt").code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    bad = openai.BadRequestError
    assert fails(bad, "2,0.. tokens.*only 2,048", messages=chat("x" * 2045)).code == "context_length_exceeded"
    assert fails(bad, "temperature", temperature=-1).param == "temperature"
    assert fails(bad, "max_tokens", max_tokens="3").param == "max_tokens"
    assert fails(bad, r"messages\[1\].*role 'tool'", messages=[*chat("?"), {"role": "tool", "content": "1", "tool_call_id": "1"}]).param == "messages[1].role"
    assert fails(bad, "unknown parameter: min_p", extra_body={"min_p": 0.1}).code == "unknown_parameter"
    for changes in ({"tools": [{"type": "function", "function": {"name": "f"}}]}, {"logprobs": True}, {"response_format": {"type": "json_object"}},
                    {"frequency_penalty": 0.5}, {"logit_bias": {"5": 1}}):
        assert fails(bad, "not supported", **changes).param == next(iter(changes))
    for words, changes in (
        ("at most 4 strings", {"stop": list("abcde")}), ("1 to 256", {"stop": ""}), ("top_p", {"top_p": 1.5}), ("seed: .*integer", {"seed": 0.5}),
        ("take turns", {"messages": chat("a", "b")[1:]}), ("no messages", {"messages": []}), ("the last message", {"messages": chat("a", "b")}),
        ("at most 9", {"messages": chat(*"0123456789")}), ("only come first", {"messages": [*chat("a", "b"), {"role": "system", "content": ""}]}),
        ("a type .text. and a text", {"messages": chat([{"type": "image_url", "image_url": {"url": "x"}}])}), ("at most 36", {"n": 37}),
        ("characters", {"messages": chat("x" * 50001)}), ("a text or a list", {"messages": [{"role": "user", "content": None}]}),
    ):
        fails(bad, words, **changes)
    with pytest.raises(bad, match="within 0 and 267"):
        client.completions.create(model="tiny-sft", prompt=[1, 268])
    with pytest.raises(bad, match="echo is not supported"):
        client.completions.create(model="tiny-sft", prompt="?", echo=True)
    with pytest.raises(bad, match="a list of tokens"):
        client.completions.create(model="tiny-sft", prompt=[])


def test_bodies_that_are_none(server):
    """Wrong JSON, wrong kinds, too long bodies with and without a length: a status and OpenAI's shape each time, before it is all there."""
    post = {"url": "/v1/chat/completions", "headers": {"Content-Type": "application/json"}}
    contents = [f'{{"model": "{MARKER}', "[" * 90000, "[]", b"\xff\xfe", "", '{"model": NaN}', "x" * 10**7]
    for status, content in zip([400] * 6 + [413], contents):
        response = server.http.post(**post, content=content)
        assert response.status_code == status and set(response.json()["error"]) == {"message", "type", "param", "code"}, content[:20]
    sent = 0

    def parts():
        nonlocal sent
        for _ in range(1000):
            sent += 10**4
            yield b"x" * 10**4

    assert server.http.post(**post, content=parts()).status_code == 413 and sent < 10**7
    with server.connect(10**7) as raw:
        assert raw.recv(100).startswith(b"HTTP/1.1 413")
    assert server.http.post("/v1/completions", content="{}", headers={"Content-Type": "text/plain"}).status_code == 415
    for method, path, status in (("GET", "/nope", 404), ("POST", "/chat/completions", 404), ("GET", "/v1/completions", 405), ("PUT", "/", 405)):
        response = server.http.request(method, path)
        assert response.status_code == status and set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_32_streams_at_once_are_what_each_is_alone(server, engines):
    """Four times as many as there are places, greedy in float32: token for token the engine's, in company and alone."""
    conversations = [chat(f"{MARKER} {i} " + "and so on " * (i % 7)) for i in range(32)]
    lengths = [30 + 5 * (i % 5) for i in range(32)]
    samplings = [Sampling(length, temperature=0) for length in lengths]
    expected = [text_of(answer.tokens) for answer in engines["tiny-sft"].generate([prompt_of(messages) for messages in conversations], samplings)]
    assert len(set(expected)) > 16, "models that always say the same test little"

    def ask(i: int) -> str:
        stream = server.client.chat.completions.create(model="tiny-sft", messages=conversations[i], max_tokens=lengths[i], stream=True, **GREEDY)
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, range(32)))
    assert together == expected == [ask(i) for i in range(32)]


def test_who_goes_away_frees_the_places(server):
    """All places and the whole queue are one client's; when it goes, streaming or not, in the queue or not, the next is served."""
    everything = {"model": "tiny-sft", "messages": chat(MARKER), "n": PLACES + QUEUE, "max_tokens": 2000}
    for streaming in (True, False):
        body = json.dumps(everything | {"stream": streaming}).encode()
        with server.connect(len(body)) as raw:
            raw.sendall(body)
            server.wait_until("nanochat_running", PLACES)
            assert server.metric("nanochat_queue_length") == QUEUE
            with pytest.raises(openai.RateLimitError) as caught:
                server.client.chat.completions.create(**everything | {"n": 1})
            assert int(caught.value.response.headers["retry-after"]) >= 1 and caught.value.code == "rate_limit_exceeded"
        server.wait_until("nanochat_running", 0)
        assert server.metric("nanochat_queue_length") == 0
        assert server.client.chat.completions.create(**everything | {"n": 1, "max_tokens": 5}).usage.completion_tokens == 5


def test_a_flood_is_told_to_come_again(server):
    """More than can wait: every one gets an answer or 429 with Retry-After, and afterwards the server is as before."""
    def ask(i: int) -> int:
        response = server.http.post("/v1/chat/completions", json={"model": "tiny-sft", "messages": chat(f"{MARKER} {i}"), "max_tokens": 300, "n": 2})
        assert response.status_code == 200 or response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        return response.status_code

    with ThreadPoolExecutor(40) as pool:
        statuses = list(pool.map(ask, range(40)))
    assert 18 <= statuses.count(200) < 40, "at least as many as places and queue hold; not everyone"
    assert server.metric("nanochat_running") == server.metric("nanochat_queue_length") == 0 and ask(0) == 200
    health = server.http.get("/health")
    assert health.status_code == 200 and health.json() == {"status": "ok", "models": {"tiny-sft": ["ready"], "tiny-rl": ["ready"]}}
    text = server.http.get("/metrics").text
    assert 'nanochat_requests_total{path="/v1/chat/completions",status="429"}' in text and "nanochat_time_to_first_token_seconds_bucket" in text


def test_one_request_cannot_spoil_it_for_others(server):
    """Numbers beyond any tensor, and bodies that are wrong in a hundred thousand places, while another answer is being written."""
    other = server.client.chat.completions.create(model="tiny-sft", messages=chat("hello"), max_tokens=300, temperature=0, stream=True)
    next(other)
    huge = {"model": "tiny-sft", "messages": chat("x"), "max_tokens": 3, "top_p": 0.9, "seed": -(2**90)}
    for top_k in (2**31, 2**63, 2**90):
        assert server.http.post("/v1/chat/completions", json=huge | {"top_k": top_k}).status_code in (200, 400)
    started = time.monotonic()
    wrong = server.http.post("/v1/chat/completions", content=b'{"model":"tiny-sft","messages":[' + b"1," * 49_000 + b"1]}", headers={"Content-Type": "application/json"})
    assert wrong.status_code == 400 and len(wrong.content) < 1000 and time.monotonic() - started < 20
    assert sum(1 for chunk in other) > 1, "it has not been ended"


def test_idle_connections_do_not_use_up_the_server(server):
    """There are only so many at a time; the others are closed at once, and the server answers when some have gone."""
    idle = []
    try:
        for _ in range(MAX_CONNECTIONS + 20):
            idle.append(socket.create_connection(("127.0.0.1", server.port), timeout=10))
        with contextlib.suppress(ConnectionError):
            assert idle[-1].recv(1) == b"", "closed, where it would otherwise wait"
    finally:
        for raw in idle:
            raw.close()
    deadline = time.monotonic() + 200
    while True:
        with contextlib.suppress(httpx.TransportError):
            assert httpx.get(f"{server.url}/health").status_code == 200
            break
        assert time.monotonic() < deadline


def test_a_connection_that_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(nanochat.responses, "HEAD_SECONDS", 0.2)

    async def closed() -> bytes:
        server = uvicorn.Server(uvicorn.Config(create_app([], LIMITS), http=Impatient, port=0, log_level="error", lifespan="off"))
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname()[:2])
        said = await asyncio.wait_for(reader.read(), timeout=100)
        writer.close()
        server.should_exit = True
        await running
        return said

    assert asyncio.run(closed()) == b""


def test_pages_of_other_names_are_not_answered():
    """Where there is no key, a web page could have its own name point here: only the machine's own names are answered."""
    async def statuses() -> list[int]:
        app = create_app([], LIMITS, hosts=("localhost", "127.0.0.1", "[::1]"))
        urls = ["http://127.0.0.1:8000", "http://localhost", "http://[::1]:80", "http://evil.example:8000", "http://localhost.evil.example"]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            return [(await client.get(f"{url}/v1/models")).status_code for url in urls]

    assert asyncio.run(statuses()) == [200, 200, 200, 421, 421]


def test_the_page_and_who_may_ask(server):
    """The page runs its own scripts only; no other site may read an answer."""
    page = server.http.get("/", headers={"Origin": "https://elsewhere.example"})
    policy = page.headers["content-security-policy"]
    assert page.status_code == 200 and "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    preflight = server.http.options("/v1/chat/completions", headers={"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"})
    assert not any(name.startswith("access-control") for response in (page, preflight) for name in response.headers)


def test_zz_a_signal_ends_it_with_streams_open(server):
    """Last: within seconds, with code 0 and nothing in the log but the line with the address."""
    stream = server.client.chat.completions.create(model="tiny-sft", messages=chat(MARKER), max_tokens=2000, n=8, stream=True)
    with pytest.raises(openai.APIError, match="stopping"):
        for number, _ in enumerate(stream):
            if number == 8:
                server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=200) == 0
    log = server.log.read_text()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+ serves tiny-sft, tiny-rl; Ctrl-C ends it\n", log), log


def test_settings_that_cannot_be(monkeypatch):
    """A line each, before anything is served: a port in use, a model that is not there, numbers out of range."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the script's own goes with this test
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, *args in (
            (f"cannot listen on 127.0.0.1 port {port}: Address already in use", f"--port={port}"), ("port=65536", "--port=65536"),
            ("0 models in .*sft_checkpoints", "--port=0"), ("source=huge is unknown", "--port=0", "--source=huge"), ("different ones", "--source=sft, sft"),
            ("max_batch=0", "--max_batch=0"), ("timeout_s=0", "--timeout_s=0"), ("temperature=-1", "--temperature=-1"),
        ):
            monkeypatch.setattr(sys, "argv", ["chat_web", "--device_type=cpu", *args])
            with pytest.raises(UserError, match=words):
                runpy.run_module("scripts.chat_web", run_name="__main__")


# ---- The application in this process


@contextlib.asynccontextmanager
async def serving(make_engines, origins: list[str] = [], max_queue: int = 8, timeout_s: float = 60.0):
    """A client of an application with a writing model, and the model."""
    workers = [Worker(make_engine) for make_engine in make_engines]
    model = ServedModel("tiny-sft", TOKENIZER, 2048, 1, 0, 2, max_queue, workers)
    app = create_app([model], Limits(10**6, 10, 10**5, 2000, timeout_s, 0.0, 0), cors_origins=origins)
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=300) as client:
            yield client, model


def make_engine() -> Engine:
    return Engine(writing_model(), TOKENIZER, max_batch=2)


async def ask(client: httpx.AsyncClient, text: str, **changes) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"model": "tiny-sft", "messages": chat(text), "max_tokens": 40} | changes)


def test_two_workers_share_the_requests():
    async def run() -> None:
        async with serving([make_engine, make_engine]) as (client, model):
            alone = [(await ask(client, f"{i}")).json()["choices"] for i in range(6)]
            together = asyncio.gather(*(ask(client, f"{i}") for i in range(6)))
            while not all(worker.load == 3 for worker in model.workers):
                await asyncio.sleep(0)
            assert [response.json()["choices"] for response in await together] == alone
            assert [worker.load for worker in model.workers] == [0, 0]
            assert (await client.get("/health")).json()["models"] == {"tiny-sft": ["ready", "ready"]}

    asyncio.run(asyncio.wait_for(run(), 300))


def test_one_request_fails_alone_and_a_dead_worker_is_known(capfd, monkeypatch):
    """A prompt that cannot be read; a step that fails for all who are in it; a model that can read nothing any more."""
    broken = threading.Event()
    monkeypatch.setattr(nanochat.serving, "NEWS_EVERY", 1000.0)

    def make_fragile() -> Engine:
        engine = make_engine()
        prefill, decode = engine.model.prefill, engine.model.decode

        def fragile_prefill(prompt):
            if broken.is_set() or prompt[2:5] == list(b"bad"):
                raise RuntimeError(f"no memory for {MARKER}")
            return prefill(prompt)

        def fragile_decode(tokens):
            if engine.running[0].sampling.max_tokens == 13:
                raise RuntimeError(MARKER)
            return decode(tokens)

        engine.model.prefill, engine.model.decode = fragile_prefill, fragile_decode
        return engine

    async def run() -> None:
        async with serving([make_fragile]) as (client, model):
            expected = (await ask(client, "good")).json()["choices"]
            good, bad, streamed = await asyncio.gather(ask(client, "good"), ask(client, "bad", n=2), ask(client, "bad", stream=True))
            assert good.json()["choices"] == expected and bad.status_code == streamed.status_code == 500
            assert bad.json()["error"]["type"] == "server_error"
            good, bad = await asyncio.gather(ask(client, "good", n=2), ask(client, "bad"))
            assert good.status_code == 200 and bad.status_code == 500, "who has just ended is told so, although no step follows"
            assert (await ask(client, "step", max_tokens=13)).status_code == 500
            streamed = await ask(client, "step", max_tokens=13, stream=True)
            assert streamed.status_code == 200 and '"error":' in streamed.text and "[DONE]" not in streamed.text
            assert (await ask(client, "good")).json()["choices"] == expected and model.workers[0].load == 0
            assert (await client.get("/health")).status_code == 200
            broken.set()
            assert (await ask(client, "good")).status_code == 500
            while model.workers[0].state != "dead":
                await asyncio.sleep(0.01)
            health, after = await client.get("/health"), await ask(client, "good")
            assert (health.status_code, health.json()["status"]) == (503, "dead") and after.status_code == 503

    asyncio.run(asyncio.wait_for(run(), 300))
    log = capfd.readouterr().err
    assert "RuntimeError" in log and "a worker has died" in log and MARKER not in log


def test_loading_limits_of_time_and_other_origins():
    """What waits for the model is answered when it is there; time that is over ends an answer, and a wait with 503."""
    loaded = threading.Event()

    async def run() -> None:
        async with serving([lambda: loaded.wait() and make_engine()], ["https://friend.example"], timeout_s=0.5) as (client, model):
            health, early = await client.get("/health"), asyncio.create_task(ask(client, "early"))
            assert (health.status_code, health.json()["status"]) == (503, "loading")
            await asyncio.sleep(0.05)
            loaded.set()
            assert (await early).status_code == 200
            long = (await ask(client, "long", max_tokens=2000, n=2)).json()
            assert [choice["finish_reason"] for choice in long["choices"]] == ["length"] * 2 and 2 < long["usage"]["completion_tokens"] < 4000
            work = Work([prompt_of(chat("long"))], Sampling(2000, temperature=0), n=2, seconds=0.5)
            first, second = model.submit(work), model.submit(work)  # whose time is over at once with that of those before it
            assert [one.finish_reason async for news in first.news() for one in news] == ["length"] * 2
            with pytest.raises(Unavailable, match="within 0.5 s"):
                await anext(second.news())
            assert model.workers[0].load == 0 and (await ask(client, "late")).status_code == 200
            friend = await client.get("/v1/models", headers={"Origin": "https://friend.example"})
            other = await client.get("/v1/models", headers={"Origin": "https://other.example"})
            assert friend.headers["access-control-allow-origin"] == "https://friend.example" and "access-control-allow-origin" not in other.headers

    asyncio.run(asyncio.wait_for(run(), 300))


# ---- Stop strings


def test_stop_strings_as_if_characters_came_one_by_one():
    """Against that very definition, on random texts cut anywhere, with what is not text in between."""
    rng, found = random.Random(0), 0
    for _ in range(2000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        pieces = [Piece("python", "ab") if rng.random() < 0.2 else Piece("text", "".join(rng.choices("abc", k=rng.randint(1, 4)))) for _ in range(rng.randint(1, 6))]
        text, expected, ended = "", None, False
        for character in "".join(piece.text for piece in pieces if piece.type == "text"):
            text += character
            if matching := [stop for stop in stops if text.endswith(stop)]:
                expected, ended = text[: -max(map(len, matching))], True
                break
        expected = text if expected is None else expected
        filter, shown, given = StopStrings(stops), [], ""
        for piece in pieces:
            shown += filter.add(piece)
            if filter.found:
                break
            given += piece.text if piece.type == "text" else ""
            visible = "".join(piece.text for piece in shown if piece.type == "text")
            waits = max([n for stop in stops for n in range(len(stop)) if given.endswith(stop[:n])])
            assert visible == given[: len(given) - waits], "no more waits than could be the beginning of a stop string"
        shown += [] if filter.found else filter.end()
        assert (filter.found, "".join(piece.text for piece in shown if piece.type == "text")) == (ended, expected)
        if not ended:
            assert "".join(piece.text for piece in shown) == "".join(piece.text for piece in pieces), "in order, nothing lost"
        found += ended
    assert 500 < found < 1900
