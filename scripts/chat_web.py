"""
Serve chat models: a page to talk with them, and an interface that OpenAI's clients understand.

    python -m scripts.chat_web                                  # http://127.0.0.1:8000
    python -m scripts.chat_web --source="sft, rl" --port=80 --host=0.0.0.0
    python -m scripts.chat_web --allowed_hosts=chat.example.org     # behind a proxy of that name

    from openai import OpenAI
    OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none").chat.completions.create(
        model="TAG-sft", messages=[{"role": "user", "content": "What is 12 * 3?"}])

nanochat/serve/openai_api.py lists extensions and differences. Each engine is a process: one for each GPU, or one on a
CPU. SIGTERM ends the server when the requests that it has accepted are answered, after --drain_s at the latest; Ctrl-C
ends it at once. So does the death of a model's last worker, with exit code 1, for a supervisor to start it again.
"""
import asyncio
import os
import signal
import socket
import sys
import webbrowser
from functools import partial
from types import FrameType
from typing import Literal

from configurator import configure  # isort: split

import torch
import uvicorn

from nanochat.data.tokenizer import Tokenizer
from nanochat.runtime.console import print0
from nanochat.runtime.devices import choose_device_type
from nanochat.runtime.errors import UserError
from nanochat.serve.connections import ImpatientProtocol
from nanochat.serve.engine_process import load_engine
from nanochat.serve.web import Limits, create_app
from nanochat.serve.worker import ServedModel, Worker
from nanochat.tasks import example_questions
from nanochat.training.checkpoint import find_model, latest_stage, read_meta, tasks_of

# ---- Models
source = "auto"             # stages, such as "sft, rl", each served as TAG-STAGE; auto: the last one trained
model_tag: str | None = None  # folder of its checkpoints; None: the only one there is
step: int | None = None     # of the checkpoint; None: the newest valid one
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best there is
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of weights and cache; auto: bfloat16 where it is fast
compile = False             # the decoding step: faster answers, for a minute at the first start and 10 s later
workers = 0                 # [0..] processes for each model, on the GPUs in turn; 0: one for each GPU, or one on a CPU
# ---- Who may ask
host = "127.0.0.1"          # address to listen on; 0.0.0.0: every network this machine is in
port = 8000                 # [0..65535] 0: any that is free
open_page = False           # in this machine's browser, where it has a screen
api_key = ""                # the key that /v1 asks for; NANOCHAT_API_KEY does not show in the list of processes
allowed_hosts = ""          # a proxy's names, "chat.example.org, b.org": only they and localhost are then answered
cors_origins = ""           # pages of other servers that may ask, "https://a.org, https://b.org"; empty: none
# ---- Limits
max_batch = 16              # [1..] answers to one address that each engine writes at once; a newcomer has one more
prompt_cache_mb = 512       # [0..] MiB of each engine for what was read before, by address; 0: off
max_queue = 128             # [0..] answers that may wait, half of them one address's; beyond it: come again later (429)
max_n = 8                   # [1..] answers to one prompt
max_body_bytes = 1048576    # [1..] of a request
max_messages = 200          # [1..] of a conversation
max_chars = 200_000         # [1..] of its messages together
max_new_tokens = 1024       # [1..] of an answer; clients that ask for more get this many
truncate: Literal["", "oldest"] = ""  # oldest: what is too long loses its first exchanges; empty: an error
timeout_s = 300.0           # [>0] seconds from request to answer, which then ends with what it has
drain_s = 5.0               # [0..] seconds after SIGTERM for the answers that are not complete
# ---- Defaults of a request
temperature = 0.6           # [0..] 0: always the most probable token
top_k = 50                  # [0..] only the k most probable tokens; 0: all
configure(globals())

LOOPBACK = "127.0.0.1", "::1", "localhost"

