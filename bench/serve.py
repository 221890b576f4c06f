"""
How much of the engine's speed reaches the clients of the chat server: as many streams at once as the engine has places.

    python -m bench.serve
    python -m bench.serve --checkouts="., ../before" --workers=2    # against another version of this repo

The same requests are answered by the engine alone, in this process, and by the server, in one of its own, whose clients
are this process; in turns, since a machine's speed changes. The weights are drawn, not trained.
"""
import contextlib
import http.client
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Literal

from configurator import configure

import torch

from bench.harness import save_chat_model, scratch_base, serving
from nanochat.checkpoint import load_checkpoint
from nanochat.conversation import render_prompt
from nanochat.distributed import compute_dtype, compute_init
from nanochat.engine import Engine
from nanochat.sampling import SamplingParams

checkouts = "."             # folders with versions of this repo, whose servers are measured in turns
workers = 1                 # [1..] of each server, which share the cores
depth = 4                   # [1..] layers; width and heads follow from it
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best there is
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of weights and cache; auto: bfloat16 where it is fast
streams = 16                # [1..] at once
requests = 64               # [1..] in all: a stream that ends makes place for the next request
new_tokens = 256            # [1..] of each answer, at most
repeats = 5                 # [1..] of each measurement; the medians count
configure(globals())

*_, device = compute_init(device_type)
messages = [[{"role": "user", "content": f"Question {i}: what is that?"}] for i in range(requests)]
common = dict(temperature=1.0, top_k=50)


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


with scratch_base(), contextlib.ExitStack() as servers:
    model, tokenizer, _ = load_checkpoint(save_chat_model(depth, 512, "classic"), device)
    engine = Engine(model.eval().to(compute_dtype(dtype, device)), tokenizer, streams)
    settings = (f"--dtype={dtype}", f"--device_type={device.type}", f"--max_batch={streams}",
                f"--max_new_tokens={new_tokens}")
    ports = {checkout.strip(): servers.enter_context(serving(*settings, checkout=checkout.strip(), workers=workers))
             for checkout in checkouts.split(",")}
    print(f"depth {depth} on {device.type}, {torch.get_num_threads()} thread(s), {workers} worker(s), "
          f"{streams} streams, {requests} answers of up to {new_tokens} tokens")
    rates = {"engine alone": [], **{checkout: [] for checkout in ports}}
    for turn in range(repeats + 1):
        counted, seconds = ask_engine(engine)
        found = [counted / seconds]
        for port in ports.values():
            reached, seconds = ask_server(port)
            assert abs(counted - reached) <= 0.02 * counted, (counted, reached)  # rounding may let two of them part
            found.append(reached / seconds)
        if turn:  # the first one warms up
            for name, rate in zip(rates, found):
                rates[name].append(rate)
            print(*(f"{name} {rate:8,.0f} tokens/s {rate / found[0]:6.1%};" for name, rate in zip(rates, found)))
    print("medians:", *(f"{name} {median(its):8,.0f} tokens/s;" for name, its in rates.items()))
