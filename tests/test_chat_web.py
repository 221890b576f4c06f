"""The chat server as its clients meet it: a real process, the official client, raw sockets; parts in this process."""
import asyncio
import contextlib
import functools
import itertools
import json
import math
import random
import re
import signal
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from conftest import REPO
from pace import Pace, chat_web
from test_engine import SPECIAL, TOKENIZER, V, draw_weights, write_checkpoint

from nanochat.data.conversation import render_prompt
from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.detokenizer import Delta, StopStrings, to_parts
from nanochat.inference.engine import Answer, Engine
from nanochat.inference.sampling import SamplingParams
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig
from nanochat.runtime.errors import UserError
from nanochat.serve.app import create_app
from nanochat.serve.openai_requests import ChatRequest
from nanochat.serve.replies import ChatReply
from nanochat.serve.served_model import ServedModel
from nanochat.serve.server import Server

KEY = "a-secret"
MARKER = "xyzzy"            # in what users write here, never in the log
MOST = 8                    # answers to one request, half of the places
DRAIN_SECONDS = 4
CHAT = "/v1/chat/completions"
ERROR = {"message", "type", "param", "code"}  # the fields of every error
# What the talking model says, every time. Its tokens are single bytes.
SAID = [{"type": type, "text": text} for type, text in (
    ("text", "Wel 😀:"), ("python", "12*3"), ("python_output", "36"), ("text", "so,北!"))]
CONTENT = "Wel 😀:so,北!"
NOW = {"type": "function", "function": {"name": "now"}}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def writing_model() -> GPT:
    """Random, with a long context and stop tokens that are hardly ever drawn: its answers are as long as one likes."""
    model = draw_weights(GPT(GPTConfig(sequence_len=2048, vocab_size=V, n_layer=2, n_embd=64, n_head=4, n_kv_head=2)))
    model.lm_head.weight.data[[SPECIAL("<|assistant_end|>"), SPECIAL("<|bos|>")]] = 0
    return model


def chained_model(*chains: list[int]) -> GPT:
    """A token's successor in a chain is certain: idle blocks, unit vectors as embeddings, a head for them."""
    model = GPT(GPTConfig(sequence_len=256, vocab_size=V, n_layer=1, n_embd=320, n_head=5, n_kv_head=5))
    for p in model.parameters():
        p.data.zero_()
    model.transformer.wte.weight.data.copy_(torch.eye(320))
    for chain in chains:
        model.lm_head.weight.data[chain[1:], chain[:-1]] = 10.0
    return model


def talking_model() -> GPT:
    before, sum_of, _, after = (part["text"].encode() for part in SAID)
    call = [SPECIAL("<|python_start|>"), *sum_of, SPECIAL("<|python_end|>")]
    first = [SPECIAL("<|assistant_start|>"), *before, *call]
    return chained_model(first, [SPECIAL("<|output_end|>"), *after, SPECIAL("<|assistant_end|>")])


def chat(*contents) -> list[dict]:
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents)]


def prompt_of(messages: list[dict]) -> list[int]:
    return render_prompt(TOKENIZER, {"messages": messages})


def text_of(answer: Answer) -> str:
    return "".join(part["text"] for part in to_parts(TOKENIZER, answer.tokens) if part["type"] == "text")


def streamed(chunks) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


# ---- A server, in a process of its own


