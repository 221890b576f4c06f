"""What speedrun.sh trains on a machine: depth and rows at a time, and their cost in hours and disk."""
import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from nanochat.model.fp8 import MIN_WIDTH
from nanochat.model.gpt_config import GPTConfig, config_from_depth
from nanochat.optim.recipe import accumulation_steps, choose_batch_size
from nanochat.plan.memory import GIB, counted, samples_at_once, shaped, state_bytes
from nanochat.plan.step_time import FP8_GPUS, step_time
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import read_toml
from nanochat.runtime.flops import Gpu

# Hours of pretraining: then all stages are done within a day.
MAX_HOURS = 12
# The most rows at a time: a step has 512, and with 32, gradients are summed half as often as with 16.
MAX_ROWS = 32
# A step as it runs for an hour, against the estimate, which does not wait for other GPUs: published ones of eight H100s
# took 1.13 to 1.20 times as long. One GPU waits for none.
WAITING, SLOWER = 1.13, 1.2
# Tokens of mid-training and fine-tuning, half a billion, and what evaluations read, as tokens of training that would
# take as long: guessed, half of it CORE's. All in bfloat16: only pretraining has 8 bits.
AFTER = 0.7e9
# Steps of RL on gsm8k: all, or fewer if hours are short; and the answers of a step. Evaluations sample a tenth more.
RL_STEPS = 467, 360, 240, 120, 0
SAMPLED = 16 * 16
# Answers that `judge` in speedrun.sh wants after each of three stages, 32 at a time on each GPU.
JUDGED = 3 * 2800
# Seconds for a token of 64 answers or of one, per layer: decoding waits for launches (bench.engine, one H200). For 256
# it was not measured: counted, there are as many launches, 731 at depth 22.
DECODING = 0.0224 / 22
# Hours of downloads, tokenizer, compiling and starting: guessed.
FIXED = 0.4
SHARD = 0.09e9  # bytes of a shard of about 250 million characters, compressed
SOFTWARE = 12e9  # bytes of torch and its CUDA libraries, the tasks, compiled kernels, the rehearsal


class Size(NamedTuple):
    """What speedrun.toml says of a depth."""

    shards: int
    ratio: float = 8.0
    vocab_size: int = 32768


SPEEDRUN = read_toml("plan/speedrun.toml")
SIZES = {int(depth): Size(**fields) for depth, fields in SPEEDRUN["sizes"].items()}
USUAL = 22, 20, 16, 12  # unless hours or depth are given


def config_of(depth: int) -> GPTConfig:
    return config_from_depth(depth, SIZES[depth].vocab_size, 2048, arch="modern")


class Choice(NamedTuple):
    depth: int
    rows: int               # at a time on each GPU
    recompute: bool         # activations: computed twice if few rows fit
    rl_steps: int = RL_STEPS[0]  # 0: RL is left out


class Cost(NamedTuple):
    total_batch_size: int   # tokens of a step of pretraining
    micro_steps: int
    steps: int
    hours: float            # of pretraining, at least
    most_hours: float
    least: float            # hours of all stages
    most: float
    rate: float             # tokens per second of pretraining
    mfu: float

    def dollars(self, gpus: int, price: float) -> str:
        """For all rented GPUs, also the idle ones; below $10 with cents. price 0: unknown."""
        if not price:
            return "$?"
        digits = 0 if self.most * gpus * price >= 10 else 2
        return f"${self.least * gpus * price:.{digits}f} to ${self.most * gpus * price:.{digits}f}"


def cost(choice: Choice, ranks: int, gpu: Gpu) -> Cost:
    """
    The cost of all stages. Training takes as long as estimated, on several GPUs at least WAITING times, and up to
    SLOWER times; the longest answer of those that are decoded together has 150 to 256 tokens.
    """
    depth, rows, recompute, rl_steps = choice
    config = config_of(depth)
    tokens = SIZES[depth].ratio * shaped(config).count_parameters("matrix", "head")
    total_batch_size = choose_batch_size(-1, tokens, rows * config.sequence_len * ranks)
    micro_steps = accumulation_steps(total_batch_size, rows, config.sequence_len, ranks)
    steps = max(round(tokens / total_batch_size), 1)
    fp8 = gpu.name in FP8_GPUS and config.n_embd >= MIN_WIDTH
    slower = (4 / 3 if recompute else 1) * (WAITING if ranks > 1 else 1)
    step, later_step = (slower * step_time(config, rows, micro_steps, ranks, gpu, bits8).seconds
                        for bits8 in (fp8, False))
    rate = total_batch_size / step
    mfu = rate * shaped(config).estimate_flops() / (ranks * gpu.peak)
    # RL trains on about 300 tokens of a problem and its answer.
    later_steps = (AFTER + rl_steps * SAMPLED * 300) / total_batch_size
    pretrained, later = steps * step / 3600, later_steps * later_step / 3600  # hours
    batches = 1.1 * rl_steps * math.ceil(SAMPLED / ranks / samples_at_once(config, ranks, gpu)) + JUDGED / ranks / 32
    decoded = batches * depth * DECODING / 3600  # hours for a token of each batch
    longer = SLOWER / WAITING if ranks > 1 else SLOWER
    least = FIXED + pretrained + later + 150 * decoded
    most = FIXED + longer * (pretrained + later) + 256 * decoded
    return Cost(total_batch_size, micro_steps, steps, pretrained, longer * pretrained, least, most, rate, mfu)


