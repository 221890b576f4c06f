"""
How much of the engine's speed reaches the clients of the chat server: as many streams at once as the engine has places.

    python -m bench.serve

The same requests are answered by the engine alone, in this process, and by the server, in one of its own, whose clients
are this process; in turns, since a machine's speed changes. The weights are drawn, not trained.
"""
from typing import Any, Literal

from configurator import configure

workers = 1                 # [1..] of the server, which share the cores
depth = 4                   # [1..] layers; width and heads follow from it
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best there is
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of weights and cache; auto: bfloat16 where it is fast
streams = 16                # [1..] at once
requests = 64               # [1..] in all: a stream that ends makes place for the next request
new_tokens = 256            # [1..] of each answer, at most
repeats = 5                 # [1..] of each measurement; the medians count
configure(globals())

import contextlib
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch

from nanochat.data.conversation import render_prompt
from nanochat.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from nanochat.inference.engine import Engine
from nanochat.inference.sampling import SamplingParams
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import config_from_depth
from nanochat.runtime.devices import compute_dtype
from nanochat.runtime.distributed import compute_init
from nanochat.training.checkpoint import checkpoint_dir, load_checkpoint
from nanochat.training.saving import save_weights

*_, device = compute_init(device_type)
messages = [[{"role": "user", "content": f"Question {i}: what is that?"}] for i in range(requests)]
common: dict[str, Any] = dict(temperature=1.0, top_k=50)


def save_model() -> Path:
    """The checkpoint of a model "bench" with a vocabulary of 8,192, whose weights are drawn: it writes words alone."""
    words = itertools.product(b"etaoinshrdlcumwfgypb", repeat=4)  # tokens that are like words
    merges = [b" " + bytes(word) for word in itertools.islice(words, 8192 - 256 - len(SPECIAL_TOKENS))]
    model = GPT(config_from_depth(depth, 8192, 512))
    model.init_weights(0)
    model.lm_head.weight.data[:256] = model.lm_head.weight.data[-len(SPECIAL_TOKENS) :] = 0
    return save_weights(checkpoint_dir("sft", "bench"), 0, model.state_dict(), Tokenizer(merges), model.config, {})


@contextlib.contextmanager
def serving() -> Iterator[int]:
    """The port of a chat server."""
    settings = {"source": "sft", "port": 0, "workers": workers, "dtype": dtype, "device_type": device.type,
                "max_batch": streams, "max_new_tokens": new_tokens}
    command = [sys.executable, "-m", "scripts.chat_web", *(f"--{name}={value}" for name, value in settings.items())]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield int(re.match(r"http://[^:]+:(\d+) ", server.stdout.readline())[1])
    finally:
        server.terminate()
        server.wait()


def ask_engine(engine: Engine) -> tuple[int, float]:
    """(tokens, seconds) of the engine alone."""
    prompts = [render_prompt(tokenizer, {"messages": conversation}) for conversation in messages]
    start = time.perf_counter()
    answers = engine.generate(prompts, [SamplingParams(new_tokens, seed=i, **common) for i in range(requests)])
    return sum(len(answer.tokens) for answer in answers), time.perf_counter() - start


def ask_server(port: int) -> tuple[int, float]:
    """(tokens, seconds) of the streams, from the first request to the end of the last answer."""
    def one(i: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        body = dict(messages=messages[i], model="bench-sft", stream=True, stream_options={"include_usage": True},
                    max_tokens=new_tokens, seed=i, **common)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        received = connection.getresponse().read()
        connection.close()
        return int(re.search(rb'"completion_tokens":(\d+)', received)[1])

    start = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        return sum(pool.map(one, range(requests))), time.perf_counter() - start


with tempfile.TemporaryDirectory() as folder:
    os.environ["NANOCHAT_BASE_DIR"] = folder
    model, tokenizer, _ = load_checkpoint(save_model(), device)
    engine = Engine(model.eval().to(compute_dtype(dtype, device)), tokenizer, streams)
    print(f"depth {depth} on {device.type}, {torch.get_num_threads()} thread(s), {workers} worker(s), "
          f"{streams} streams, {requests} answers of up to {new_tokens} tokens")
    alone, shares = [], []
    with serving() as port:
        for turn in range(repeats + 1):
            counted, seconds = ask_engine(engine)
            rate = counted / seconds
            reached, seconds = ask_server(port)
            assert abs(counted - reached) <= 0.02 * counted, (counted, reached)  # rounding may let two of them part
            if turn:  # the first one warms up
                alone.append(rate)
                shares.append(reached / seconds / rate)
                print(f"engine alone {rate:8,.0f} tokens/s; of these {shares[-1]:.1%} reach the clients", flush=True)
print(f"medians: {median(alone):,.0f} tokens/s, {median(shares):.1%}")