class Running:
    def __init__(self, folder, models: dict[str, GPT], *args: str, **constants: float):
        for stage, model in models.items():
            write_checkpoint(folder / f"{stage}_checkpoints" / "tiny", model)
        self.log, self.pace = folder / "log", Pace(folder / "pace")
        on_cpu = "--port=0", "--device_type=cpu", "--dtype=float32"
        command, env = chat_web(self.pace.file, *on_cpu, *args, **constants)
        env |= {"NANOCHAT_BASE_DIR": str(folder), "NANOCHAT_API_KEY": KEY}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, cwd=REPO, env=env, stdout=log, stderr=subprocess.STDOUT)
        deadline, ready = time.monotonic() + 300, re.compile(r"^(http://127.0.0.1:(\d+)) serves tiny-", re.MULTILINE)
        while not (found := ready.search(self.log.read_text())):
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        self.url, self.port = found[1], int(found[2])
        self.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=300)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def ask(self, *contents, model: str = "tiny-sft", client: openai.OpenAI | None = None, **settings):
        """Greedy unless told otherwise. contents: of the messages, the user's first; none: they are a setting."""
        settings = {"model": model, "messages": chat(*contents), "temperature": 0} | settings
        return (client or self.client).chat.completions.create(**settings)

    def connect(self, length: int) -> socket.socket:
        """A raw connection on which the head of a request for chat was sent, whose body is that long."""
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=200)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        raw.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode())
        return raw

    def load(self, name: str) -> int:
        return self.http.get("/health").json()[name]

    def wait_until(self, name: str, value: float) -> None:
        deadline = time.monotonic() + 200
        while (now := self.load(name)) != value:
            assert time.monotonic() < deadline, f"{name} stays {now}"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    running = Running(
        tmp_path_factory.mktemp("server"), {"sft": writing_model()}, "--source=sft",
        f"--max_batch={MOST}", "--max_new_tokens=2000", MAX_BODY_BYTES=100_000,
        DRAIN_SECONDS=DRAIN_SECONDS)
    yield running
    running.process.kill()
    running.process.wait()


