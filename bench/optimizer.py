"""
AdamW against Muon for the matrices of the blocks, each at the best of several rates: the table of docs/optimizers.md.

    python -m bench.optimizer --write    # without --write it is only printed

Everything else is the same in all runs: weights, rows, schedule, and AdamW for the embedding and the head.
"""
import statistics
import time

from configurator import configure

import torch

from bench.harness import scratch_base, show
from nanochat.adamw import DistAdamW
from nanochat.dataloader import tokenizing_distributed_data_loader
from nanochat.gpt import GPT
from nanochat.gpt_config import config_from_depth
from nanochat.loss_eval import evaluate_bpb
from nanochat.optimizers import setup_optimizers
from nanochat.report import markdown_table
from nanochat.schedule import apply_schedule, lr_multiplier, momentum_at
from nanochat.tokenizer import Tokenizer, get_tokenizer
from nanochat.zero import Sharding

depth = 2                   # [1..] layers
vocab_size = 512            # [266..] tokens; few, so that the matrices are most of the model
steps = 200                 # [1..] of each run
write = False               # put the table into docs/optimizers.md
configure(globals())

ROWS, LENGTH = 8, 128  # of a step; tokens of a row
RATES = {"AdamW": (0.001, 0.002, 0.004, 0.008, 0.016), "Muon": (0.005, 0.01, 0.02, 0.04, 0.08)}  # of the matrices


def run(kind: str, rate: float, tokenizer: Tokenizer) -> tuple[float, float, float, float]:
    """(validation bits per byte, ms of the matrices' update, ms of the rest of a step, bytes of state a parameter)."""
    device = torch.device("cpu")
    model = GPT(config_from_depth(depth, tokenizer.get_vocab_size(), LENGTH))
    model.init_weights(seed=0)
    sharding = Sharding(model, model.units(), device, torch.float32, stage=1)
    others, matrices = setup_optimizers(model, sharding, matrix_lr=rate)
    kept = matrices.param_groups[0]["shards"]
    if kind == "AdamW":  # the same slices in its care
        matrices = DistAdamW([{"shards": kept, "lr": rate}], device, betas=(0.9, 0.95))
    batch = dict(device_batch_size=ROWS, max_seq_len=LENGTH, seed=0, device=device)
    loader = tokenizing_distributed_data_loader("tinyworld", "train", tokenizer, **batch)
    times = []
    for step in range(steps):
        start = time.perf_counter()
        inputs, targets, _ = next(loader)
        with sharding.accumulate(last=True):
            loss = model(inputs, targets)
            loss.backward()
        stats = sharding.reduce_and_clip(loss)
        apply_schedule((others, matrices), step, steps, lr_multiplier(step, steps, 0, 0.4, 0.0), momentum_at(step))
        others.step(stats)
        middle = time.perf_counter()
        matrices.step(stats)
        times.append((1e3 * (time.perf_counter() - middle), 1e3 * (middle - start)))
        sharding.all_gather_params()
    loader.close()
    validation = tokenizing_distributed_data_loader("tinyworld", "val", tokenizer, **batch)
    bpb = evaluate_bpb(model, validation, 256 // ROWS, tokenizer.token_bytes())
    validation.close()
    state = sum(tensor.nbytes for moment in matrices.state.values() for tensor in moment.values())
    return bpb, *map(statistics.median, zip(*times)), state / sum(s.end - s.start for s in kept)


lines = []
with scratch_base(vocab_size):
    for kind, rates in RATES.items():
        results = {rate: run(kind, rate, get_tokenizer("tinyworld")) for rate in rates}
        best = min(bpb for bpb, *_ in results.values())
        for rate, (bpb, update, rest, state) in results.items():
            score = f"**{bpb:.4f}**" if bpb == best else f"{bpb:.4f}"
            lines.append([kind, rate, score, f"{update:.1f}", f"{rest:.0f}", f"{state:.0f}"])
columns = ["the matrices' optimizer", "rate", "validation, bits per byte", "its update, ms", "rest of the step, ms",
           "bytes of state per parameter"]
show(f"{markdown_table(columns, lines)}\n\nDepth {depth}, vocabulary {vocab_size}, {steps} steps of {ROWS} rows of "
     f"{LENGTH} tokens of the embedded world, float32, not compiled, {torch.get_num_threads()} thread(s).",
     "optimizers.md", "bench.optimizer", write)
