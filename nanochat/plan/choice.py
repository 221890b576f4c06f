"""What speedrun.sh trains on a machine: depth and rows at a time, and their cost in hours and disk."""
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
# Tokens of mid-training and fine-tuning: at most this share of pretraining's.
AFTER = 0.2
# Estimated: 40 million stay whole: real words 15, gsm8k 6, fine-tuning 11; tools, lookups, identity 8, counted. Each
# conversation of smoltalk adds 1,100: its own 870, and 230 of 0.6 questions of mmlu (on the hub 3,935 and 1,612 bytes,
# 4.5 a token). ALL_TALK: more than there are of both.
WHOLE, TALK, ALL_TALK = 40e6, 1100, 500_000
# Validations, bits per byte and CORE, with 500 items a task, as tokens of training that would take as long: guessed.
# All items, at depth 22, are 90 million tokens more, 2% of pretraining; they are not counted.
EVALUATED = 30e6
# Answers that `judge` in speedrun.sh wants, 32 at a time on each GPU: 128 a task after a stage, all after the last.
JUDGED, ALL_JUDGED = 900, 2800
# Steps of RL on gsm8k: all, or fewer if hours are short.
RL_STEPS = 467, 360, 240, 120, 0
# What hours buy, the most first: tokens for each parameter, then steps of RL. A run of the next depth takes 2 to 2.6
# times as long with as many tokens each, so a limit of 12 would leave hours that only RL can use.
LENGTHS = [(16.0, rl_steps) for rl_steps in RL_STEPS] + [(half / 2, 0) for half in range(31, 15, -1)]
SAMPLED = 16 * 16  # answers of a step of RL; evaluations sample a tenth more
# Seconds for a token of 64 answers or of one, per layer: decoding waits for launches (bench.engine, one H200). For 256
# it was not measured: counted, there are as many launches, 731 at depth 22.
DECODING = 0.0224 / 22
# Hours of downloads, tokenizer, compiling and starting: guessed. Text is tokenized beside training.
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
    ratio: float            # tokens of pretraining, per parameter of matrices and head
    rl_steps: int = RL_STEPS[0]  # 0: RL is left out

    @property
    def tokens(self) -> float:
        """Of pretraining."""
        return self.ratio * shaped(config_of(self.depth)).count_parameters("matrix", "head")

    @property
    def talk(self) -> int:
        """Conversations of smoltalk in mid-training."""
        return min(int((AFTER * self.tokens - WHOLE) / TALK), ALL_TALK)

    @property
    def shards(self) -> int:
        return math.ceil(SIZES[self.depth].shards * self.ratio / 8)


class Cost(NamedTuple):
    total_batch_size: int   # tokens of a step of pretraining
    micro_steps: int
    steps: int
    stages: dict[str, tuple[float, float]]  # hours of each, at least and at most
    least: float            # hours of all stages
    most: float
    rate: float             # tokens per second of pretraining
    mfu: float

    @property
    def hours(self) -> str:
        """Of all stages, and of each that there is."""
        each = ", ".join(f"{name} {least:.2f}–{most:.2f}" for name, (least, most) in self.stages.items() if most)
        return f"{self.least:.1f}–{self.most:.1f} hours: {each}"

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
    depth, rows, recompute, _, rl_steps = choice
    config = config_of(depth)
    total_batch_size = choose_batch_size(-1, choice.tokens, rows * config.sequence_len * ranks)
    micro_steps = accumulation_steps(total_batch_size, rows, config.sequence_len, ranks)
    steps = round(choice.tokens / total_batch_size)
    fp8 = gpu.name in FP8_GPUS and config.n_embd >= MIN_WIDTH
    waiting = WAITING if ranks > 1 else 1
    slower = (4 / 3 if recompute else 1) * waiting
    # Only pretraining has 8 bits.
    step, later_step = (slower * step_time(config, rows, micro_steps, ranks, gpu, bits8).seconds
                        for bits8 in (fp8, False))
    rate = total_batch_size / step
    mfu = rate * shaped(config).estimate_flops() / (ranks * gpu.peak)

    def hours(tokens: float, seconds: float = later_step, batches: float = 0) -> tuple[float, float]:
        """Of training on these tokens, `seconds` a step, and of decoding these batches of answers."""
        trained, decoded = tokens / total_batch_size * seconds / 3600, batches * depth * DECODING / 3600
        return trained + 150 * decoded, SLOWER / waiting * trained + 256 * decoded

    judged = (2 * JUDGED if rl_steps else JUDGED) + ALL_JUDGED
    sampled = 1.1 * rl_steps * math.ceil(SAMPLED / ranks / samples_at_once(config, ranks, gpu))
    stages = {
        "pretraining": hours(choice.tokens, step),
        "mid-training and SFT": hours(WHOLE + choice.talk * TALK),
        # It trains on about 300 tokens of a problem and its answer.
        "RL": hours(rl_steps * SAMPLED * 300, batches=sampled),
        "evaluations": hours(EVALUATED, batches=judged / ranks / 32),
        "downloads and compiling": (FIXED, FIXED),
    }
    least, most = map(sum, zip(*stages.values()))
    return Cost(total_batch_size, micro_steps, steps, stages, least, most, rate, mfu)


