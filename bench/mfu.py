"""
Where the time of a training step goes: the table of docs/memory.md. On the CPU, in float32.

    python -m bench.mfu --write    # without --write it is only printed
"""
from configurator import configure

depth = 4                   # [4..] layers; smaller models have one head, whose products would count as linear
vocab_size = 8192           # [1..] tokens
max_seq_len = 512           # [1..] tokens per row
device_batch_size = 8       # [1..] rows; one micro-step
steps = 5                   # [1..] timed steps, after two for warmup; then as many under the profiler
write = False               # put the table into docs/memory.md
configure(globals())

import statistics
import timeit
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import profile

from bench.harness import PageBlock, random_tokens
from nanochat.model.compile import compile_model
from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.step_trial import set_up_training, train_step, whole_rows
from nanochat.runtime.compiling import set_compile
from nanochat.runtime.flops import measured_matmul_flops
from nanochat.runtime.tables import markdown_table

block = PageBlock("memory.md", "bench.mfu", write)

device = torch.device("cpu")  # the profiler's names below are those of CPU kernels
config = config_from_depth(depth, vocab_size, max_seq_len)
model, sharding, optimizers = set_up_training(config, torch.float32, device, zero_stage=1)
compiling = set_compile(True, device.type)
if compiling:
    compile_model(model)
tokens = device_batch_size * max_seq_len  # of a step
rows = whole_rows(random_tokens(vocab_size, device_batch_size, max_seq_len + 1))


def gradient() -> None:
    inputs, targets, cu_seqlens = rows
    with sharding.accumulate(last=True):
        model(inputs, targets, cu_seqlens=cu_seqlens).backward()


def seconds_of(function: Callable[[], None]) -> float:
    return statistics.median(timeit.repeat(function, number=1, repeat=steps))


# ---- A step's time, then where it goes
step = partial(train_step, model, sharding, optimizers, [rows])
for _ in range(2):
    step()
rate = measured_matmul_flops(device, torch.float32)
step_time, computing = seconds_of(step), seconds_of(gradient)
with profile(record_shapes=True) as profiler:
    for _ in range(steps):
        gradient()
LINEAR, HEAD, ATTENTION = "products of the linear layers", "products of the head", "products of attention"
STEP, OTHER = "**the step**", "all between: norms, rotation, softmax, loss, copies"
spent = Counter()           # microseconds
for event in profiler.key_averages(group_by_input_shape=True):
    part = OTHER
    if event.key in ("aten::mm", "aten::addmm"):
        of_head = any(config.padded_vocab_size in shape for shape in event.input_shapes if shape)
        part = HEAD if of_head else LINEAR
    elif event.key in ("aten::bmm", "aten::baddbmm"):
        part = ATTENTION
    spent[part] += event.self_cpu_time_total

# ---- The table. FLOPs as MFU counts them: the embedding, as large as the head, counts nothing
flops_of_token = {LINEAR: 6 * model.count_parameters("matrix"), HEAD: 6 * config.padded_vocab_size * config.n_embd,
                  ATTENTION: 12 * depth * config.n_embd * max_seq_len}
parts = {part: computing * spent[part] / spent.total() for part in (*flops_of_token, OTHER)}  # seconds
parts |= {"optimizers, Newton–Schulz included": step_time - computing, STEP: step_time}
flops_of_token[STEP] = model.estimate_flops()
lines = []
for part, seconds in parts.items():
    share = flops_of_token.get(part, 0) / flops_of_token[STEP]
    speed = share * flops_of_token[STEP] * tokens / seconds
    lines.append([part, f"{share:.0%}", f"{1e3 * seconds:.0f}", f"{seconds / step_time:.0%}",
                  f"{speed / 1e9:,.0f}" if share else "", f"{speed / rate:.0%}" if share else ""])
block.show(
    f"{markdown_table(['part', 'FLOPs counted', 'ms', 'of the step', 'GFLOP/s', 'of the GEMM rate'], lines)}\n\n"
    f"Depth {depth}, vocabulary {vocab_size:,}, {device_batch_size} rows of {max_seq_len} tokens: "
    f"{tokens / step_time:,.0f} tok/s in float32, compiled: {compiling}, "
    f"{torch.get_num_threads()} thread(s), GEMM rate {rate / 1e9:,.0f} GFLOP/s. The parts of forward and backward "
    "pass are their shares under the profiler.")
