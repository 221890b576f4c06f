"""
The chat page in a real browser, through clicks and keys, at a real server: one process each for the whole file.

The model's weights are written by hand so that its answers are known: the alphabet, again and again, until stopped.
"""
import contextlib
import json
import math
import re
import shutil
import string
import subprocess
import time
import urllib.request

import pytest
import torch
from conftest import REPO
from pace import Pace, chat_web
from test_engine import write_checkpoint

from nanochat.data.tokenizer import Tokenizer
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: . ./setup.sh dev")
expect = sync_api.expect
PATIENCE = 120  # seconds: what takes moments may take so long on a busy machine
expect.set_options(timeout=1000 * PATIENCE)
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH: apt install chromium")

KEY, CONTEXT, MAX_TOKENS = "open sesame", 4096, 3000
ALPHABET = (string.ascii_lowercase + " ") * 200
TASKS = "tinyworld:identity*2, arithmetic:easy[:99], json:/nobody/reads/this.jsonl, gsm8k"  # as the meta says
CHAT = "**/v1/chat/completions"


def write_model(base) -> None:
    """
    A checkpoint whose block is the identity and whose head knows one successor of each token: a, b, … z, blank, a.
    """
    tokenizer = Tokenizer([])
    model = GPT(GPTConfig(sequence_len=CONTEXT, vocab_size=tokenizer.get_vocab_size(), n_layer=1, n_embd=64, n_head=2,
                          n_kv_head=2))
    for name, p in model.named_parameters():
        p.data.normal_(generator=torch.Generator().manual_seed(p.numel()))
        if "c_proj" in name:
            p.data.zero_()
    ids = [tokenizer.encode_special("<|assistant_start|>"), *ALPHABET[:27].encode()]
    embedding, head = model.transformer.wte.weight.data, model.lm_head.weight.data.zero_()
    for token, successor in zip(ids, ids[1:] + ids[1:2]):
        head[successor] += embedding[token]
    write_checkpoint(base / "sft_checkpoints" / "alphabet", model, tokenizer, config={"tasks": TASKS})


@pytest.fixture(scope="module")
def pace(tmp_path_factory):
    """Of the server's engine. A whole answer of 3,000 tokens lasts for half a minute."""
    pace = Pace(tmp_path_factory.mktemp("pace") / "pace")
    pace.set(0.01)
    return pace


@contextlib.contextmanager
def serving(command: list[str], env: dict[str, str] | None = None):
    """The address of the server that the command starts."""
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True, env=env)
    try:
        address = next((match[0] for line in process.stdout if (match := re.search(r"http://[\d.:]+", line))), None)
        assert address, f"the server ended with status {process.wait()} instead of saying where it is"
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


@pytest.fixture(scope="module")
def server(tmp_path_factory, pace):
    """The address of a server with two places, which wants a key."""
    base = tmp_path_factory.mktemp("base")
    write_model(base)
    settings = "--device_type=cpu --dtype=float32 --port=0 --max_batch=1 --temperature=0"
    command, env = chat_web(pace.file, *settings.split(), f"--max_new_tokens={MAX_TOKENS}")
    env |= {"NANOCHAT_BASE_DIR": str(base), "NANOCHAT_API_KEY": KEY}
    with serving(command, env) as address:
        yield address


def launch(playwright):
    switches = ("--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
                "--disable-component-update --disable-sync")
    return playwright.chromium.launch(executable_path=CHROMIUM, args=switches.split())


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


