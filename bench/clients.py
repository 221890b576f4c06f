"""
Other people's clients against a running server.

    python -m scripts.chat_web --model_tag=chat
    python -m bench.clients                          # with the clients that are there
    python -m bench.clients --node=FOLDER            # in which `npm install` was run
    python -m bench.clients --suite=openai-1.2.3     # also the tests of OpenAI's client: its sdist, unpacked

Each client has to receive, whole and as a stream, the text that plain HTTP gives, and to raise an error of its own for
a model that does not exist. Nothing is installed; any Python will do. Clients: pip install openai litellm
langchain-openai llm; npm install openai ai @ai-sdk/openai-compatible. The suite needs its pyproject.toml's group `dev`.
"""
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from configurator import configure

url = "http://127.0.0.1:8000"  # of the server
model = ""                  # to ask; empty: the first that the server lists
node = ""                   # folder whose node_modules has the clients for Node; empty: without them
suite = ""                  # folder of the unpacked sdist of `openai`; empty: without its tests
configure(globals())

QUESTION, ABSENT, SETTINGS = "What is 12 * 37?", "absent", {"temperature": 0, "max_tokens": 32}
MESSAGES = [{"role": "user", "content": QUESTION}]
TESTS = [f"tests/api_resources/{name}.py" for name in ("chat/test_completions", "test_completions", "test_models")]

Result = tuple[str, str, str]  # the whole answer, the streamed one, the name of the error for an absent model


def post(**changes) -> str:
    """The body of an answer, by plain HTTP."""
    body = json.dumps({"model": model, "messages": MESSAGES} | SETTINGS | changes).encode()
    headers = {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body, headers)).read().decode()


def error_of(ask: Callable) -> str:
    try:
        ask()
    except Exception as error:
        return type(error).__name__
    return "none"


# ---- Clients: each returns its result


def with_curl() -> Result:
    def ask(**changes) -> str:
        body = json.dumps({"model": model, "messages": MESSAGES} | SETTINGS | changes)
        command = ["curl", "-sN", "-w", "\n%{http_code}", "--json", body, f"{url}/v1/chat/completions"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    chunks = [json.loads(line[6:]) for line in ask(stream=True).splitlines() if line.startswith("data: {")]
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    whole = json.loads(ask().splitlines()[0])["choices"][0]["message"]["content"]
    return whole, streamed, "status " + ask(model=ABSENT).splitlines()[-1]


def with_openai() -> Result:
    from openai import OpenAI

    create = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).chat.completions.create
    ask = {"model": model, "messages": MESSAGES} | SETTINGS
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in create(**ask, stream=True))
    return create(**ask).choices[0].message.content, streamed, error_of(lambda: create(**ask | {"model": ABSENT}))


def with_litellm() -> Result:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network
    from litellm import completion

    ask = {"api_base": f"{url}/v1", "api_key": "none", "messages": MESSAGES} | SETTINGS
    chunks = completion(model=f"openai/{model}", stream=True, **ask)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    whole = completion(model=f"openai/{model}", **ask).choices[0].message.content
    return whole, streamed, error_of(lambda: completion(model=f"openai/{ABSENT}", **ask))


def with_langchain() -> Result:
    from langchain_openai import ChatOpenAI

    ask = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0} | SETTINGS
    chat = ChatOpenAI(model=model, **ask)
    several = [message.content for message in [chat.invoke(QUESTION), *chat.batch([QUESTION] * 3)]]
    whole = several[0] if len(set(several)) == 1 else repr(several)
    streamed = "".join(chunk.content for chunk in chat.stream(QUESTION))
    return whole, streamed, error_of(lambda: ChatOpenAI(model=ABSENT, **ask).invoke(QUESTION))


def with_llm() -> Result:
    """The command, with the file in which it lists other servers."""
    with tempfile.TemporaryDirectory() as folder:
        names = [{"model_id": f"own-{name}", "model_name": name, "api_base": f"{url}/v1"} for name in (model, ABSENT)]
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps(names))  # JSON is YAML

        def ask(name: str, *options: str) -> str:
            settings = [word for key, value in SETTINGS.items() for word in ("-o", key, str(value))]
            command = [sys.executable, "-m", "llm", "-m", f"own-{name}", *settings, "--key", "none", *options, QUESTION]
            env = os.environ | {"LLM_USER_PATH": folder}
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            return done.stderr[:24].strip() if done.returncode else done.stdout.removesuffix("\n")

        return ask(model, "--no-stream"), ask(model), ask(ABSENT)


