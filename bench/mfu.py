"""
Where the time of a training step goes, and what its MFU would be by other countings: the tables of docs/mfu.md.

    python -m bench.mfu            # prints them
    python -m bench.mfu --write    # and puts them into the page
"""
import statistics
import time
from typing import Literal

from configurator import configure

import torch
from torch.profiler import ProfilerActivity, profile

from nanochat.optimizers import setup_optimizers
from nanochat.compiling import set_compile
from nanochat.distributed import compute_dtype, compute_init
from nanochat.errors import require_positive
from nanochat.flops import datasheet_peak, measured_matmul_flops
from nanochat.gpt import GPT, GPTConfig, config_from_depth
from nanochat.plan.memory import parameter_counts
from bench.pages import put_into_page
from nanochat.report import markdown_table
from nanochat.zero import Sharding

# ---- Model and batch
depth = 4                   # layers
vocab_size = 8192           # tokens
max_seq_len = 512           # tokens per row
device_batch_size = 8       # rows; one micro-step
dtype: Literal["auto", "float32", "bfloat16"] = "float32"  # of parameters and activations
# ---- Measurement
steps = 5                   # timed, after two that are not; then as many under the profiler
write = False               # put the tables into docs/mfu.md
config = configure(globals())
require_positive(config, "depth", "vocab_size", "max_seq_len", "device_batch_size", "steps")

*_, device = compute_init("cpu")  # the profiler's names below are those of CPU kernels
model_dtype = compute_dtype(dtype, device)
compiling = set_compile(True, device.type)
model = GPT(config_from_depth(depth, vocab_size, max_seq_len))
model.init_weights(seed=0)
sharding = Sharding(model, model.units(), device, model_dtype, stage=1)
optimizers = setup_optimizers(model, sharding)
if compiling:
    model.compile_blocks()
tokens = torch.randint(vocab_size, (device_batch_size, max_seq_len + 1), generator=torch.Generator().manual_seed(0))
inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradient() -> torch.Tensor:
    with sharding.accumulate(last=True):
        loss = model(inputs, targets)
        loss.backward()
    return loss


def timed_step() -> tuple[float, float]:
    """Seconds of the forward and backward pass, and of the update."""
    start = time.perf_counter()
    loss = gradient()
    middle = time.perf_counter()
    stats = sharding.reduce_and_clip(loss)
    for optimizer in optimizers:
        optimizer.step(stats)
    sharding.all_gather_params()
    return middle - start, time.perf_counter() - middle


# ---- A step's time, then where it goes: the rate of a large product before and after, for a machine that drifts
for _ in range(2):
    timed_step()
before = measured_matmul_flops(device, model_dtype)
computing, updating = map(statistics.median, zip(*(timed_step() for _ in range(steps))))
rate, step_time = max(before, measured_matmul_flops(device, model_dtype)), computing + updating
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
    for _ in range(steps):
        gradient()
spent, total = {"linear": 0.0, "head": 0.0, "attention": 0.0}, 0.0  # microseconds
for event in profiler.key_averages(group_by_input_shape=True):
    total += event.self_cpu_time_total
    if event.key in ("aten::mm", "aten::addmm"):
        of_head = any(model.config.padded_vocab_size in shape for shape in event.input_shapes if shape)
        spent["head" if of_head else "linear"] += event.self_cpu_time_total
    elif event.key in ("aten::bmm", "aten::baddbmm"):
        spent["attention"] += event.self_cpu_time_total
share = {part: time_of_part / total for part, time_of_part in spent.items()}  # of computing


# ---- FLOPs of a step, as MFU counts them

def flops_per_token(config: GPTConfig) -> dict[str, int]:
    """By part; the head has as many parameters as the embedding, which counts nothing."""
    adamw, matrices = parameter_counts(config)
    return {"linear": 6 * matrices, "head": 6 * adamw // 2, "attention": 12 * config.n_layer * config.n_embd * config.sequence_len}


batch = inputs.numel()
flops = {part: count * batch for part, count in flops_per_token(model.config).items()}
counted = sum(flops.values())
assert counted == model.estimate_flops() * batch

lines = []
for part, name in (("linear", "products of the blocks' linear layers"), ("head", "products of the head"), ("attention", "products of attention")):
    seconds = share[part] * computing
    achieved = flops[part] / seconds
    lines.append([name, f"{flops[part] / counted:.0%}", f"{1e3 * seconds:.0f}", f"{seconds / step_time:.0%}", f"{achieved / 1e9:,.0f}", f"{achieved / rate:.0%}"])
between = (1 - sum(share.values())) * computing
for name, seconds in (("all between: norms, rotation, softmax, loss, copies", between), ("optimizers, Newton–Schulz included", updating)):
    lines.append([name, "0%", f"{1e3 * seconds:.0f}", f"{seconds / step_time:.0%}", "", ""])
lines.append(["**the step**", "100%", f"{1e3 * step_time:.0f}", "100%", f"{counted / step_time / 1e9:,.0f}", f"**{counted / step_time / rate:.1%}**"])
where = markdown_table(["part", "FLOPs counted", "ms", "of the step", "GFLOP/s", "of the GEMM rate"], lines)
where += (f"\n\nDepth {depth}, vocabulary {vocab_size:,}, {device_batch_size} rows of {max_seq_len} tokens: {batch / step_time:,.0f} tok/s in {str(model_dtype).removeprefix('torch.')}, "
          f"{'compiled' if compiling else 'not compiled'}, {torch.get_num_threads()} thread(s), GEMM rate {rate / 1e9:,.0f} GFLOP/s. The parts of forward and "
          "backward pass are their shares under the profiler.")

# ---- The same step by other countings; beside it those of a larger model, relative to the right one
models = [flops_per_token(config) for config in (model.config, config_from_depth(20, 65536, 2048))]
head, attention = ([parts[part] / sum(parts.values()) for parts in models] for part in ("head", "attention"))
mfu = counted / step_time / rate
wrong = {  # times the right one: of the step above, of the larger model
    "6 · matrix parameters + 12 · layers · width · T": (1, 1),
    "the embedding counted: 6 · all parameters": [1 + part for part in head],
    "attention left out": [1 - part for part in attention],
    "attention halved, as it is causal": [1 - part / 2 for part in attention],
    "tokens of one micro-step, of four that were made": (0.25, 0.25),
    "the peak of an H100, whatever the machine": (rate / datasheet_peak("H100"), 1),
}
countings = markdown_table(["counting", "MFU of the step above", "relative", "relative at depth 20, T=2048, V=65,536, on an H100"],
                  [[name, f"{mfu * small:.3g}", f"{small:.3g}", f"{large:.3g}"] for name, (small, large) in wrong.items()])
text = f"{where}\n\n{countings}"
print(f"\n{text}")
if write:
    put_into_page("mfu.md", "python -m bench.mfu --write", text)