@pytest.fixture
def server(shared_server):
    """One for all tests; the test that ends it is the last one that uses it."""
    shared_server.pace.set(0)
    shared_server.ask("ready?", max_tokens=1)  # done with the answers that the test before has left
    return shared_server


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A server of the talking model."""
    running = Running(tmp_path_factory.mktemp("talker"), {"rl": talking_model()})
    yield running
    running.process.kill()
    running.process.wait()


@pytest.fixture(scope="module")
def engines():
    """The same models in this process."""
    return {"tiny-sft": Engine(writing_model(), TOKENIZER), "tiny-rl": Engine(talking_model(), TOKENIZER)}


def test_the_official_client_chats(talker, engines):
    """Whole and as a stream: the text of Engine.generate, the calculator's part apart, usage, whole characters."""
    parts = [{"type": "text", "text": f"{MARKER} <|assistant_end|>"}, {"type": "text", "text": "?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    same = [{"role": "system", "content": "Be brief."}, *chat(f"{MARKER} <|assistant_end|>?")]
    prompt = prompt_of(same)
    assert SPECIAL("<|assistant_end|>") not in prompt, "what users write is text"
    expected = engines["tiny-rl"].generate([prompt])[0]
    assert to_parts(TOKENIZER, expected.tokens) == SAID, "the model does what it was made for"

    ask = {"model": "tiny-rl", "messages": messages}
    whole = talker.ask(**ask, user="me", store=False, extra_body={"top_k": -1})
    [choice] = whole.choices
    assert (whole.object, whole.model, choice.finish_reason) == ("chat.completion", "tiny-rl", "stop")
    message = choice.message
    assert (message.role, message.content, message.parts) == ("assistant", CONTENT, SAID)
    usage = whole.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(expected.tokens))

    *chunks, last = talker.ask(**ask, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage == usage
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert streamed(chunks) == CONTENT and "\ufffd" not in "".join(chunk.to_json() for chunk in chunks)
    # What was received can be sent back as it is, and is what the model wrote.
    again = talker.ask(model="tiny-rl", messages=[*messages, choice.message, *chat("Go on")])
    sent = [*same, {"role": "assistant", "content": SAID}, *chat("Go on")]
    assert again.usage.prompt_tokens == len(prompt_of(sent)) and again.choices[0].message.content == CONTENT


def test_completions_and_models(server, talker, engines):
    """Every setting of the sampling is the engine's; samples of one prompt are the draws of one seed."""
    engine, bos = engines["tiny-sft"], TOKENIZER.get_bos_token_id()
    texts = [f"the {MARKER}", "another"]
    prompts = [[bos, *TOKENIZER.encode(text)] for text in texts]
    asked = {"temperature": 1.2, "top_p": 0.95, "seed": 5}
    sampling = SamplingParams(16, top_k=50, tools=False, **asked)
    expected = [text_of(answer) for answer in engine.generate(prompts, sampling, num_samples=2)]

    complete = functools.partial(
        server.client.completions.create, model="tiny-sft", extra_body={"top_k": 50}, **asked)
    several = complete(prompt=texts, n=2)
    assert [choice.text for choice in several.choices] == expected and len(set(expected)) == 4
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (sum(map(len, prompts)), 64)
    chunks = [chunk.choices[0] for chunk in complete(prompt=texts, n=2, stream=True)]
    for index, text in enumerate(expected):
        assert "".join(chunk.text for chunk in chunks if chunk.index == index) == text
    assert chunks[-1].finish_reason == "length"

    [sft], [rl] = server.client.models.list(), talker.client.models.list()
    assert [sft.id, rl.id] == ["tiny-sft", "tiny-rl"]
    assert (sft.context_length, sft.max_tokens, rl.max_tokens) == (2048, 2000, 256)


def plain_logprobs(model: GPT, tokens: list[int]) -> torch.Tensor:
    """(T, V): of what follows each token, one pass over all of them."""
    return model(torch.tensor([tokens])).log_softmax(-1)[0]


def test_logprobs_of_a_chat_are_those_of_its_content(talker, engines):
    """
    The model's own, whatever the sampling: of every token of the text, none of the calculator's, none of the end and of
    what a stop string cuts off. A stream says the same, no later than the text.
    """
    model, prompt = talking_model(), prompt_of(chat("?"))
    tokens = engines["tiny-rl"].generate([prompt])[0].tokens
    table = plain_logprobs(model, prompt + tokens)[len(prompt) - 1 :]
    ask = {"model": "tiny-rl", "logprobs": True, "top_logprobs": 2}
    places = [place for place, token in enumerate(tokens) if token < 256 and chr(token) not in "12*36"]
    for extra, text in (({}, CONTENT), ({"stop": "o,北"}, "Wel 😀:s"), ({"stop": "😀"}, "Wel ")):
        [choice] = talker.ask("?", **ask, **extra).choices
        content = choice.logprobs.content
        assert b"".join(bytes(one.bytes) for one in content) == choice.message.content.encode() == text.encode()
        for one, place in zip(content, places):
            token, best = tokens[place], table[place].topk(2).values.tolist()
            assert [one.logprob, *(top.logprob for top in one.top_logprobs)] == pytest.approx(
                [table[place, token].item(), *best], abs=1e-4)
            assert one.bytes == [token] == one.top_logprobs[0].bytes
            assert one.token == (chr(token) if token < 128 else f"\\x{token:02x}")
        told, shown = [], ""
        for chunk in talker.ask("?", **ask, **extra, stream=True):
            [choice] = chunk.choices
            told += choice.logprobs.content if choice.logprobs else []
            shown += choice.delta.content or ""
            assert b"".join(bytes(one.bytes) for one in told).startswith(shown.encode()), "never later than the text"
        assert told == content


def test_logprobs_of_completions(server):
    """Of several texts, each token at its place in the text."""
    model, bos = writing_model(), TOKENIZER.get_bos_token_id()
    texts = ["the 北 thing", "other"]
    ids = [[bos, *TOKENIZER.encode(text)] for text in texts]
    answer = server.client.completions.create(
        model="tiny-sft", prompt=texts, max_tokens=12, temperature=0, logprobs=2)
    for choice in answer.choices:
        read, reported = ids[choice.index], choice.logprobs
        written = list(model.generate(read, 12))
        table = plain_logprobs(model, read + written)[len(read) - 1 :]
        values = [row[token].item() for row, token in zip(table, written)]
        assert reported.token_logprobs == pytest.approx(values, abs=1e-4)
        for row, top in zip(table, reported.top_logprobs, strict=False):
            best = row.topk(2).values.tolist()
            assert sorted(top.values(), reverse=True)[:2] == pytest.approx(best, abs=1e-4)
        # Bytes that are no character become one with the token after them.
        known = [(at, name) for at, name in zip(reported.text_offset, reported.tokens) if name in choice.text]
        assert len(known) >= 2 and all(choice.text[at:].lstrip("\ufffd").startswith(name) for at, name in known)


@pytest.mark.parametrize("settings", [
    {"max_tokens": "x"}, {"max_tokens": 0}, {"seed": 16.5}, {"stop": ["x"] * 33},
    {"extra_body": {"suffix": "x"}}, {"extra_body": {"tools": [NOW]}}, {"extra_body": {"echo": True, "max_tokens": 0}},
    {"messages": [*chat("?"), {"role": "function", "content": "1", "name": "f"}]}, {"messages": []},
    {"messages": chat(None)}, {"messages": chat([{"type": "image_url", "image_url": {}}])},
    {"messages": chat("x" * 2045)}, {"prompt": [1, 268]}, {"prompt": 5}, {"prompt": ["x"] * 1025}, {"n": MOST + 1},
])
def test_what_is_wrong_with_a_request_is_said(server, settings):
    ask = server.client.completions.create if "prompt" in settings else functools.partial(server.ask, MARKER)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(**{"model": "tiny-sft", "max_tokens": 3} | settings)
    assert set(caught.value.body) == ERROR
    assert caught.value.param.startswith(next(iter(settings.get("extra_body", settings))))
    assert (caught.value.code == "context_length_exceeded") == (settings == {"messages": chat("x" * 2045)})


@pytest.mark.parametrize("hints", [
    {"modalities": ["text"], "chat_template_kwargs": {"enable_thinking": False}, "keep_alive": -1, "min_p": 0.0,
     "best_of": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "truncation": "auto"},
    {"max_tokens": 20.0, "seed": 1.0, "n": 1.0, "top_k": 0.0, "top_logprobs": 0.0},
    {"max_tokens": None, "max_completion_tokens": 20}, {"max_tokens": 30, "max_completion_tokens": 20},
    {"max_completion_tokens": -1},
    # As clients store an answer that was stopped before its first token.
    *[{"messages": [*chat("Hi"), {"role": "assistant"} | nothing, *chat(MARKER)]}
      for nothing in ({}, {"content": None}, {"content": []})],
])
def test_hints_change_no_answer(server, hints):
    plain = {"model": "tiny-sft", "messages": chat("Hi", "", MARKER), "temperature": 0, "max_tokens": 20}
    whole, hinted = (server.http.post(CHAT, json=plain | more) for more in ({}, hints))
    assert hinted.status_code == 200, hinted.text
    for name in ("choices", "usage"):
        assert hinted.json()[name] == whole.json()[name]


def test_truncation_leaves_out_the_oldest_turns(server):
    """As few as leave room for an answer, which is then as to the shorter conversation; what is left out is said."""
    system = [{"role": "system", "content": "Be brief."}]
    turns = chat(*("x" * 300, "y" * 300) * 3, "?")
    plain = {"model": "tiny-sft", "temperature": 0, "max_tokens": 300}
    post = functools.partial(server.http.post, CHAT)
    cut = post(json=plain | {"messages": system + turns, "truncation": "auto"}).json()
    same = post(json=plain | {"messages": system + turns[2:]}).json()
    assert cut["choices"] == same["choices"] and cut["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]
    assert cut["forgotten"] == 2 and "forgotten" not in same
    longest = plain | {"messages": [*system, *turns[:-1], *chat("z" * 4060)], "truncation": "auto"}
    assert post(json=longest).json()["error"]["code"] == "context_length_exceeded", "the last question stays"


def test_keys_and_models_that_are_unknown(server):
    with pytest.raises(openai.AuthenticationError):
        server.ask("?", client=server.client.with_options(api_key=KEY + "x"))
    headers = [b"", b"Basic " + KEY.encode(), b"Bearer cl\xe9", KEY.encode(), f"bearer {KEY}".encode()]
    statuses = [server.http.get("/v1/models", headers={"Authorization": header}).status_code for header in headers]
    assert statuses == [401, 401, 401, 401, 200], "the scheme's case does not matter"
    server.wait_until("running", 0)
    assert server.http.get("/health", headers={"Authorization": ""}).json() == {
        "status": "ok", "models": {"tiny-sft": "ready"}, "running": 0, "waiting": 0}
    with pytest.raises(openai.NotFoundError) as caught:
        server.ask("?", model="gpt")
    assert caught.value.code == "model_not_found"
    body = {"messages": chat("?"), "max_tokens": 1}
    assert server.http.post(CHAT, json=body).json()["model"] == "tiny-sft", "the only one"


def test_requests_that_are_none_leave_nothing_in_the_log(server):
    """400 for what is not HTTP, 421 for another's name. In HTTP/1.0, as load balancers ask, no name is needed."""
    requests = [(200, HEALTH), (200, b"GET /health HTTP/1.0\r\n\r\n"), (400, b"GET /health HTTP/1.1\r\n\r\n")]
    requests += [(421, HEALTH.replace(b"localhost", host)) for host in (b"evil.example", b"")]
    both = b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    requests += [(400, HEALTH[:-2] + both)]
    requests += [(400, data) for data in (b"\x16\x03\x01 no TLS here\r\n\r\n", HEALTH.replace(b"Host", b"Ho st"))]
    for status, request in requests:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
            raw.sendall(request)
            assert raw.recv(100).split()[1] == str(status).encode(), request
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
        raw.sendall(HEALTH[:-2] + both + HEALTH)
        assert raw.makefile("rb").read().count(b"HTTP/1.1 ") == 1, "what follows is not read as a request"
    assert server.log.read_text().count("\n") == 1, "the line with the address"


def test_bodies_that_are_none(server):
    """Wrong JSON, wrong kinds, too long, wrong in thousands of places: a status and OpenAI's shape each time."""
    def post(content, **headers: str) -> httpx.Response:
        return server.http.post(CHAT, content=content, headers={"Content-Type": "application/json"} | headers)

    many = b'{"model":"tiny-sft","messages":[' + b"1," * 49_000 + b"1]}"
    bad = [f'{{"model": "{MARKER}', "[" * 90000, "[]", b"\xff\xfe", "", '{"model": NaN}', many]
    responses = [(400, post(content)) for content in bad]
    responses += [(413, post("x" * 10**7)), (413, post(b"x" * 10**4 for _ in range(1000)))]
    responses += [(415, post("", **{"Content-Type": "text/plain"}))]
    responses += [(404, server.http.get("/health/"))]   # not sent on to wherever Host says
    responses += [(405, server.http.get(CHAT)), (404, server.http.post("/v1/responses", json={}))]
    for status, response in responses:
        assert response.status_code == status and set(response.json()["error"]) == ERROR, response.text
        assert len(response.content) < 1000


def test_32_streams_at_once_are_what_each_is_alone(server, engines):
    """Four times as many as there are places, greedy in float32: token for token the engine's, in company and alone."""
    questions = [f"{MARKER} {i} " + "and so on " * (i % 7) for i in range(32)]
    samplings = [SamplingParams(30 + 5 * (i % 5), temperature=0) for i in range(32)]
    answers = engines["tiny-sft"].generate([prompt_of(chat(question)) for question in questions], samplings)
    expected = [text_of(answer) for answer in answers]
    assert len(set(expected)) > 16, "models that always say the same test little"

    def ask(i: int) -> str:
        return streamed(server.ask(questions[i], max_tokens=samplings[i].max_tokens, stream=True))

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, range(32))) == expected
    assert [ask(i) for i in range(4)] == expected[:4]


@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_away_frees_the_places(server, stream):
    """Running and waiting; the next client is served."""
    everything = {"model": "tiny-sft", "messages": chat(MARKER), "n": MOST, "max_tokens": 2000, "stream": stream}
    body = json.dumps(everything).encode()
    server.pace.set(0.05)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(server.connect(len(body))).sendall(body)
        server.wait_until("running", 2 * MOST)
        server.wait_until("waiting", 3 * MOST)
    server.pace.set(0.2)  # at which the clients' answers would last for minutes
    server.wait_until("waiting", 0)
    server.wait_until("running", 0)


def run_async(test):
    """A test that is a coroutine."""
    @functools.wraps(test)
    def run(*args, **kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 300))

    return run


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_the_page_runs_its_own_scripts_only(server):
    policy = server.http.get("/").headers["content-security-policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy and "connect-src 'self'" in policy


def test_zz_sigterm_lets_answers_end_for_a_while(server):
    """One answer ends whole, and meanwhile nobody new gets in; after DRAIN_SECONDS the others break off."""
    whole = server.ask(MARKER, max_tokens=30).choices[0].message.content
    server.pace.set(0.05)
    with ThreadPoolExecutor(1) as pool:
        longs = [server.ask(MARKER, max_tokens=2000, n=n, stream=True) for n in (MOST, MOST - 1)]
        short = server.ask(MARKER, max_tokens=30, stream=True)
        beginning = streamed([next(short)])
        server.pace.set(math.inf)
        waiting = pool.submit(server.ask, MARKER, max_tokens=2000, n=MOST)
        server.wait_until("waiting", MOST)
        half = server.connect(100)  # its body never comes, and what waits for that is ended without a traceback
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.pace.set(0.01)  # the long ones take 20 seconds at least, the short one less than a tenth of the time
        assert beginning + streamed(short) == whole
        with pytest.raises(openai.APIConnectionError):
            server.ask(MARKER)
        assert server.process.poll() is None
        for long in longs:
            with pytest.raises(openai.APIConnectionError):
                list(long)
        assert time.monotonic() - started > DRAIN_SECONDS
        with pytest.raises(openai.InternalServerError):
            waiting.result()
    half.close()
    assert server.process.wait(timeout=200) == 0
    log = server.log.read_text()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+ serves tiny-sft; Ctrl-C ends it\n", log), log


# ---- The application in this process


@contextlib.asynccontextmanager
async def serving(engine: Engine, hosts: tuple = (), **settings):
    """A client of an application with a writing model, and the model."""
    model = ServedModel("tiny-sft", engine, **settings)
    app = create_app([model], 2000, {"temperature": 0.0, "top_k": 0}, hosts=hosts)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=300) as client:
            yield client, model


