"""What speedrun.sh trains on a machine: depth and rows at a time, and what that takes in hours, dollars and disk."""
import re
from collections.abc import Callable
from typing import NamedTuple

from nanochat.model.gpt_config import GPTConfig, config_from_depth
from nanochat.optim.recipe import choose_batch_size
from nanochat.optim.schedule import accumulation_steps
from nanochat.plan.memory import shaped
from nanochat.runtime.errors import UserError

MFU = 0.48              # part of its bfloat16 peak that a GPU is assumed to reach
MOST_HOURS = 12         # of pretraining: then all stages are done within a day
VOCAB_SIZE = 32768
# GiB of disk by depth: text and its tokens; of each of four stages two checkpoints of 14 bytes a parameter, and one
# that is being written.
DISK = {24: 200, 20: 130, 16: 80, 12: 45}
# Shards of about 250 million characters, 4.7 a token: a tenth more than one pass.
SHARDS = {24: 125, 20: 75, 16: 40, 12: 20}
MEMORY = {  # GB of GPUs that are sold with one size only
    "H100": 80, "H200": 141, "GH200": 96, "B200": 180, "MI300X": 192, "A10": 24, "A10G": 24, "L4": 24, "RTX 3090": 24,
    "RTX 4090": 24, "RTX 5090": 32, "A40": 48, "L40S": 48,
}


class Pretraining(NamedTuple):
    flops_per_token: float
    total_batch_size: int   # tokens of a step
    micro_steps: int
    steps: int
    hours: float            # if all communication hides behind computing


def pretraining(
    config: GPTConfig, ranks: int, rows: int, rate: float, ratio: float = 8.0, total_batch_size: int = -1
) -> Pretraining:
    """
    What base_train takes with `rows` rows a rank and micro-step, at `rate` FLOP/s a rank, for `ratio` tokens a
    parameter of matrices and head.
    """
    model = shaped(config)
    tokens = ratio * model.count_parameters("matrix", "head")
    if total_batch_size == -1:
        total_batch_size = choose_batch_size(-1, tokens, rows * config.sequence_len * ranks)
    micro_steps = accumulation_steps(total_batch_size, rows, config.sequence_len, ranks)
    steps = max(round(tokens / total_batch_size), 1)
    flops_per_token = model.estimate_flops()
    hours = steps * total_batch_size * flops_per_token / (ranks * rate) / 3600
    return Pretraining(flops_per_token, total_batch_size, micro_steps, steps, hours)


def parse_gpus(plan: str) -> tuple[int, str, float]:
    """(how many GPUs, which, GB of each) of "8,H100,80", or "8xH100" where there is one size only. UserError else."""
    parts = re.fullmatch(r"(\d+)[,x]([^,]+)(?:,(\d+))?", plan)
    if parts:
        sizes = {name.lower(): size for name, size in MEMORY.items()}
        memory = parts[3] or sizes.get(parts[2].lower())
        if memory:
            return int(parts[1]), parts[2], float(memory)
    raise UserError(f"plan={plan}: expected 8,H100,80: how many GPUs, which, and of how many GB")


def choose_for_gpus(
    ranks: int, rate: float, rows_that_fit: Callable[[int, int, bool], int]
) -> tuple[int, int, bool, Pretraining]:
    """
    (depth, rows, activation checkpointing, pretraining): the largest depth that fits and is pretrained within
    MOST_HOURS, or the smallest one that fits. Where hardly one row fits, activations are computed twice.

    rows_that_fit: of a depth, up to a number, with checkpointing or not. The number is 16, as no GPU has confirmed that
    more fit, or less where all ranks would have more than the 256 rows of a step of mid-training.
    """
    most = min(16, 256 // ranks)
    depths = list(DISK)
    for depth in depths:
        config = config_from_depth(depth, VOCAB_SIZE, 2048, arch="modern")
        if pretraining(config, ranks, 1, rate).hours > MOST_HOURS and depth != depths[-1]:
            continue
        rows, twice = rows_that_fit(depth, most, False), False
        if rows < 4:
            rows, twice = rows_that_fit(depth, most, True), True
        if rows:
            return depth, rows, twice, pretraining(config, ranks, rows, rate)
    raise UserError(f"depth {depths[-1]} does not fit into this GPU's memory")


def describe_cost(depth: int, ranks: int, gpus: int, hours: float, price: float) -> str:
    """One line about what is paid for: all GPUs, also those that stand idle, and the stages after pretraining."""
    least, most = hours + 8 / ranks, hours + 16 / ranks
    idle = ""
    if ranks < gpus:
        idle = f"{gpus - ranks} of them stand idle, so rent {ranks}; "
    return (f"in all about {least:.0f} to {most:.0f} hours and ${least * gpus * price:.0f} to "
            f"${most * gpus * price:.0f} for {gpus} GPUs at ${price:g} per GPU and hour, of which pretraining takes "
            f"{hours:.2f} hours; {idle}disk: {DISK[depth]} GiB; downloads: {SHARDS[depth] * 0.09:.0f} GB of text, and "
            "the tasks")
