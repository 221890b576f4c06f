"""What speedrun.sh trains on a machine: depth and rows at a time, and what that takes in hours, dollars and disk."""
import re
from typing import NamedTuple

from nanochat.model.gpt_config import GPTConfig
from nanochat.optim.recipe import choose_batch_size
from nanochat.optim.schedule import accumulation_steps
from nanochat.plan.memory import shaped
from nanochat.runtime.errors import UserError

# The part of its bfloat16 peak that a GPU is assumed to reach.
MFU = 0.48
# Hours of pretraining: then all stages are done within a day.
MAX_HOURS = 12
VOCAB_SIZE = 32768
# GiB of disk by depth: text and its tokens; of each of four stages two checkpoints of 14 bytes a parameter, and one
# that is being written.
DISK = {24: 200, 20: 130, 16: 80, 12: 45}
# Shards of about 250 million characters, 4.7 a token: a tenth more than one pass.
SHARDS = {24: 125, 20: 75, 16: 40, 12: 20}
# runs/cpu.sh: seconds that do not depend on the model, and how many steps of pretraining the others are worth.
CPU_SECONDS = 100
CPU_STEPS = 2000
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


def cpu_minutes(step_ms: float) -> float:
    """What runs/cpu.sh takes where a step of pretraining takes step_ms milliseconds."""
    return (CPU_SECONDS + CPU_STEPS * step_ms / 1000) / 60


def parse_gpus(plan: str) -> tuple[int, str, float]:
    """(how many GPUs, which, GB of each) of "8,H100,80", or "8xH100" where there is one size only. UserError else."""
    parts = re.fullmatch(r"(\d+)[,x]([^,]+)(?:,(\d+))?", plan)
    if parts:
        sizes = {name.lower(): size for name, size in MEMORY.items()}
        memory = parts[3] or sizes.get(parts[2].lower())
        if memory:
            return int(parts[1]), parts[2], float(memory)
    raise UserError(f"plan={plan}: expected 8,H100,80: how many GPUs, which, and of how many GB")
