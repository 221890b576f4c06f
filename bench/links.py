"""What a link means for the smallest micro-batches and for many messages: columns of docs/machines.md."""
import torch

from nanochat.gpt_config import GPTConfig
from nanochat.plan.machines import Link
from nanochat.plan.memory import parameter_counts, shaped


def messages(config: GPTConfig, ranks: int) -> int:
    """One after the other in a step on stage 1: each unit is reduced and gathered once."""
    return 2 * (config.n_layer + 2) * (ranks - 1)


def hiding_tokens(config: GPTConfig, ranks: int, rate: float, link: Link, dtype: torch.dtype) -> tuple[float, float]:
    """
    Tokens per rank of the smallest micro-batches behind which stages 2 and 3 can send. A third of a micro-batch's time
    is its forward pass, the rest the backward pass; each must outlast what it sends.
    """
    total, sent = sum(parameter_counts(config)), (ranks - 1) / ranks / link.bandwidth
    gradients, gathered = total * 4 * sent, total * dtype.itemsize * sent
    per_token = shaped(config).estimate_flops() / rate
    forward, backward = per_token / 3, 2 * per_token / 3
    return gradients / backward, max(gathered / forward, (gathered + gradients) / backward)
