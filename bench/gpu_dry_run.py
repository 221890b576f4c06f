"""
What an H100 would do in a training step, known without one: operations and waits counted, collectives and memory beside
their formulas, kernels compiled for sm_90, and from these an estimate of the step and of its MFU.

    python -m bench.gpu_dry_run                          # depths 12, 20, 24 and 1, 8, 16, 64 ranks
    python -m bench.gpu_dry_run --depth=20 --gpus=8
    python -m bench.gpu_dry_run --write                  # puts the tables into docs/gpus.md

It takes torch's CUDA build, gcc, and no GPU; docs/gpus.md has the installation. The step is that of nanochat/zero.py
and the optimizers, on tensors without memory. bench/roofline.py has what is assumed for the estimate.
"""
import warnings
from collections import Counter

from configurator import configure

import torch

from bench import fake_gpu
from bench.harness import show
from nanochat import compiling
from nanochat.errors import UserError
from nanochat.gpt_config import GPTConfig, config_from_depth
from nanochat.plan.machines import LINKS
from nanochat.plan.memory import parameter_counts, shaped, step_bytes
from nanochat.plan.traffic import sent_bytes
from nanochat.report import markdown_table
from nanochat.schedule import accumulation_steps

depth = -1                  # [-1, 1..] layers; -1: 12, 20 and 24
gpus = -1                   # [-1, 1..] ranks; -1: 1, 8, 16 and 64
gpu = "H100"                # whose rates the estimate takes: a name in bench/roofline.py
link = "nvlink4"            # between 8 ranks of a host: a name of the table in nanochat/plan/machines.py
between = "ndr"             # between hosts, a port for each GPU: another one
device_batch_size = 16      # [1..] rows per rank and micro-step
total_batch_size = 524288   # [1..] tokens per optimizer step; more where the ranks' rows are more
zero_stage = 2              # [0..2] stage 3 asks for real streams: its tests run it on CPUs
arch = "modern"             # pieces of the model, as base_train takes them
vocab_size = 65536          # [1..] tokens
max_seq_len = 2048          # [1..] tokens per row
kernels = True              # compile every kernel of depth 20, or of the depth asked for, for sm_90, too
write = False               # put the tables into docs/gpus.md
configure(globals())
fake_gpu.enter()  # starts this process again

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 (what follows is imported where Triton is)

from bench.dry_step import PHASES, Count, dry_step  # noqa: E402
from bench.kernels import Graph, compile_for_sm90, no_execution  # noqa: E402
from bench.roofline import MEMORY, estimate  # noqa: E402
from nanochat.flops import datasheet_peak  # noqa: E402

if gpu not in MEMORY or not {link, between} <= LINKS.keys():
    raise UserError(f"gpu={gpu}, link={link}, between={between}: expected one of {', '.join(MEMORY)} and two of "
                    f"{', '.join(LINKS)}")
warnings.filterwarnings("ignore", message=".*(data pointer of FakeTensor|Set timeout is now)")
counted, sent, memory, steps, passes, cubins = [], [], [], [], [], []  # rows of the tables
running = [Count(0, 1)]  # the last one counts


