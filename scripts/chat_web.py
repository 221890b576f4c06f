"""
Serve a chat model: a page to talk with it, and an interface that OpenAI's clients understand (docs/server.md).

    python -m scripts.chat_web --port=80 --host=0.0.0.0    # default: http://127.0.0.1:8000
    python -m scripts.chat_web --watch                              # training runs, live; chats once a model can
"""
from typing import Literal

from configurator import configure

# ---- Model, served as TAG-STAGE
source: Literal["auto", "base", "mid", "sft", "rl"] = "auto"  # stage of the model; auto: the last one trained
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
library: str | None = None  # name of a library to look things up in; None: Python's, if there is one
copying = True              # copy calls and quotations exactly (nanochat/inference/copying.py)
configure(globals())

# NANOCHAT_API_KEY=... demands a key. The server uses one GPU, or the CPU: with several GPUs start one on each port, and
# a proxy in front (--allowed_hosts=chat.example.org), which also keeps floods away. SIGTERM and Ctrl-C end the server
# when all accepted requests are answered, after a few seconds at the latest. If an engine fails, the server ends with
# exit code 1, so that a supervisor can start it again.
import os
import socket
from pathlib import Path

from nanochat.data.task import never_looks_up
from nanochat.inference.engine import Engine
from nanochat.inference.fresh_tools import open_library
from nanochat.runtime.console import print0
from nanochat.runtime.devices import compute_dtype
from nanochat.runtime.distributed import compute_init
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir
from nanochat.serve.app import create_app
from nanochat.serve.gate import LOOPBACK
from nanochat.serve.served_model import ServedModel
from nanochat.serve.server import Server
from nanochat.tasks.examples import example_questions
from nanochat.training.checkpoint import find_model, load_checkpoint, tasks_of
from nanochat.training.records import STAGES, latest_checkpoint, stage_of

# Not a setting: the list of processes would show it.
api_key = os.environ.get("NANOCHAT_API_KEY", "")

# The port comes first: a conflict is known at once, and a model takes longer to load. Connections wait.
try:
    listener = socket.create_server((host, port))
    # Connections inherit this option. asyncio sets it only for sockets that name their protocol. Without it each
    # response's body waits 40 ms until the client acknowledges the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
except OSError as error:
    reason = error.strerror.partition(" (")[0]
    raise UserError(f"cannot listen on {host} port {port}: {reason}; choose another with --port or --host") from None
url = f"http://{host}:{listener.getsockname()[1]}"

if not api_key and host not in LOOPBACK:
    print0(f"warning: anyone who can reach {host} may use this server; NANOCHAT_API_KEY=... demands a key")


def serve(checkpoint: Path) -> ServedModel:
    stage, tag = stage_of(checkpoint), checkpoint.parent.name
    specs = tasks_of(stage, tag)
    if warning := never_looks_up(specs, library):
        print0(warning)
    tools = open_library(library, copying)
    # Not earlier: while runs are only watched, a GPU is left to them.
    device = compute_init(device_type)
    model, tokenizer, _ = load_checkpoint(checkpoint, device)
    engine = Engine(model.eval().to(compute_dtype(dtype, device)), tokenizer, 2 * max_batch, tools=tools)
    examples = example_questions(specs, library=tools.library)
    return ServedModel(f"{tag}-{stage}", engine, chats=stage != "base", examples=examples)


tried: set[Path] = set()


def newer() -> ServedModel | None:
    """The model of the last finished stage; None if there is none, or if it has been served already."""
    stages = STAGES[1:] if source == "auto" else [source]
    latest = latest_checkpoint(stages, model_tag, only_finished=True)
    if latest is None or latest in tried:
        return None
    tried.add(latest)
    model = serve(find_model(stage_of(latest), latest.parent.name))
    print0(f"serving {model.id}: chat with it at {url}")
    return model


models = [] if watch else [serve(find_model(source, model_tag, step))]
hosts = allowed_hosts.replace(",", " ").split()
# With an empty list the server answers to every name.
if hosts or host in LOOPBACK:
    hosts.append(host)
defaults = {"temperature": temperature, "top_k": top_k}
app = create_app(models, max_new_tokens, defaults, api_key, hosts, newer if watch else None)
shown = f"shows the runs of {base_dir()}" if watch else f"serves {models[0].id}"
print0(f"{url} {shown}; Ctrl-C ends it")
Server(app, models).run(sockets=[listener])
for model in models:
    if model.state == "dead":
        raise UserError(f"the engine of {model.id} has failed; the error is above")