RowsThatFit = Callable[[int, int, bool], int]  # from the most to try, a depth, whether activations are computed twice


def choose_size(ranks: int, gpu: Gpu, rows_that_fit: RowsThatFit, hours: float = 0, depth: int = -1) -> Choice:
    """
    The largest usual depth that fits and is pretrained within half a day, or the smallest however long it takes; with
    `hours` the largest of all depths whose stages end in them, with as much of RL as then ends. `depth`: only this one.
    UserError if none fits.
    """
    def with_rl(choice: Choice) -> Choice | None:
        """The choice with as much of RL as ends in the hours, perhaps none; None if it cannot end."""
        for rl_steps in RL_STEPS:
            choice = choice._replace(rl_steps=rl_steps)
            if not hours or cost(choice, ranks, gpu).most <= hours:
                return choice
        return None

    # A step of mid-training has 256 rows over all ranks.
    most = max(min(MAX_ROWS, 256 // ranks), 1)
    sizes = list(SIZES if hours else USUAL)
    if depth > 0:
        sizes = [depth]
    for size in sizes:
        choice = Choice(size, most, False)  # the quickest
        is_long = not hours and size > sizes[-1] and cost(choice, ranks, gpu).hours > MAX_HOURS
        if is_long or not with_rl(choice):
            continue
        rows = rows_that_fit(most, size, False)
        recompute = rows < 4
        if recompute:
            rows = rows_that_fit(most, size, True)
        choice = Choice(size, rows, recompute)
        if rows and (in_time := with_rl(choice)):
            return in_time
    if choice.rows:
        takes = cost(choice._replace(rl_steps=0), ranks, gpu).most
        raise UserError(f"hours={hours:g}: depth {size} takes up to {takes:.1f} hours on {ranks} x {gpu.name}, even "
                        f"without reinforcement learning; the smallest depth is {min(SIZES)}")
    raise UserError(f"depth {size} does not fit into this GPU's memory: use more or larger GPUs, or --depth=… from "
                    f"{min(SIZES)} on")


def described(choice: Choice, ranks: int, gpus: int, gpu: Gpu, price: float) -> str:
    """Lines for a user who decides. The cost includes idle GPUs and the stages after pretraining."""
    whole = cost(choice, ranks, gpu)
    parameters = sum(counted(config_of(choice.depth)).units)
    text = (
        f"depth {choice.depth}: {parameters / 1e6:,.0f} million parameters; {whole.steps:,} steps of "
        f"{whole.total_batch_size:,} tokens in {whole.micro_steps} micro-step(s)\n"
        f"pretraining on {ranks} x {gpu.name} of {gpu.memory:.0f} GB: {whole.hours:.2f} to "
        f"{whole.most_hours:.2f} hours, at best {whole.rate:,.0f} tokens per second, {whole.mfu:.0%} MFU; stop a "
        "run that shows less than half in ten steps\n"
        f"in all {whole.least:.1f} to {whole.most:.1f} hours with the other stages, downloads and evaluations\n"
        f"cost {whole.dollars(gpus, price)} for {gpus} GPU(s) at ${price or '?'} per GPU and hour (--price=…)\n"
        f"disk {disk(choice.depth)} GiB; downloads {SIZES[choice.depth].shards * SHARD / 1e9:.0f} GB of text, 8 of "
        "software and tasks")
    if choice.rl_steps < max(RL_STEPS):
        text += f"\nthere is time for {choice.rl_steps or 'none'} of {max(RL_STEPS)} steps of reinforcement learning"
    if gpu.dtype == torch.float32:
        text += f"\na {gpu.name} has no bfloat16: it trains in float32, at {gpu.peak / 1e12:g} TFLOP/s"
    if ranks < gpus:
        text += f"\n{gpus - ranks} of {gpus} GPUs stand idle: rent {ranks}"
    return text


def every_depth(ranks: int, gpus: int, gpu: Gpu, price: float, rows_that_fit: RowsThatFit) -> str:
    """What each depth that fits costs with all stages, a line each."""
    text = ""
    for depth in SIZES:
        with contextlib.suppress(UserError):
            whole = cost(choose_size(ranks, gpu, rows_that_fit, depth=depth), ranks, gpu)
            text += (f"--depth={depth}: {whole.hours:.2f} to {whole.most_hours:.2f} hours of pretraining, "
                     f"{whole.least:.1f} to {whole.most:.1f} in all, {whole.dollars(gpus, price)}\n")
    return text


def disk(depth: int) -> int:
    """
    GiB of disk that a speedrun needs, in whole tens: two checkpoints of each of four stages and one that is being
    written, text and its tokens, and the rest.
    """
    model = counted(config_of(depth))
    states = state_bytes(2, 1, torch.bfloat16, model.adamw, model.muon, ema_nesterov=True)
    shards = SIZES[depth].shards
    tokens = shards * 250e6 / 4.7  # of about 4.7 characters; 2 bytes each
    needed = 9 * (states.parameters + states.optimizer) + shards * SHARD + 2 * tokens + SOFTWARE
    return 10 * round(needed / GIB / 10 + 0.5)


def cpu_seconds(depth: int, step_ms: float) -> dict[str, float]:
    """Seconds of each step of runs/cpu.sh if a step of pretraining takes step_ms milliseconds."""
    known = SPEEDRUN["cpu_steps"].items()
    return {name.format(depth): seconds + steps * step_ms / 1000 for name, (seconds, steps) in known}
