"""
Tokens per second of the engine on this machine: one sequence and many together, in both dtypes.

    python -m bench.engine

The weights are drawn, not trained: speed does not depend on them. Answers are greedy; the time includes the prompts.
Each figure is the best of several runs.

MBU is a decoding step's read rate as a share of the memory's copy rate. A step reads every matrix and the head once,
and each row's keys and values. MBU may pass 100% if the processor's caches hold a part of these.
"""
from configurator import configure

depth = 4                   # [1..] layers; width and heads follow from it
arch = "classic"            # classic, modern, or one with changes
vocab_size = 8192           # [266..] tokens
batch_size = 16             # [4..] sequences decoded together; also one alone, and a quarter of them
new_tokens = 256            # [2..496] written after each prompt of 16
repeats = 5                 # [1..] runs; the fastest counts
configure(globals())

import functools
import timeit
from collections.abc import Callable

import torch

from bench.harness import draw_weights, random_tokens
from nanochat.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from nanochat.inference.engine import Engine
from nanochat.inference.sampling import SamplingParams
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import config_from_depth
from nanochat.runtime.distributed import compute_init

device = compute_init("")
# Only its size matters: no text is made.
tokenizer = Tokenizer([bytes(divmod(i, 256)) for i in range(vocab_size - 256 - len(SPECIAL_TOKENS))])
model = GPT(config_from_depth(depth, vocab_size, 512, arch=arch)).to(device)
draw_weights(model)
prompts = random_tokens(256, batch_size, 16).tolist()
greedy = SamplingParams(new_tokens, temperature=0)


def fastest(times: int, function: Callable[[], object]) -> float:
    """Seconds. The function's result is on the host, so nothing is left running."""
    return min(timeit.repeat(function, number=1, repeat=times))


def copy_rate() -> float:
    """Bytes read and written per second."""
    tensor = torch.ones(2**24, device=device)  # 64 MiB
    other = torch.empty_like(tensor)
    return 2 * tensor.nbytes / fastest(20, lambda: other.copy_(tensor)[-1].item())


def step_bytes(rows: int, number: int) -> float:
    """Bytes that a decoding step has to read, on average over the answer. number: bytes per element."""
    config = model.config
    lengths = range(len(prompts[0]) + 1, len(prompts[0]) + new_tokens)
    seen = sum(min(length, config.window(layer)) for layer in range(config.n_layer) for length in lengths)
    kv = 2 * config.n_kv_head * config.head_dim * number * seen / len(lengths)
    return model.count_parameters("matrix", "head") * number + rows * kv


rate = copy_rate()
print(f"{arch}, depth {depth} on {device.type}, {torch.get_num_threads()} thread(s): {new_tokens} tokens, "
      f"best of {repeats}; memory copies {rate / 1e9:.1f} GB/s")
for dtype in ("float32", "bfloat16"):
    model.to(getattr(torch, dtype))
    engine = Engine(model, tokenizer, batch_size)
    engine.stop.clear()    # every answer has all tokens
    for rows in sorted({1, batch_size // 4, batch_size}):
        seconds = fastest(repeats, functools.partial(engine.generate, prompts[:rows], greedy))
        share = step_bytes(rows, model.lm_head.weight.itemsize) * new_tokens / seconds / rate
        print(f"{dtype:8} batch {rows:3} {rows * new_tokens / seconds:8,.0f} tokens/s, MBU {share:4.0%}", flush=True)
