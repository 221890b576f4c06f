"""
Serve chat models: a page to talk with them, and an interface that OpenAI's clients understand.

    python -m scripts.chat_web                                  # http://127.0.0.1:8000
    python -m scripts.chat_web --source="sft, rl" --port=80 --host=0.0.0.0
    python -m scripts.chat_web --allowed_hosts=chat.example.org     # behind a proxy of that name
    python -m scripts.chat_web --watch                              # training runs, live; chats once a model can

    from openai import OpenAI
    OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none").chat.completions.create(
        model="TAG-sft", messages=[{"role": "user", "content": "What is 12 * 3?"}])

nanochat/serve/openai_requests.py lists extensions and differences. NANOCHAT_API_KEY=... demands a key. The server uses
one GPU, or the CPU: with several GPUs start one on each port, and a proxy in front, which also keeps floods away.
SIGTERM ends the server when all accepted requests are answered, after a few seconds at the latest; Ctrl-C ends it at
once. When a model's engine fails, the server ends with exit code 1, so that a supervisor can start it again.
"""
from typing import Literal

from configurator import configure

# ---- Models
source = "auto"             # stages, such as "sft, rl", each served as TAG-STAGE; auto: the last one trained
model_tag: str | None = None  # folder of its checkpoints; None: the only one there is
step: int | None = None     # the checkpoint's step; None: the newest valid one
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best available
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # weights and KV cache; auto: bfloat16 where it is fast
watch = False               # show the runs of the base folder; serve the last finished stage as soon as it can chat
# ---- Who may ask
host = "127.0.0.1"          # address to listen on; 0.0.0.0: every network this machine is in
port = 8000                 # [0..65535] 0: any free port
allowed_hosts = ""          # a proxy's names, "chat.example.org, b.org": only these and localhost are answered then
# ---- Answers
max_batch = 16              # [1..] answers to one request; an engine writes twice as many at once
max_new_tokens = 1024       # [1..] tokens of an answer; clients that ask for more get this many
temperature = 0.6           # [0..] if a request sets none; 0: always the most probable token
top_k = 50                  # [0..] if a request sets none: only the k most probable tokens; 0: all
library: str | None = None  # name or file of a library to look things up in; None: Python's, if there is one
copying = True              # copy calls and quotations exactly (nanochat/inference/copying.py)
configure(globals())

import os
import re
import socket
from functools import partial
from pathlib import Path

from nanochat.corpus.passages import open_library
from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.tools import open_tools
from nanochat.runtime.console import print0
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir
from nanochat.serve.app import create_app
from nanochat.serve.gate import LOOPBACK
from nanochat.serve.served_model import ServedModel, load_engine
from nanochat.serve.server import Server
from nanochat.tasks import never_looks_up
from nanochat.tasks.examples import example_questions
from nanochat.training.checkpoint import find_model, latest_stage, tasks_of
from nanochat.training.records import STAGES, latest_checkpoints, read_meta

# Not a setting: the list of processes would show it.
api_key = os.environ.get("NANOCHAT_API_KEY", "")
names = re.compile(r"[^\s,]+").findall
sources = names(source)
if not sources or len(set(sources)) < len(sources):
    raise UserError(f"source={source!r} must name one stage or several different ones, such as 'sft, rl'")

# The port comes first: a conflict is known at once, and a model takes longer to load. Connections wait.
try:
    listener = socket.create_server((host, port))
    # Connections inherit this option. asyncio sets it only for sockets that name their protocol. Without it each
    # response's body waits 40 ms until the client acknowledges the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
except OSError as error:
    reason = error.strerror.partition(" (")[0]
    raise UserError(f"cannot listen on {host} port {port}: {reason}; choose another with --port or --host") from None

if not api_key and host not in LOOPBACK:
    print0(f"warning: anyone who can reach {host} may use this server; NANOCHAT_API_KEY=... demands a key")


def serve(stage: str, checkpoint: Path) -> ServedModel:
    """A model, which its engine's thread loads when it starts."""
    tag = checkpoint.parent.name
    specs = tasks_of(stage, tag)
    if warning := never_looks_up(specs, library):
        print0(warning)
    # The engine's own connection to the library is for its thread; this one tells where a passage comes from.
    tools = open_library(library)
    load = partial(load_engine, checkpoint, device_type, dtype, max_batch, open_tools(library, copying))
    return ServedModel(
        id=f"{tag}-{stage}",
        tokenizer=Tokenizer.load(checkpoint),
        context=read_meta(checkpoint)["model_config"]["sequence_len"],
        max_batch=max_batch,
        tools=tools,
        make_engine=load,
        chats=stage != "base",
        examples=example_questions(specs, library=tools.library),
    )


tried: set[Path] = set()


def newer() -> ServedModel | None:
    """The model of the last finished stage; None if there is none, or if it has been served already."""
    latest = latest_checkpoints(STAGES[1:] if source == "auto" else sources, model_tag, only_finished=True)
    if not latest or latest[-1] in tried:
        return None
    tried.add(latest[-1])
    *_, folder, tag, _ = latest[-1].parts
    stage = folder.removesuffix("_checkpoints")
    model = serve(stage, find_model(stage, tag))
    print0(f"loading {model.id}, to chat with it at {url}")
    return model


models = []
if not watch:
    if source == "auto":
        stage = latest_stage(model_tag)
        sources = [stage]
        about = ", a base model: it continues texts, and does not chat" if stage == "base" else ""
        print0(f"the last stage of training was {stage}{about}")
    models = [serve(stage, find_model(stage, model_tag, step)) for stage in sources]

hosts = names(allowed_hosts)
# With an empty list the server answers to every name.
if hosts or host in LOOPBACK:
    hosts.append(host)
defaults = {"temperature": temperature, "top_k": top_k}
app = create_app(models, max_new_tokens, defaults, api_key, hosts, newer if watch else None)
url = f"http://{host}:{listener.getsockname()[1]}"
shown = ", ".join(model.id for model in models) or f"the runs of {base_dir()}"
print0(f"{url} {'shows' if watch else 'serves'} {shown}; Ctrl-C ends it")
Server(app, models).run(sockets=[listener])
for model in models:
    if model.state == "dead":
        raise UserError(f"the engine of {model.id} has failed; the error is above")
