"""
Tokens per second of the engine on this machine: one sequence and many together, greedy and sampled, in both dtypes.

    python -m bench.engine

The weights are drawn, not trained: speed does not depend on them. Each figure is the best of several runs, prompts
included. "uncached" is GPT.generate, which reads everything again for each token.
"""
import functools
import time
from collections.abc import Callable
from typing import Literal

from configurator import configure

import torch

from nanochat.distributed import compute_init
from nanochat.engine import Engine
from nanochat.gpt import GPT, config_from_depth
from nanochat.sampling import SamplingParams
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer

depth = 4                   # [1..] layers; width and heads follow from it
arch = "classic"            # or "modern", or one of them with changes
vocab_size = 8192           # [266..] tokens
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best there is
batch_size = 16             # [1..] sequences decoded together
new_tokens = 256            # [1..496] written after each prompt of 16
repeats = 5                 # [1..] of which the fastest counts
configure(globals())

*_, device = compute_init(device_type)
# Of the right size; no text is made.
tokenizer = Tokenizer([bytes(divmod(i, 256)) for i in range(vocab_size - 256 - len(SPECIAL_TOKENS))])
model = GPT(config_from_depth(depth, vocab_size, 512, arch=arch)).to(device)
model.init_weights(0)
prompts = torch.randint(256, (batch_size, 16), generator=torch.Generator().manual_seed(0)).tolist()
ways = {
    "greedy": SamplingParams(new_tokens, temperature=0, stop=()),
    "temperature 1, top-k 50": SamplingParams(new_tokens, top_k=50, seed=0, stop=()),
    "temperature 1": SamplingParams(new_tokens, seed=0, stop=()),
}


def measure(name: str, rows: int, times: int, decode: Callable[[], object]) -> None:
    """decode writes new_tokens for each row; they are on the host: nothing is left running."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        decode()
        seconds.append(time.perf_counter() - start)
    print(f"{dtype:9} batch {rows:3}  {name:24} {rows * new_tokens / min(seconds):8,.0f} tokens/s")


threads = torch.get_num_threads()
print(f"{arch}, depth {depth} on {device.type}, {threads} thread(s): {new_tokens} tokens, best of {repeats}")
for dtype in ("float32", "bfloat16"):
    model.to(getattr(torch, dtype))
    measure("uncached, once", 1, 1, lambda: list(model.generate(prompts[0], new_tokens)))
    engine = Engine(model, tokenizer, batch_size)
    for rows in sorted({1, batch_size}):
        for way, params in ways.items():
            measure(way, rows, repeats, functools.partial(engine.generate, prompts[:rows], params))