def report(config: GPTConfig, count: Count, ran: int, micro_steps: int, tokens: int) -> None:
    """A row of each table. ran: micro-steps that were counted; tokens: of a rank in a step of so many micro_steps."""
    name, (adamw, muon) = [config.n_layer, count.ranks], parameter_counts(config)
    of_micro_steps = ("forward", "backward")
    launched = {phase: sum(count.operations[phase].values()) for phase in PHASES}
    counted.append([*name, *(launched[phase] // (ran if phase in of_micro_steps else 1) for phase in PHASES),
                    len(count.waits)])
    collectives = [c for phase in PHASES for c in count.collectives[phase]]
    if collectives:
        kinds = Counter(f"{c.name.strip('_')} {c.dtype}" for c in collectives)
        measured = sum(c.sent for c in collectives)
        formula = sent_bytes(zero_stage, count.ranks, ran, torch.bfloat16, torch.float32, adamw + muon, muon, 0)
        sent.append([*name, ran, ", ".join(f"{n} {kind}" for kind, n in kinds.items()), f"{measured / 1e6:,.1f}",
                     f"{formula / 1e6:,.1f}", f"{formula / measured - 1:+.1%}"])
    peak = sum(step_bytes(config, device_batch_size, torch.bfloat16, "cuda", stage=zero_stage, ranks=count.ranks,
                          micro_steps=ran))
    memory.append([*name, f"{count.peak / 1e9:.2f}", f"{peak / 1e9:.2f}", f"{peak / count.peak - 1:+.1%}"])
    parts = estimate(count, config, device_batch_size, ran, micro_steps, gpu, LINKS[link], LINKS[between])
    mfu = shaped(config).estimate_flops() * tokens / parts.step() / datasheet_peak(gpu)
    steps.append([*name, micro_steps, *(f"{1e3 * seconds:.1f}" for seconds in (*parts, parts.step())),
                  f"{tokens / parts.step():,.0f}", f"{mfu:.1%}"])
    print(f"depth {config.n_layer}, {count.ranks} rank(s): MFU {mfu:.1%}, estimated", flush=True)


def largest_block(graphs: list[Graph], width: int) -> list[list]:
    """Rows of the table of passes: of the kind of block with the most, those of at least 1% of a residual stream."""
    of_blocks = {"forward": [g for g in graphs if 4 <= g.products.total() < 8],
                 "backward": [g for g in graphs if g.products.total() >= 8]}
    return [[phase, name[:70], f"{moved / width:.2f}"] for phase, kinds in of_blocks.items()
            for name, moved in max(kinds, key=lambda graph: graph.moved).passes if moved > 0.01 * width]


for layers in (12, 20, 24) if depth == -1 else (depth,):
    config = config_from_depth(layers, vocab_size, max_seq_len, arch=arch)
    with FakeTensorMode(allow_non_fake_inputs=True), no_execution(lambda graph: running[-1].called(graph)) as graphs:
        compiling.set_compile(True, "cuda")
        for ranks in (1, 8, 16, 64) if gpus == -1 else (gpus,):
            batch = max(total_batch_size, device_batch_size * max_seq_len * ranks)
            micro_steps = accumulation_steps(batch, device_batch_size, max_seq_len, ranks)
            running.append(Count(min(3, ranks - 1), ranks))
            ran = min(micro_steps, 2)  # the others are the same
            dry_step(running[-1], config, device_batch_size, zero_stage, ran, torch.device("cuda", 0), compiled=True)
            report(config, running[-1], ran, micro_steps, batch // ranks)
    if kernels and layers in (20, depth):
        cubins += [[k.name[:70], *k[1:]] for k in compile_for_sm90(graphs)]
        passes += largest_block(graphs, 2 * device_batch_size * max_seq_len * config.n_embd)
    torch.compiler.reset()

key = ["depth", "ranks"]
parts = [
    f"torch {torch.__version__}, {arch}, vocabulary {vocab_size:,}, {device_batch_size} rows of {max_seq_len:,} "
    f"tokens, bfloat16, stage {zero_stage}, compiled.",
    "### Counted: launches of a micro-step (forward, backward) and of a step; waits of the host for the device",
    markdown_table([*key, *PHASES, "waits"], counted),
    "### Counted: collectives of a step, and MB that a rank sends",
    markdown_table([*key, "micro-steps", "collectives", "MB", "formula", "formula off by"], sent, (3,)),
    "### Counted: GB of tensors at the fullest moment",
    markdown_table([*key, "counted", "formula", "formula off by"], memory),
    f"### Estimated: ms of a step on {gpu}, {LINKS[link].name}, {LINKS[between].name} between hosts of eight",
    markdown_table([*key, "micro-steps", "products", "attention", "kernels", "gaps", "exposed", "host", "step",
                    "tok/s per GPU", "MFU"], steps),
]
if cubins:
    parts += ["### Counted: passes of a block between its products, in bytes of a residual stream",
              markdown_table(["", "kernel", "read and written"], passes, (0, 1)),
              f"### Compiled for sm_90: every Triton kernel of depth {20 if depth == -1 else depth}",
              markdown_table(["kernel", "registers", "spills, bytes", "shared, bytes", "configurations"], cubins, (0,))]
show("\n\n".join(parts), "gpus.md", "bench.gpu_dry_run", write)
