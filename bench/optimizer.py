"""
AdamW against Muon for the matrices of the blocks, each at the best of several rates: the table of docs/optimizers.md.

    python -m bench.optimizer            # prints it
    python -m bench.optimizer --write    # and puts it into the page

Everything else is the same in all runs: weights, rows, schedule, and AdamW for the embedding and the head.
"""
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from configurator import configure

import torch

from nanochat.optimizers import setup_optimizers
from nanochat.adamw import DistAdamW
from nanochat.dataloader import tokenizing_distributed_data_loader
from nanochat.errors import UserError, require_positive
from nanochat.gpt import GPT, config_from_depth
from nanochat.loss_eval import evaluate_bpb
from bench.pages import put_into_page
from nanochat.report import markdown_table
from nanochat.schedule import apply_schedule, lr_multiplier
from nanochat.tokenizer import Tokenizer, get_tokenizer
from nanochat.zero import Sharding

# ---- Model and batch
depth = 2                   # layers
vocab_size = 512            # tokens; few, so that the matrices are most of the model
max_seq_len = 128           # tokens per row
rows = 8                    # per step
# ---- Runs
steps = 200                 # of each run
adamw_rates = "0.001 0.002 0.004 0.008 0.016"  # tried for the matrices
muon_rates = "0.005 0.01 0.02 0.04 0.08"       # tried for the matrices
eval_rows = 256             # of validation, after the last step
seed = 0                    # of weights and data order
write = False               # put the table into docs/optimizers.md
config = configure(globals())
require_positive(config, "depth", "max_seq_len", "rows", "steps", "eval_rows")
for name in ("adamw_rates", "muon_rates"):
    if not re.fullmatch(r"\s*(\d+\.?\d*\s+)*\d+\.?\d*\s*", config[name]):
        raise UserError(f"{name}={config[name]} must be positive numbers with blanks between them")


def run(kind: str, rate: float, tokenizer: Tokenizer) -> tuple[float, float, float, float]:
    """(bits per byte on validation text, milliseconds of a matrices' update and of the rest of a step, bytes of state per parameter)."""
    device = torch.device("cpu")
    model = GPT(config_from_depth(depth, tokenizer.get_vocab_size(), max_seq_len))
    model.init_weights(seed)
    sharding = Sharding(model, model.units(), device, torch.float32, stage=1)
    others, matrices = setup_optimizers(model, sharding, matrix_lr=rate)
    if kind == "AdamW":  # the same slices in its care
        matrices = DistAdamW([{"shards": matrices.param_groups[0]["shards"], "lr": rate}], device, betas=(0.9, 0.95))
    batch = dict(device_batch_size=rows, max_seq_len=max_seq_len, seed=seed, device=device)
    train = tokenizing_distributed_data_loader("tinyworld", "train", tokenizer, **batch)
    update, rest = [], []
    for step in range(steps):
        start = time.perf_counter()
        inputs, targets, _ = next(train)
        with sharding.accumulate(last=True):
            loss = model(inputs, targets)
            loss.backward()
        stats = sharding.reduce_and_clip(loss)
        apply_schedule((others, matrices), step, steps, lr_multiplier(step, steps, 0.0, 0.4, 0.0))
        others.step(stats)
        middle = time.perf_counter()
        matrices.step(stats)
        end = time.perf_counter()
        sharding.all_gather_params()
        update.append(1e3 * (end - middle))
        rest.append(1e3 * (middle - start))
    train.close()
    validation = tokenizing_distributed_data_loader("tinyworld", "val", tokenizer, **batch)
    bpb = evaluate_bpb(model, validation, max(eval_rows // rows, 1), tokenizer.token_bytes())
    validation.close()
    shards = matrices.param_groups[0]["shards"]
    state = sum(tensor.nbytes for moment in matrices.state.values() for tensor in moment.values()) / sum(s.end - s.start for s in shards)
    return bpb, statistics.median(update), statistics.median(rest), state


with tempfile.TemporaryDirectory() as scratch:  # data of its own
    os.environ["NANOCHAT_BASE_DIR"] = str(Path(scratch))
    for module, *settings in (["scripts.dataset"], ["scripts.tok_train", f"--vocab_size={vocab_size}"]):
        subprocess.run([sys.executable, "-m", module, *settings], check=True, stdout=subprocess.DEVNULL)
    tokenizer = get_tokenizer("tinyworld")
    lines, best = [], {}
    for kind, rates in (("AdamW", adamw_rates), ("Muon", muon_rates)):
        results = {rate: run(kind, float(rate), tokenizer) for rate in rates.split()}
        winner = best[kind] = min(results, key=lambda rate: results[rate][0])
        for rate, (bpb, update, rest, state) in results.items():
            shown = f"**{bpb:.4f}**" if rate == winner else f"{bpb:.4f}"
            lines.append([kind, rate, shown, f"{update:.1f}", f"{rest:.0f}", f"{state:.0f}"])
            print(*lines[-1], sep="  ", flush=True)

text = markdown_table(["the matrices' optimizer", "rate", "validation, bits per byte", "its update, ms", "rest of the step, ms", "bytes of state per parameter"], lines)
text += (f"\n\nDepth {depth}, vocabulary {vocab_size}, {steps} steps of {rows} rows of {max_seq_len} tokens of the embedded world, seed {seed}, float32, "
         f"not compiled, {torch.get_num_threads()} thread(s).")
for kind, rates in (("AdamW", adamw_rates), ("Muon", muon_rates)):
    if best[kind] in (rates.split()[0], rates.split()[-1]):
        text += f" The best rate of {kind} is at the edge of those tried: there may be a better one."
print(f"\n{text}")
if write:
    put_into_page("optimizers.md", "python -m bench.optimizer --write", text)