NODE = """
const [url, model, absent, settings, messages] = JSON.parse(process.argv[1])
const fail = promise => promise.then(() => 'none', error => error.constructor.name)
let whole, streamed = '', error
"""
OPENAI_JS = NODE + """
const { default: OpenAI } = await import('openai')
const client = new OpenAI({ baseURL: url + '/v1', apiKey: 'none', maxRetries: 0 })
const ask = more => client.chat.completions.create({ model, messages, ...settings, ...more })
whole = (await ask({})).choices[0].message.content
for await (const chunk of await ask({ stream: true })) streamed += chunk.choices[0].delta.content ?? ''
error = await fail(ask({ model: absent }))
console.log(JSON.stringify([whole, streamed, error]))
"""
AI_JS = NODE + """
const { generateText, streamText } = await import('ai')
const { createOpenAICompatible } = await import('@ai-sdk/openai-compatible')
const provider = createOpenAICompatible({ name: 'own', baseURL: url + '/v1' })
const ask = { messages, temperature: settings.temperature, maxOutputTokens: settings.max_tokens, maxRetries: 0 }
whole = (await generateText({ model: provider(model), ...ask })).text
for await (const text of streamText({ model: provider(model), ...ask }).textStream) streamed += text
error = await fail(generateText({ model: provider(absent), ...ask }))
console.log(JSON.stringify([whole, streamed, error]))
"""


def with_node(program: str) -> Result:
    """A program for Node, in the folder with the clients."""
    ask = json.dumps([url, model, ABSENT, SETTINGS, MESSAGES])
    done = subprocess.run(["node", "--input-type=module", "-e", program, ask], cwd=node, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return tuple(json.loads(done.stdout))


def node_version(package: str) -> str:
    path = Path(node, "node_modules", package, "package.json")
    return json.loads(path.read_text())["version"] if node and path.exists() else ""


def python_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def run_suite() -> None:
    """OpenAI's own tests of chat, completions and models, asking for our model; what the server said to the rest."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(suite, Path(folder, "suite"), ignore=shutil.ignore_patterns("src"))
        for test in TESTS:
            names = r"gpt-[\w.-]+(?=\",)"
            (copy / test).write_text(re.sub(names, model, (copy / test).read_text()))
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "--tb=line", "-rN", *TESTS]
        env = os.environ | {"TEST_API_BASE_URL": f"{url}/v1"}
        lines = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True).stdout.splitlines()
    reasons = Counter(found[1] for line in lines if (found := re.match(r"E .*Error code: (\d+ - .{,90})", line)))
    print(f"\nOpenAI's tests: {lines[-1]}")
    for reason, count in reasons.most_common():
        print(f"{count:5} {reason}")


if not model:
    model = json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"]
expected = json.loads(post())["choices"][0]["message"]["content"]
curl = shutil.which("curl") and subprocess.run(["curl", "-V"], capture_output=True, text=True).stdout.split()[1]
clients = {
    "curl": (curl, with_curl),
    "openai (Python)": (python_version("openai"), with_openai),
    "litellm": (python_version("litellm"), with_litellm),
    "langchain-openai": (python_version("langchain-openai"), with_langchain),
    "llm": (python_version("llm"), with_llm),
    "openai (Node)": (node_version("openai"), lambda: with_node(OPENAI_JS)),
    "ai (Node)": (node_version("ai"), lambda: with_node(AI_JS)),
}
print(f"{model} at {url} says {expected!r}\n")
print("| client | version | whole | streamed | an absent model |\n|---|---|---|---|---|")
for name, (version, ask) in clients.items():
    if not version:
        print(f"| {name} | not there | | | |")
        continue
    whole, streamed, error = ask()
    marks = ["same" if text == expected else f"differs: {text!r}" for text in (whole, streamed)]
    print(f"| {name} | {version} | {marks[0]} | {marks[1]} | {error} |")
if suite:
    run_suite()
