"""
Where the time of a training step goes: the table of docs/memory.md. On the CPU, in float32.

    python -m bench.mfu --write    # without --write it is only printed
"""
from configurator import configure

depth = 4                   # [4..] layers; narrower models have one head, whose products are counted as linear
vocab_size = 8192           # [1..] tokens
max_seq_len = 512           # [1..] tokens per row
device_batch_size = 8       # [1..] rows; one micro-step
steps = 5                   # [1..] timed, after two that are not; then as many under the profiler
write = False               # put the table into docs/memory.md
configure(globals())

import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile

from bench.harness import PageBlock
from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.memory import split_into_stages
from nanochat.plan.step_trial import set_up_training
from nanochat.runtime.compiling import set_compile
from nanochat.runtime.flops import measured_matmul_flops
from nanochat.runtime.tables import markdown_table

block = PageBlock("memory.md", "bench.mfu", write)

device = torch.device("cpu")  # the profiler's names below are those of CPU kernels
compiling = set_compile(True, device.type)
config = config_from_depth(depth, vocab_size, max_seq_len)
model, sharding, optimizers = set_up_training(config, torch.float32, device, zero_stage=1, compiled=compiling)
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


# ---- A step's time, then where it goes
for _ in range(2):
    timed_step()
rate = measured_matmul_flops(device, torch.float32)
computing, updating = map(statistics.median, zip(*(timed_step() for _ in range(steps))))
step_time = computing + updating
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
    for _ in range(steps):
        gradient()
spent, total = {"the linear layers": 0.0, "the head": 0.0, "attention": 0.0}, 0.0  # microseconds
for event in profiler.key_averages(group_by_input_shape=True):
    total += event.self_cpu_time_total
    if event.key in ("aten::mm", "aten::addmm"):
        of_head = any(config.padded_vocab_size in shape for shape in event.input_shapes if shape)
        spent["the head" if of_head else "the linear layers"] += event.self_cpu_time_total
    elif event.key in ("aten::bmm", "aten::baddbmm"):
        spent["attention"] += event.self_cpu_time_total

# ---- The table. FLOPs as MFU counts them; the head has as many parameters as the embedding, which counts nothing
matrices, head = split_into_stages(config)[0].muon, config.padded_vocab_size * config.n_embd
attention = 12 * depth * config.n_embd * max_seq_len
per_token = {"the linear layers": 6 * matrices, "the head": 6 * head, "attention": attention}
counted = model.estimate_flops() * inputs.numel()
parts = [(f"products of {part}", spent[part] / total * computing, per_token[part] * inputs.numel()) for part in spent]
parts += [("all between: norms, rotation, softmax, loss, copies", (1 - sum(spent.values()) / total) * computing, 0),
          ("optimizers, Newton–Schulz included", updating, 0), ("**the step**", step_time, counted)]
lines = [[name, f"{flops / counted:.0%}", f"{1e3 * seconds:.0f}", f"{seconds / step_time:.0%}",
          *([f"{flops / seconds / 1e9:,.0f}", f"{flops / seconds / rate:.0%}"] if flops else ["", ""])]
         for name, seconds, flops in parts]
block.show(
    f"{markdown_table(['part', 'FLOPs counted', 'ms', 'of the step', 'GFLOP/s', 'of the GEMM rate'], lines)}\n\n"
     f"Depth {depth}, vocabulary {vocab_size:,}, {device_batch_size} rows of {max_seq_len} tokens: "
     f"{inputs.numel() / step_time:,.0f} tok/s in float32, compiled: {compiling}, "
     f"{torch.get_num_threads()} thread(s), GEMM rate {rate / 1e9:,.0f} GFLOP/s. The parts of forward and backward "
     "pass are their shares under the profiler; the last figure is the MFU.")