RowsThatFit = Callable[[int, int, bool], int]  # from the most to try, a depth, whether activations are computed twice


def choose_size(ranks: int, gpu: Gpu, rows_that_fit: RowsThatFit, hours: float = 0, depth: int = -1) -> Choice:
    """
    The largest usual depth that fits and is pretrained within half a day, or the smallest however long it takes; with
    `hours` the largest of all depths whose stages end in them, with as many tokens, then as much of RL, as then ends.
    `depth`: only this one. UserError if none fits.
    """
    def in_time(choice: Choice) -> Choice | None:
        """The choice with as many tokens and as much of RL as ends in the hours; None if it cannot end."""
        if not hours:
            return choice
        for ratio, rl_steps in LENGTHS:
            longer = choice._replace(ratio=ratio, rl_steps=rl_steps)
            if cost(longer, ranks, gpu).most <= hours:
                return longer
        return None

    # A step of mid-training has 256 rows over all ranks.
    most = max(min(MAX_ROWS, 256 // ranks), 1)
    sizes = list(SIZES if hours else USUAL)
    if depth > 0:
        sizes = [depth]
    for size in sizes:
        choice = Choice(size, most, False, SIZES[size].ratio)  # the quickest
        is_long = cost(choice, ranks, gpu).stages["pretraining"][0] > MAX_HOURS and size > sizes[-1]
        if is_long and not hours or not in_time(choice):
            continue
        rows = rows_that_fit(most, size, False)
        recompute = rows < 4
        if recompute:
            rows = rows_that_fit(most, size, True)
        choice = choice._replace(rows=rows, recompute=recompute)
        if rows and (longest := in_time(choice)):
            return longest
    if choice.rows:
        takes = cost(choice._replace(ratio=8, rl_steps=0), ranks, gpu).most
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
        f"pretraining on {ranks} x {gpu.name} of {gpu.memory:.0f} GB: at best {whole.rate:,.0f} tokens per second, "
        f"{whole.mfu:.0%} MFU; stop a run that shows less than half in ten steps\n"
        f"in all {whole.hours}\n"
        f"cost {whole.dollars(gpus, price)} for {gpus} GPU(s) at ${price or '?'} per GPU and hour (--price=…)\n"
        f"disk {disk(choice)} GiB; downloads {choice.shards * SHARD / 1e9:.0f} GB of text, 8 of software and tasks")
    if gpu.dtype == torch.float32:
        text += f"\na {gpu.name} has no bfloat16: it trains in float32, at {gpu.peak / 1e12:g} TFLOP/s"
    if ranks < gpus:
        text += f"\n{gpus - ranks} of {gpus} GPUs stand idle: rent {ranks}"
    return text


def disk(choice: Choice) -> int:
    """
    GiB of disk that a speedrun needs, in whole tens: two checkpoints of each of four stages and one that is being
    written, text and its tokens, and the rest.
    """
    model = counted(config_of(choice.depth))
    states = state_bytes(2, 1, torch.bfloat16, model.adamw, model.muon, ema_nesterov=True)
    tokens = choice.shards * 250e6 / 4.7  # of about 4.7 characters; 2 bytes each
    needed = 9 * (states.parameters + states.optimizer) + choice.shards * SHARD + 2 * tokens + SOFTWARE
    return 10 * round(needed / GIB / 10 + 0.5)


def cpu_seconds(depth: int, step_ms: float) -> dict[str, float]:
    """Seconds of each step of runs/cpu.sh if a step of pretraining takes step_ms milliseconds."""
    known = SPEEDRUN["cpu_steps"].items()
    return {name.format(depth): seconds + steps * step_ms / 1000 for name, (seconds, steps) in known}