def make_engine() -> Engine:
    return Engine(writing_model(), TOKENIZER, max_batch=4)


async def ask(client: httpx.AsyncClient, text: str, **changes) -> httpx.Response:
    return await client.post(CHAT, json={"model": "tiny-sft", "messages": chat(text), "max_tokens": 40} | changes)


@run_async
async def test_a_base_model_behind_a_proxy():
    """Messages are one text to continue. Another name than the proxy's is not answered to."""
    text = [TOKENIZER.get_bos_token_id(), *TOKENIZER.encode(f"Once\n\nupon\n\n{MARKER}")]
    [expected] = make_engine().generate([text], SamplingParams(20, temperature=0, tools=False))
    async with serving(make_engine(), ("Chat.example.org",), chats=False) as (client, _):
        statuses = []
        for host in ("CHAT.example.org:80", "127.0.0.1:80", "[::1]:80", "evil.example:80"):
            body = {"model": "tiny-sft", "messages": chat("Once", "upon", MARKER), "max_tokens": 20}
            answer = await client.post(CHAT, json=body, headers={"Host": host})
            statuses.append(answer.status_code)
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["message"]["parts"] == to_parts(TOKENIZER, expected.tokens)
    assert statuses == [200, 200, 200, 421]


@run_async
async def test_the_only_model_answers_without_its_name():
    """Also behind a byte order mark, as PowerShell writes it. Before each question, changed notes are read again."""
    looks, engine = [], make_engine()
    engine.tools.refresh = lambda: looks.append(1)
    async with serving(engine) as (client, _):
        body = json.dumps({"messages": chat("?"), "max_tokens": 5}).encode()
        named = (await ask(client, "?", max_tokens=5)).json()
        for content in (body, b"\xef\xbb\xbf" + body):
            answer = await client.post(CHAT, content=content, headers={"Content-Type": "application/json"})
            for name in ("model", "choices", "usage"):
                assert answer.json()[name] == named[name]
    assert len(looks) == 3


