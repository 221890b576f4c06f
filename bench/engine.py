"""
Tokens per second of the engine on this machine: one sequence and many together, greedy and sampled, in both dtypes.

    python -m bench.engine

The weights are drawn, not trained: speed does not depend on them. Each figure is the best of several runs, prompts
included. "uncached" is GPT.generate, which reads everything again for each token.
"""
import time

from configurator import configure

import torch

from nanochat.distributed import compute_init, print0
from nanochat.engine import Engine
from nanochat.errors import require_positive
from nanochat.gpt import GPT, config_from_depth
from nanochat.sampling import SamplingParams
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer

# ---- Model
depth = 4                   # layers; width and heads follow from it
max_seq_len = 512           # longest context
vocab_size = 8192           # tokens
kv_group = 1                # query heads per key head
device_type = ""            # cuda | mps | cpu; empty: the best there is
# ---- Measurement
batch_size = 16             # sequences decoded together
prompt_tokens = 16          # of each prompt
new_tokens = 256            # written after each
repeats = 5                 # of which the fastest counts
config = configure(globals())

require_positive(config, "depth", "max_seq_len", "kv_group", "batch_size", "prompt_tokens", "new_tokens", "repeats")
*_, device = compute_init(device_type)
num_merges = vocab_size - 256 - len(SPECIAL_TOKENS)
tokenizer = Tokenizer([bytes(divmod(i, 256)) for i in range(num_merges)])  # of the right size; no text is made
model = GPT(config_from_depth(depth, vocab_size, max_seq_len, kv_group)).to(device)
model.init_weights(0)
generator = torch.Generator().manual_seed(0)
prompts = torch.randint(256, (batch_size, prompt_tokens), generator=generator).tolist()
ways = {
    "greedy": SamplingParams(new_tokens, temperature=0, stop=()),
    "temperature 1, top-k 50": SamplingParams(new_tokens, top_k=50, seed=0, stop=()),
    "temperature 1": SamplingParams(new_tokens, seed=0, stop=()),
}

print0(f"depth {depth} on {device.type}, {torch.get_num_threads()} thread(s): {prompt_tokens} tokens read, {new_tokens} written, best of {repeats}")
for dtype in (torch.float32, torch.bfloat16):
    model.to(dtype)
    name = str(dtype).removeprefix("torch.")

    start = time.perf_counter()
    count = sum(1 for _ in model.generate(prompts[0], new_tokens, temperature=0))
    print0(f"{name:9} batch   1  {'uncached, once':24} {count / (time.perf_counter() - start):8,.0f} tokens/s")

    start = time.perf_counter()
    engine = Engine(model, tokenizer, batch_size)
    print0(f"{name:9} preparing the weights: {1000 * (time.perf_counter() - start):.0f} ms")

    for rows in sorted({1, batch_size}):
        for way, sampling in ways.items():
            fastest = float("inf")
            for _ in range(repeats):
                start = time.perf_counter()
                answers = engine.generate(prompts[:rows], sampling)  # its tokens are on the host: nothing is left running
                fastest = min(fastest, time.perf_counter() - start)
            count = sum(len(answer.tokens) for answer in answers)
            print0(f"{name:9} batch {rows:3}  {way:24} {count / fastest:8,.0f} tokens/s")