class Visit:
    """Somebody at the page, and what the page did: its requests, what it complained of."""

    def __init__(self, browser, server: str, key: str = KEY, **context):
        self.server, self.complaints, self.asked, self.expected = server, [], [], []
        self.context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **context)
        if key:
            self.context.add_init_script(f"sessionStorage['nanochat.key'] ??= {json.dumps(json.dumps(key))}")
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE)
        self.page.on("console", self.heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self.requested)
        self.page.goto(server)
        self.draft, self.answers = self.page.get_by_label("Message", exact=True), self.page.locator(".body")

    def heard(self, message) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def requested(self, request) -> None:
        if not request.url.startswith((self.server, "data:")):
            self.complaints.append(f"a request to {request.url}")
        if request.url.endswith("/chat/completions"):
            self.asked.append(json.loads(request.post_data))

    def button(self, name: str):
        return self.page.get_by_role("button", name=name, exact=True)

    def say(self, text: str) -> None:
        self.draft.fill(text)
        self.draft.press("Enter")

    def rest(self) -> None:
        """Until nothing is being written."""
        self.button("Send").wait_for()

    def ask(self, text: str) -> None:
        self.say(text)
        self.rest()

    def reply(self, *deltas: dict, end: str = "data: [DONE]\n\n") -> None:
        """From now on, this stands for the server's answers."""
        answer = stream(*deltas, end=end)
        self.page.route(CHAT, lambda route: route.fulfill(**answer))

    def questions(self) -> list[str]:
        return self.page.locator(".question").all_inner_texts()

    def clipboard(self) -> str:
        return self.page.evaluate("navigator.clipboard.readText()")

    def limit(self, **settings) -> None:
        """Through the dialog."""
        self.button("Settings").click()
        for label, value in settings.items():
            self.page.get_by_label(label.replace("_", " ")).fill(str(value))
        self.button("Done").click()

    def leave(self) -> None:
        complaints = [text for text in self.complaints if not any(part in text for part in self.expected)]
        self.context.close()
        assert complaints == []


@pytest.fixture
def visit(browser, server):
    visits = []

    def start(**settings) -> Visit:
        visits.append(Visit(browser, server, **settings))
        return visits[-1]

    yield start
    for one in visits:
        one.leave()


def running(server: str) -> float:
    with urllib.request.urlopen(f"{server}/health") as response:
        return json.load(response)["running"]


def wait_until(condition, page) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {PATIENCE} seconds"
        page.wait_for_timeout(20)  # lets playwright's events come in, as time.sleep would not


def test_an_answer_streams_in_is_stopped_and_its_place_is_free(visit, server):
    """The text only grows, and is the model's; stopped it keeps what is there, and the server stops writing as well."""
    me = visit()
    me.draft.fill("Go on!")
    me.button("Send").click()
    seen, deadline = [""], time.monotonic() + PATIENCE
    while len(seen) < 6:
        assert time.monotonic() < deadline, seen
        text = me.answers.inner_text()
        if text != seen[-1]:
            assert text.startswith(seen[-1]) and ALPHABET.startswith(text)
            seen.append(text)
    assert me.draft.input_value() == "" and running(server) == 1
    me.button("Stop").click()
    me.rest()
    wait_until(lambda: running(server) == 0, me.page)
    text = me.answers.inner_text()
    assert text.startswith(seen[-1]) and ALPHABET.startswith(text) and len(text) < MAX_TOKENS
    assert "Stopped" in me.page.locator(".note").inner_text()
    me.page.wait_for_timeout(150)
    assert me.answers.inner_text() == text


def test_regenerate_edit_new_chat_undo_and_reload(visit):
    """What the model reads each time is what the page shows, with its own parts as they came."""
    me = visit()
    me.limit(Max_tokens=30)
    me.ask("One")
    answer = ALPHABET[:30].strip()
    assert me.answers.inner_text() == answer and "30 tokens" in me.page.locator(".note").inner_text()
    me.ask("Two")
    one, two = ({"role": "user", "content": text} for text in ("One", "Two"))
    answered = {"role": "assistant", "content": [{"type": "text", "text": ALPHABET[:30]}]}
    assert me.asked[1]["messages"] == [one, answered, two] and me.asked[1]["truncation"] == "auto"
    me.button("Regenerate").click()
    me.rest()
    assert me.asked[2] == me.asked[1] and me.answers.all_inner_texts() == [answer, answer]

    me.page.reload()
    assert me.questions() == ["One", "Two"] and me.answers.all_inner_texts() == [answer, answer]
    me.page.locator("article", has_text="One").get_by_role("button", name="Edit").click()
    me.page.get_by_label("Edit message").fill("Three")
    me.page.keyboard.press("Enter")
    me.rest()
    assert me.asked[3]["messages"] == [{"role": "user", "content": "Three"}] and me.questions() == ["Three"]
    me.button("Undo").click()
    assert me.questions() == ["One", "Two"]

    me.button("New chat").click()
    assert me.page.locator("article").count() == 0
    examples = me.page.locator("#examples button")
    expect(examples).to_have_count(4)
    example = examples.first.inner_text()
    examples.first.click()
    me.rest()
    assert me.asked[4]["messages"] == [{"role": "user", "content": example}] and me.button("Undo").is_hidden()


