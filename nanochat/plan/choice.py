"""What speedrun.sh trains on a machine: depth and rows at a time, and their cost in hours and disk."""
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from nanochat.model.fp8 import MIN_WIDTH
from nanochat.model.gpt_config import GPTConfig, config_from_depth
from nanochat.optim.recipe import accumulation_steps, choose_batch_size
from nanochat.plan.memory import GIB, shaped, split_into_stages, state_bytes
from nanochat.plan.step_time import FP8_GPUS, step_time
from nanochat.runtime.errors import UserError
from nanochat.runtime.flops import Gpu

# Hours of pretraining: then all stages are done within a day.
MAX_HOURS = 12
# Steps of runs/cpu.sh: seconds that do not depend on the model, and all others counted in steps of pretraining.
CPU_STEPS = {
    "dataset-tinyworld": (4, 8), "tok_train-tinyworld": (4, 10),
    "base-assistant-d{}": (17, 235), "mid-assistant-d{}": (20, 1120), "chat_eval-mid-assistant-d{}": (6, 30),
    "rl-assistant-d{}": (8, 130), "chat_eval-rl-assistant-d{}": (13, 70),
}
# The most rows at a time: a step has 512, and with 32, gradients are summed half as often as with 16.
MAX_ROWS = 32
# A step as it runs for an hour on eight H100s, against the estimate: published ones took 1.13 to 1.20 times as long.
SLOWER = 1.2
# How often RL on gsm8k samples, and how many answers: in its steps, and in its evaluations; 64 at a time on each GPU.
SAMPLED = (467, 16 * 16), (9, 400 * 8)
# Seconds for a token of 64 answers or of one, per layer: decoding waits for launches (bench.engine, one H200).
DECODING = 0.0224 / 22
SHARD = 0.09e9  # bytes of a shard of about 250 million characters, compressed
SOFTWARE = 12e9  # bytes of torch and its CUDA libraries, the tasks, compiled kernels, the rehearsal


class Size(NamedTuple):
    ratio: float        # tokens to train on, per parameter of matrices and head
    vocab_size: int
    shards: int         # of text: a tenth more than one pass needs


SIZES = {22: Size(9.4, 49152, 125), 20: Size(8.0, 32768, 75), 16: Size(8.0, 32768, 40), 12: Size(8.0, 32768, 20)}


def config_of(depth: int) -> GPTConfig:
    return config_from_depth(depth, SIZES[depth].vocab_size, 2048, arch="modern")


class Pretraining(NamedTuple):
    total_batch_size: int   # tokens of a step
    micro_steps: int
    steps: int


def pretraining(
    config: GPTConfig, ranks: int, rows: int, ratio: float = 8.0, total_batch_size: int = -1
) -> Pretraining:
    """
    Batch and steps of base_train with `rows` rows per rank and micro-step, `ratio` tokens per parameter of matrices and
    head.
    """
    tokens = ratio * shaped(config).count_parameters("matrix", "head")
    if total_batch_size == -1:
        total_batch_size = choose_batch_size(-1, tokens, rows * config.sequence_len * ranks)
    micro_steps = accumulation_steps(total_batch_size, rows, config.sequence_len, ranks)
    return Pretraining(total_batch_size, micro_steps, max(round(tokens / total_batch_size), 1))


class Choice(NamedTuple):
    depth: int
    rows: int               # at a time on each GPU
    recompute: bool         # activations: computed twice if few rows fit


class Cost(NamedTuple):
    run: Pretraining
    hours: float            # of pretraining
    least: float            # hours of all stages
    most: float
    rate: float             # tokens per second of pretraining
    mfu: float

    def dollars(self, gpus: int, price: float) -> str:
        """For all rented GPUs, also the idle ones."""
        return f"${self.least * gpus * price:.0f} to ${self.most * gpus * price:.0f}"


def cost(choice: Choice, ranks: int, gpu: Gpu) -> Cost:
    """
    The cost of all stages. Pretraining takes up to SLOWER as long as estimated. The longest answer of each batch that
    RL samples has 200 to 512 tokens. The rest (mid-training and fine-tuning on half a billion tokens, evaluations,
    downloads, compiling) is guessed: 4 GPU hours.
    """
    config = config_of(choice.depth)
    run = pretraining(config, ranks, choice.rows, SIZES[choice.depth].ratio)
    fp8 = gpu.name in FP8_GPUS and config.n_embd >= MIN_WIDTH
    step = step_time(config, choice.rows, run.micro_steps, ranks, gpu, fp8).seconds
    hours = run.steps * step / 3600
    rate = run.total_batch_size / step
    mfu = rate * shaped(config).estimate_flops() / (ranks * gpu.peak)
    batches = sum(times * math.ceil(samples / ranks / 64) for times, samples in SAMPLED)
    token = batches * choice.depth * DECODING / 3600  # hours for a token of the longest answers
    rest = 4 / ranks
    return Cost(run, hours, hours + 200 * token + rest, SLOWER * hours + 512 * token + rest, rate, mfu)


def choose_size(ranks: int, gpu: Gpu, rows_that_fit: Callable[[int, int, bool], int]) -> Choice:
    """
    The largest depth that fits and is pretrained within half a day, or the smallest however long it takes.
    rows_that_fit takes the most to try, a depth, and whether activations are computed twice. UserError if none fits.
    """
    # A step of mid-training has 256 rows over all ranks.
    most = max(min(MAX_ROWS, 256 // ranks), 1)
    for depth in SIZES:
        if depth != min(SIZES) and cost(Choice(depth, most, False), ranks, gpu).hours > MAX_HOURS:
            continue
        rows = rows_that_fit(most, depth, False)
        recompute = rows < 4
        if recompute:
            rows = rows_that_fit(most, depth, True)
        if rows:
            return Choice(depth, rows, recompute)
    raise UserError(f"depth {depth}, the smallest, does not fit into this GPU's memory: use more or larger GPUs")


def disk(depth: int) -> int:
    """
    GiB of disk that a speedrun needs, in whole tens: two checkpoints of each of four stages and one that is being
    written, text and its tokens, and the rest.
    """
    (model,) = split_into_stages(config_of(depth))
    states = state_bytes(2, 1, torch.bfloat16, model.adamw, model.muon, ema_nesterov=True)
    shards = SIZES[depth].shards
    tokens = shards * 250e6 / 4.7  # of about 4.7 characters; 2 bytes each
    needed = 9 * (states.parameters + states.optimizer) + shards * SHARD + 2 * tokens + SOFTWARE
    return 10 * round(needed / GIB / 10 + 0.5)


def cpu_seconds(depth: int, step_ms: float) -> dict[str, float]:
    """Seconds of each step of runs/cpu.sh if a step of pretraining takes step_ms milliseconds."""
    return {name.format(depth): seconds + steps * step_ms / 1000 for name, (seconds, steps) in CPU_STEPS.items()}
