"""
Where the time of a training step goes, and what its MFU would be by other countings: the tables of docs/mfu.md.

    python -m bench.mfu --write    # without --write they are only printed
"""
import statistics
import time
from typing import Literal

from configurator import configure

import torch
from torch.profiler import ProfilerActivity, profile

from bench.harness import show
from nanochat.compiling import set_compile
from nanochat.flops import datasheet_peak, measured_matmul_flops
from nanochat.gpt import GPTConfig, config_from_depth
from nanochat.plan.memory import parameter_counts
from nanochat.plan.probes import set_up_training
from nanochat.report import markdown_table

depth = 4                   # [1..] layers
vocab_size = 8192           # [1..] tokens
max_seq_len = 512           # [1..] tokens per row
device_batch_size = 8       # [1..] rows; one micro-step
dtype: Literal["float32", "bfloat16"] = "float32"  # of parameters and activations
steps = 5                   # [1..] timed, after two that are not; then as many under the profiler
write = False               # put the tables into docs/mfu.md
configure(globals())

PARTS = {"linear": "products of the blocks' linear layers", "head": "products of the head",
         "attention": "products of attention"}
device, kind = torch.device("cpu"), getattr(torch, dtype)  # the profiler's names below are those of CPU kernels
compiling = set_compile(True, device.type)
config = config_from_depth(depth, vocab_size, max_seq_len)
model, sharding, optimizers = set_up_training(config, kind, device, stage=1, compiled=compiling)
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


def flops_per_token(config: GPTConfig) -> dict[str, int]:
    """By part, as MFU counts them; the head has as many parameters as the embedding, which counts nothing."""
    adamw, matrices = parameter_counts(config)
    attention = 12 * config.n_layer * config.n_embd * config.sequence_len
    return {"linear": 6 * matrices, "head": 6 * adamw // 2, "attention": attention}


# ---- A step's time, then where it goes: the rate of a large product before and after, for a machine that drifts
for _ in range(2):
    timed_step()
rate = measured_matmul_flops(device, kind)
computing, updating = map(statistics.median, zip(*(timed_step() for _ in range(steps))))
rate, step_time = max(rate, measured_matmul_flops(device, kind)), computing + updating
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
    for _ in range(steps):
        gradient()
spent, total = dict.fromkeys(PARTS, 0.0), 0.0  # microseconds
for event in profiler.key_averages(group_by_input_shape=True):
    total += event.self_cpu_time_total
    if event.key in ("aten::mm", "aten::addmm"):
        of_head = any(config.padded_vocab_size in shape for shape in event.input_shapes if shape)
        spent["head" if of_head else "linear"] += event.self_cpu_time_total
    elif event.key in ("aten::bmm", "aten::baddbmm"):
        spent["attention"] += event.self_cpu_time_total
flops = {part: count * inputs.numel() for part, count in flops_per_token(config).items()}
counted = sum(flops.values())
assert counted == model.estimate_flops() * inputs.numel()
mfu, lines = counted / step_time / rate, []
for part, name in PARTS.items():
    seconds = spent[part] / total * computing
    reached = flops[part] / seconds
    lines.append([name, f"{flops[part] / counted:.0%}", f"{1e3 * seconds:.0f}", f"{seconds / step_time:.0%}",
                  f"{reached / 1e9:,.0f}", f"{reached / rate:.0%}"])
between = (1 - sum(spent.values()) / total) * computing
for name, seconds in (("all between: norms, rotation, softmax, loss, copies", between),
                      ("optimizers, Newton–Schulz included", updating)):
    lines.append([name, "0%", f"{1e3 * seconds:.0f}", f"{seconds / step_time:.0%}", "", ""])
lines.append(["**the step**", "100%", f"{1e3 * step_time:.0f}", "100%", f"{counted / step_time / 1e9:,.0f}",
              f"**{mfu:.1%}**"])

# ---- The same step by other countings; beside it those of a larger model, relative to the right one
models = [flops_per_token(config) for config in (config, config_from_depth(20, 65536, 2048))]
head, attention = ([parts[part] / sum(parts.values()) for parts in models] for part in ("head", "attention"))
countings = {  # times the right one: of the step above, of the larger model
    "6 · matrix parameters + 12 · layers · width · T": (1, 1),
    "the embedding counted: 6 · all parameters": [1 + part for part in head],
    "attention left out": [1 - part for part in attention],
    "attention halved, as it is causal": [1 - part / 2 for part in attention],
    "tokens of one micro-step, of four that were made": (0.25, 0.25),
    "the peak of an H100, whatever the machine": (rate / datasheet_peak("H100"), 1),
}
relative = [[name, f"{mfu * small:.3g}", f"{small:.3g}", f"{large:.3g}"] for name, (small, large) in countings.items()]
show("\n\n".join([
    markdown_table(["part", "FLOPs counted", "ms", "of the step", "GFLOP/s", "of the GEMM rate"], lines),
    f"Depth {depth}, vocabulary {vocab_size:,}, {device_batch_size} rows of {max_seq_len} tokens: "
    f"{inputs.numel() / step_time:,.0f} tok/s in {dtype}, {'compiled' if compiling else 'not compiled'}, "
    f"{torch.get_num_threads()} thread(s), GEMM rate {rate / 1e9:,.0f} GFLOP/s. The parts of forward and backward pass "
    "are their shares under the profiler.",
    markdown_table(["counting", "MFU of the step above", "relative",
                    "relative at depth 20, T=2048, V=65,536, on an H100"], relative),
]), "mfu.md", "bench.mfu", write)