def stream(*deltas: dict, end: str = "data: [DONE]\n\n") -> dict:
    """A server's answer, for `route.fulfill`. A delta is {"content": ...}, or {"part": ...} for the calculator's."""
    types: list[str] = []
    for delta in deltas:
        part = delta.pop("part", None) or {"type": "text", "text": delta.get("content", "")}
        if part["text"]:
            types += [part["type"]] * (types[-1:] != [part["type"]])
            delta["parts"] = [{"index": len(types) - 1} | part]
    choices = [{"index": 0, "logprobs": None, "delta": delta, "finish_reason": None}
               for delta in deltas]
    chunks = [{"choices": [choice]} for choice in choices]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return {"content_type": "text/event-stream", "body": events + end}


def test_inside_an_answer_are_the_model_s_own_probabilities(visit, server):
    """By keyboard; the same numbers as the interface's. And the bar of the context."""
    me = visit()
    me.limit(Max_tokens=5)
    me.ask("Hi")
    me.button("Look inside").click()
    tokens = me.page.get_by_role("toolbar", name="Tokens of the answer").get_by_role("button")
    assert tokens.all_inner_texts() == list("abcde")
    body = {"model": "alphabet-sft", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "logprobs": True,
            "top_logprobs": 5}
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = me.page.request.post(f"{server}/v1/chat/completions", data=body, headers=headers).json()
    third = answer["choices"][0]["logprobs"]["content"][2]
    assert third["token"] == "c" and sum(math.exp(top["logprob"]) for top in third["top_logprobs"]) < 1
    tokens.first.focus()
    for _ in range(2):
        me.page.keyboard.press("ArrowRight")
    rows = [row.split() for row in me.page.locator(".about tbody tr").all_inner_texts()]
    percent = [100 * math.exp(top["logprob"]) for top in third["top_logprobs"]]
    shown = [float(row[-1].strip("<%")) for row in rows]
    assert rows[0][0] == "c" and shown == pytest.approx(percent, abs=0.1)
    assert str(answer["usage"]["total_tokens"]) in me.page.locator("#contextText").inner_text()


def test_whatever_is_written_is_text(visit):
    """HTML of the user and the model is shown, not obeyed; the calculator's part has a box; a little markdown."""
    evil = "<img src=x onerror=\"document.title='obeyed'\"><script>document.title='obeyed'</script>"
    me = visit()
    deltas = [
        {"role": "assistant", "content": ""}, {"part": {"type": "python", "text": "12 *"}},
        {"part": {"type": "python", "text": " <b>37"}}, {"part": {"type": "python_output", "text": "444"}},
        {"content": f" The **answer** is 2**3 and 4**5.\n\n{evil}\n\n- one `{evil}`\n- two"},
        {"content": f"\n\n```html\n{evil}\n**plain**\n```\n1. first\n2) sec\uFFFCond "},
        {"part": {"type": "python", "text": "1 +"}}, {"content": " is unknown"},
        {"part": {"type": "python", "text": "2"}},
    ]
    me.reply(*deltas)
    me.ask(evil)
    assert me.page.locator(".question").inner_text() == evil
    assert me.page.locator("#log").locator("img, script, b, a").count() == 0 and me.page.title() == "nanochat"
    assert me.answers.locator(".tool").all_inner_texts() == ["12 * <b>37\n= 444", "1 +\nno result", "2"]
    assert me.answers.locator(".tool .result").all_inner_texts() == ["= 444"]
    assert me.answers.locator("p").all_inner_texts()[1:] == [evil]
    assert me.answers.locator("strong").all_inner_texts() == ["answer"]
    assert me.answers.locator("p").first.inner_text().endswith("The answer is 2**3 and 4**5.")
    assert me.answers.locator("ul > li").all_inner_texts() == [f"one {evil}", "two"]
    assert me.answers.locator("ul code").inner_text() == evil
    assert me.answers.locator("pre").inner_text() == f"{evil}\n**plain**" and me.answers.locator("ol > li").count() == 2
    me.button("Copy code").click()
    wait_until(lambda: me.clipboard() == f"{evil}\n**plain**", me.page)