lists = source, cors_origins, allowed_hosts.lower()
sources, origins, names = ([name.strip() for name in text.split(",") if name.strip()] for text in lists)
if not sources or len(set(sources)) < len(sources):
    raise UserError(f"source={source!r} must name one stage or several different ones, such as 'sft, rl'")
api_key = api_key or os.environ.get("NANOCHAT_API_KEY", "")

# The port first: whether it is free is known at once, a model takes longer to load. Connections wait until then.
try:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    both = host == "::" and socket.has_dualstack_ipv6()  # every address of version 4 as well
    listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    # For its connections as well. asyncio does so only for sockets that name their protocol; without it the second part
    # of each response, the body, waits 40 ms for the client to acknowledge the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
except OSError as error:
    reason = error.strerror.partition(" (")[0]
    raise UserError(f"cannot listen on {host} port {port}: {reason}; choose another with --port or --host") from None

if sources == ["auto"]:
    stage = latest_stage(model_tag)
    sources = [stage]
    about = ", a base model: it continues texts, and does not chat" * (stage == "base")
    print0(f"the last stage of training was {stage}{about}")
if not api_key and host not in LOOPBACK:
    print0(f"warning: whoever can reach {host} may use this server; NANOCHAT_API_KEY=... demands a key")
# Each engine is a process of its own, which loads the model; this one answers the web, and touches no GPU.
device_type = choose_device_type(device_type)
workers = workers or (torch.cuda.device_count() if device_type == "cuda" else 1)
models = []
for stage in sources:
    checkpoint = find_model(stage, model_tag, step)
    load = partial(
        load_engine, checkpoint, device_type, dtype, compile, max_batch, prompt_cache_mb * 2**20, workers)
    meta = read_meta(checkpoint)
    models.append(ServedModel(
        id=f"{checkpoint.parent.name}-{stage}", tokenizer=Tokenizer.load(checkpoint),
        context=meta["model_config"]["sequence_len"], step=meta["step"], created=int(checkpoint.stat().st_mtime),
        max_batch=max_batch, max_queue=max_queue, workers=[Worker(partial(load, i)) for i in range(workers)],
        chats=stage != "base", examples=example_questions(tasks_of(stage, checkpoint.parent.name))))

limits = Limits(
    max_body_bytes, max_messages, max_chars, max_new_tokens, max_n, timeout_s, temperature, top_k, truncate)
own_names = ["localhost", "127.0.0.1", "[::1]", *([] if host in LOOPBACK else [host.lower()])]
hosts = own_names + names if names or host in LOOPBACK else []
app = create_app(models, limits, api_key, origins, hosts)


class Server(uvicorn.Server):
    """Says when it is ready, ends with a model's last worker, and lets accepted requests end for drain_s before."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        print0(f"{url} serves {', '.join(model.id for model in models)}; Ctrl-C ends it")
        has_screen = sys.platform in ("darwin", "win32") or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
        if open_page and has_screen:
            webbrowser.open(url)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or any(model.dead for model in models)

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM gives accepted requests drain_s; Ctrl-C, or a second signal, ends them with an error."""
        if number == signal.SIGINT or self.should_exit:
            end_answers()
            self.config.timeout_graceful_shutdown = 2
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(drain_s, end_answers)
        await super().shutdown(sockets)  # accepts no connection, and waits for the last response to be read


def end_answers() -> None:
    """Those being written, and those that wait."""
    for model in models:
        for worker in model.workers:
            worker.stop()


settings = uvicorn.Config(
    app, http=ImpatientProtocol, ws="none", backlog=128, access_log=False, server_header=False,
    proxy_headers=False,    # any client can write X-Forwarded-For; cache and queue go by the connection's address
    log_level="error",      # warnings are of malformed requests, as many as a client likes
    timeout_graceful_shutdown=drain_s + 2)  # then connections whose clients do not read are cut
Server(settings).run(sockets=[listener])
if dead := [model.id for model in models if model.dead]:
    raise UserError(f"the worker of {', '.join(dead)} has died; the error is above")