@run_async
async def test_a_reset_connection_leaves_nothing_in_the_log(caplog):
    """Before the event loop has noticed the end, several writes may fail."""
    Server(None, [])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _, writer = await asyncio.open_connection(*listener.getsockname())
        client, _ = listener.accept()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    for _ in range(20):
        writer.write(b"data")
    assert caplog.records == []
    with pytest.raises(ConnectionError):
        await writer.drain()


@run_async
async def test_a_new_model_replaces_the_others_and_one_that_fails_does_not(monkeypatch):
    monkeypatch.setattr("nanochat.serve.app.LOOK_EVERY", 0.1)
    old, new = (ServedModel(name, make_engine()) for name in ("old", "new"))
    served, seen = [old], []

    def newer() -> ServedModel | None:
        seen.append([model.id for model in served])
        if len(seen) == 1:
            raise UserError("a damaged checkpoint")
        return new if len(seen) == 2 else None

    app = create_app(served, 2000, {"temperature": 0.0, "top_k": 0}, newer=newer)
    async with app.router.lifespan_context(app):
        await until(lambda: served == [new])
        await until(lambda: old.state == "stopped" and not old.thread.is_alive())
        assert seen[:2] == [["old"], ["old"]] and new.state == "ready"


@run_async
async def test_one_request_fails_alone_and_a_lost_device_ends_the_engine(capfd):
    """A prompt that cannot be read; a device that is lost, which ends the server."""
    broken, engine = threading.Event(), make_engine()
    read = engine.model.read

    def fragile_read(tokens):
        if broken.is_set() or any(part[2:5] == list(b"bad") for part in tokens):
            raise RuntimeError(f"no memory for {MARKER}")
        return read(tokens)

    engine.model.read = fragile_read
    async with serving(engine) as (client, model):
        expected = (await ask(client, "good")).json()["choices"]
        bad, events = await ask(client, "bad", n=2), (await ask(client, "bad", stream=True)).text
        assert bad.status_code == 500 and bad.json()["error"]["type"] == "server_error"
        assert '"error":' in events and "[DONE]" not in events
        assert (await ask(client, "good")).json()["choices"] == expected and not model.answers
        assert (await client.get("/health")).status_code == 200 and not await Server(None, [model]).on_tick(1)
        broken.set()
        engine.model.model.lm_head.weight = None  # what cannot be read
        assert (await ask(client, "good")).status_code == 500
        await until(lambda: model.state == "dead")
        health, after = await client.get("/health"), await ask(client, "good")
        assert (health.status_code, after.status_code) == (503, 503) and await Server(None, [model]).on_tick(1)
    log = capfd.readouterr().err
    assert "RuntimeError" in log and "the engine of tiny-sft has failed" in log and MARKER not in log