def test_a_passage_unfolds_with_its_place_and_the_quotation_marked(visit):
    """By keyboard; code at its end is a block; what was not found is a box as of the calculator."""
    me = visit()
    source = {"title": "Cellar", "place": "wine.md:14", "before": "It is <i>old</i>.",
              "missing": "rack"}
    text, code = "Wine <b>keeps</b> cool.", "# *cool*\n  run"
    passage = {"type": "python_output", "text": "Wine <b>ke", "source": source}
    me.reply(
        {"part": {"type": "python", "text": "search('x')"}}, {"part": {"type": "python_output", "text": "nothing"}},
        {"part": {"type": "python", "text": "lookup('cel"}}, {"part": {"type": "python", "text": "lar')"}},
        {"part": passage}, {"part": {"type": "python_output", "text": f"eps</b> cool. Run:\n```\n{code}\n```"}},
        {"content": text})
    me.ask("cellar rack?")
    details = me.answers.locator("details.passage")
    assert details.inner_text() == 'looked up: Cellar, without "rack"' and me.answers.locator("b, i").count() == 0
    details.locator("summary").focus()
    me.page.keyboard.press("Enter")
    assert details.inner_text().split("\n") == [
        'looked up: Cellar, without "rack"', "lookup('cellar')", f"It is <i>old</i>. {text} Run:", "Copy",
        *code.split("\n"), 'from wine.md:14, without "rack"']
    assert details.locator("mark").all_inner_texts() == [text]
    assert me.answers.locator(".tool").all_inner_texts() == ["search('x')\n= nothing"]


@pytest.mark.parametrize("turn", [{"question": "Hi", "parts": [{"type": "text", "text": None}]}, None])
def test_a_damaged_chat_is_left_out(visit, turn):
    me = visit()
    stored = json.dumps(json.dumps({"turns": [turn], "forgotten": 0}))
    me.context.add_init_script(f"sessionStorage['nanochat.chat'] = {stored}")
    me.page.reload()
    me.limit(Max_tokens=9)
    me.ask("Hello")
    assert me.answers.all_inner_texts() == [ALPHABET[:9]] and me.questions() == ["Hello"]


def test_what_goes_wrong_is_said_and_can_be_repeated(visit):
    """A key that is wanted; a stream that breaks."""
    me = visit(key="")
    me.expected = ["401"]  # what the browser itself says about such answers
    error = me.page.locator(".error:visible")
    key = me.page.locator("input[type=password]")
    key.fill("guess")
    key.press("Enter")
    me.button("Cancel").click()
    me.limit(Max_tokens=100)
    me.say("Hello")
    me.button("Cancel").click()
    assert "needs a key" in error.inner_text() and me.page.locator(".question").inner_text() == "Hello"
    me.button("Enter key").click()
    key.fill(KEY)
    key.press("Enter")
    expect(me.answers).to_have_text(ALPHABET[:100].strip())
    expect(error).to_have_count(0)
    me.rest()

    me.button("New chat").click()
    failure = 'data: {"error": {"message": "the model could not answer this request"}}\n\n'
    me.reply({"content": "half an"}, end=failure)
    me.say("Hello")
    error.wait_for()
    assert me.answers.inner_text() == "half an"
    assert error.inner_text().startswith("The model could not answer this request.")
