"""
How much of the engine's speed reaches the clients of the chat server: as many streams at once as the engine has places.

    python -m bench.serve

The same requests are answered by the engine alone, in this process, and by the server, in one of its own, whose clients
are this process; in turns, since a machine's speed changes. The weights are drawn, not trained.
"""
import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Literal

from configurator import configure

import torch

from nanochat.checkpoint import checkpoint_dir, load_checkpoint
from nanochat.conversation import render_prompt
from nanochat.distributed import compute_dtype, compute_init, print0
from nanochat.engine import Engine
from nanochat.errors import UserError, require_positive
from nanochat.gpt import GPT, config_from_depth
from nanochat.sampling import SamplingParams
from nanochat.saving import save_weights
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer

# ---- Model
depth = 4                   # layers; width and heads follow from it
max_seq_len = 512           # longest context
vocab_size = 8192           # tokens
device_type = ""            # cuda | mps | cpu; empty: the best there is
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of weights and cache; auto: bfloat16 where it is fast
# ---- Measurement
streams = 16                # at once
requests = 64               # in all: a stream that ends makes place for the next request
new_tokens = 256            # of each answer, at most
temperature = 1.0           # 0: always the most probable token
top_k = 50                  # only the k most probable tokens; 0: all
repeats = 5                 # of each measurement; the medians count
config = configure(globals())

require_positive(config, "depth", "max_seq_len", "streams", "requests", "new_tokens", "repeats")
*_, device = compute_init(device_type)
folder = tempfile.TemporaryDirectory(prefix="serve_bench_")
os.environ["NANOCHAT_BASE_DIR"] = folder.name
messages = [[{"role": "user", "content": f"Question {i}: what is that?"}] for i in range(requests)]


def write_checkpoint() -> Path:
    """What the server loads: drawn weights, and a tokenizer whose tokens are like words."""
    words = itertools.product(b"etaoinshrdlcumwfgypb", repeat=4)
    tokenizer = Tokenizer([b" " + bytes(word) for word in itertools.islice(words, vocab_size - 256 - len(SPECIAL_TOKENS))])
    model = GPT(config_from_depth(depth, vocab_size, max_seq_len))
    model.init_weights(0)
    return save_weights(checkpoint_dir("sft", "bench"), 0, model.state_dict(), tokenizer, model.config, {})


def ask_engine(engine: Engine, prompts: list[list[int]]) -> tuple[int, float]:
    """(tokens, seconds) of the engine alone."""
    start = time.perf_counter()
    answers = engine.generate(prompts, [SamplingParams(new_tokens, temperature, top_k, seed=i) for i in range(requests)])
    return sum(len(answer.tokens) for answer in answers), time.perf_counter() - start


async def ask_server(port: int) -> tuple[int, float]:
    """(tokens, seconds) of the streams, from the first request to the end of the last answer."""
    waiting = iter(range(requests))

    async def client() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        tokens = 0
        for i in waiting:
            body = json.dumps({
                "model": "bench-sft", "messages": messages[i], "stream": True, "stream_options": {"include_usage": True},
                "max_tokens": new_tokens, "temperature": temperature, "top_k": top_k, "seed": i}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            received = bytearray()
            while not received.endswith(b"\r\n0\r\n\r\n"):  # the end of a chunked body
                part = await reader.read(65536)
                received += part
                if not part or not received.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"the server said {bytes(received[-500:])!r}")
            tokens += int(re.search(rb'"completion_tokens":(\d+)', received)[1])
        writer.close()
        return tokens

    start = time.perf_counter()
    tokens = sum(await asyncio.gather(*(client() for _ in range(streams))))
    return tokens, time.perf_counter() - start


def report(what: str, alone: float, through: float, ratio: float) -> None:
    print0(f"{what:9}engine alone {alone:8,.0f} tokens/s, reached the clients {through:8,.0f} tokens/s: {ratio:6.1%}")


model, tokenizer, _ = load_checkpoint(write_checkpoint(), device)
engine = Engine(model.eval().to(compute_dtype(dtype, device)), tokenizer, streams)
prompts = [render_prompt(tokenizer, {"messages": conversation}) for conversation in messages]
if max(map(len, prompts)) + new_tokens > max_seq_len:
    raise UserError(f"new_tokens={new_tokens} and a prompt do not fit into max_seq_len={max_seq_len}")
command = [sys.executable, "-m", "scripts.chat_web", "--source=sft", "--port=0", "--workers=1", f"--device_type={device.type}", f"--dtype={dtype}",
           f"--max_batch={streams}", f"--max_new_tokens={new_tokens}"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
try:
    found = re.match(r"http://[^:]+:(\d+) ", server.stdout.readline())
    if not found:
        raise RuntimeError("the server did not start")
    print0(f"depth {depth} on {device.type}, {torch.get_num_threads()} thread(s), {streams} streams, {requests} answers of up to {new_tokens} tokens")
    alone, through = [], []  # tokens per second
    for turn in range(repeats + 1):
        counted, seconds = ask_engine(engine, prompts)
        reached, server_seconds = asyncio.run(ask_server(int(found[1])))
        if abs(counted - reached) > 0.02 * counted:  # rounding may let two of them part
            raise RuntimeError(f"the engine wrote {counted} tokens, the server {reached}")
        if turn:  # the first one warms up
            alone.append(counted / seconds)
            through.append(reached / server_seconds)
            report("", alone[-1], through[-1], through[-1] / alone[-1])
    report("medians: ", median(alone), median(through), median(b / a for a, b in zip(alone, through)))
finally:
    server.terminate()
    server.wait()
    folder.cleanup()