def step_seconds(engine: Engine, **fields) -> float:
    """
    Of the processor, for a step that writes a token of each of 16 answers, and turns it into text. The fastest of ten:
    beside other tests, waiting threads spin.
    """
    model = ServedModel("m", engine)
    body = {"model": "m", "messages": chat("?"), "n": 16, "max_tokens": 10**4} | fields
    asked = ChatRequest.parse(json.dumps(body).encode(), {"temperature": 1.0, "top_k": 0})
    request = asked.prepare(model, 10**4)
    reply = ChatReply(asked, model, request)
    model.send = lambda news: [reply.add(chunk) for _, chunk in news]
    model.add(request)
    seconds = []
    for _ in range(70):
        started = time.process_time()
        model.step()
        model.flush()
        seconds.append(time.process_time() - started)
    assert len(engine.running) == 16
    engine.clear()
    return min(seconds[60:])


def test_no_request_makes_a_step_much_dearer():
    """Every field at its maximum against a plain request: what an address asks for, the others' tokens wait for."""
    tokenizer = Tokenizer([bytes(pair) for pair in itertools.product(range(97, 157), repeat=2)])
    vocab_size = tokenizer.get_vocab_size()
    shape = GPTConfig(sequence_len=2048, vocab_size=vocab_size, n_layer=2, n_embd=64, n_head=4, n_kv_head=2)
    engine = Engine(draw_weights(GPT(shape), 0.1), tokenizer, 32)
    engine.stop = set()
    plain = step_seconds(engine)
    everything = step_seconds(
        engine, temperature=9, top_p=0.9999, top_k=10**9, seed=10**30, logprobs=True, top_logprobs=20,
        stop=[f"{'a' * 253}{number:03}" for number in range(16)])
    assert everything < 10 * plain


