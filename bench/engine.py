"""
Tokens per second of the engine on this machine: one sequence and many together, greedy and sampled, in both dtypes.

    python -m bench.engine

The weights are drawn, not trained: speed does not depend on them. Each figure is the best of several runs, prompts
included. "uncached" is GPT.generate, which reads everything again for each token.
"""
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
max_seq_len = 512           # [1..] longest context
vocab_size = 8192           # [266..] tokens
kv_group = 1                # [1..] query heads per key head
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best there is
batch_size = 16             # [1..] sequences decoded together
prompt_tokens = 16          # [1..] of each prompt
new_tokens = 256            # [1..] written after each
repeats = 5                 # [1..] of which the fastest counts
configure(globals())

*_, device = compute_init(device_type)
# Of the right size; no text is made.
tokenizer = Tokenizer([bytes(divmod(i, 256)) for i in range(vocab_size - 256 - len(SPECIAL_TOKENS))])
model = GPT(config_from_depth(depth, vocab_size, max_seq_len, kv_group)).to(device)
model.init_weights(0)
prompts = torch.randint(256, (batch_size, prompt_tokens), generator=torch.Generator().manual_seed(0)).tolist()
ways = {
    "greedy": SamplingParams(new_tokens, temperature=0, stop=()),
    "temperature 1, top-k 50": SamplingParams(new_tokens, top_k=50, seed=0, stop=()),
    "temperature 1": SamplingParams(new_tokens, seed=0, stop=()),
}


def measure(name: str, rows: int, times: int, decode: Callable[[], int]) -> None:
    """decode returns how many tokens it has written; they are on the host: nothing is left running."""
    rates = []
    for _ in range(times):
        start = time.perf_counter()
        rates.append(decode() / (time.perf_counter() - start))
    print(f"{dtype_name:9} batch {rows:3}  {name:24} {max(rates):8,.0f} tokens/s")


print(f"depth {depth} on {device.type}, {torch.get_num_threads()} thread(s): {prompt_tokens} tokens read, {new_tokens} "
      f"written, best of {repeats}")
for dtype_name in ("float32", "bfloat16"):
    model.to(getattr(torch, dtype_name))
    measure("uncached, once", 1, 1, lambda: sum(1 for _ in model.generate(prompts[0], new_tokens, temperature=0)))
    start = time.perf_counter()
    engine = Engine(model, tokenizer, batch_size)
    print(f"{dtype_name:9} preparing the weights: {1000 * (time.perf_counter() - start):.0f} ms")
    for rows in sorted({1, batch_size}):
        for way, sampling in ways.items():
            measure(way, rows, repeats, lambda batch=prompts[:rows], sampling=sampling, engine=engine:
                    sum(len(answer.tokens) for answer in engine.generate(batch, sampling)))