@run_async
async def test_the_end_of_an_engine_is_told_at_once():
    async with serving(make_engine()) as (client, model):
        asked = asyncio.create_task(ask(client, "?", max_tokens=2000))
        await until(lambda: model.running)
        model.stop()
        assert (await asked).status_code == 503


# ---- Stop strings


def text_in(deltas: list[Delta]) -> str:
    """A part of the calculator is a zero here, which no stop string has."""
    return "".join(delta.text if delta.type == "text" else "\0" for delta in deltas)


def test_stop_strings_as_if_characters_came_one_by_one():
    """Against that very definition, on random texts cut anywhere, with what is not text in between and ends a match."""
    rng, found = random.Random(0), 0

    def word(letters: str) -> str:
        return "".join(rng.choices(letters, k=rng.randint(1, 4)))

    for _ in range(2000):
        stops = [word("ab") for _ in range(rng.randint(1, 3))]
        deltas = [Delta("python", "ab") if rng.random() < 0.2 else Delta("text", word("abc"))
                  for _ in range(rng.randint(1, 6))]
        whole = text_in(deltas)
        ends = [whole[:n] for n in range(len(whole) + 1) if whole[:n].endswith(tuple(stops))]
        expected = whole
        if ends:
            expected = ends[0].removesuffix(max(filter(ends[0].endswith, stops), key=len))
        strings, shown, given = StopStrings(stops), [], ""
        for delta in deltas:
            shown += strings.add(delta)
            if strings.found:
                continue
            given += text_in([delta])
            waits = max(n for stop in stops for n in range(len(stop)) if given.endswith(stop[:n]))
            assert text_in(shown) == given[: len(given) - waits], "only what may be the beginning of a stop waits"
        shown += strings.end()
        assert (strings.found, text_in(shown)) == (bool(ends), expected)
        if not ends:
            assert "".join(delta.text for delta in shown) == "".join(delta.text for delta in deltas), "nothing is lost"
        found += strings.found
    assert 500 < found < 1900
