"""
Candidates that are not part of the product, for bench/ablation_run.py: each is a function that replaces something of
nanochat before scripts.base_train is imported. It may return a function of base_train's globals, for after the last
step.
"""
import math
from collections.abc import Callable

import torch
from torch import Tensor

import nanochat.gpt
import nanochat.loss
import nanochat.optimizers
import nanochat.schedule
from nanochat.gpt import GPT
from nanochat.zero import Sharding


def sampled_softmax(share: float = 0.125, multiple: int = 512) -> None:
    """
    The loss in training sums over part of the vocabulary: the batch's own targets and an evenly spaced `share` of the
    rest, which begins at another token each time; a sampled token stands for as many as it was drawn from (Jean et al.
    2015, arXiv:1412.2007). The count is rounded up to a multiple: few shapes. Evaluation is exact.
    """
    exact, real_columns, calls = nanochat.gpt.softcapped_cross_entropy, nanochat.loss.real_columns, 0

    def sampled(x: Tensor, head: Tensor, targets: Tensor, vocab_size: int, softcap, weights=None) -> Tensor:
        nonlocal calls
        calls += 1
        wanted = torch.zeros(vocab_size, dtype=torch.bool, device=x.device)
        wanted[targets[targets >= 0]] = True
        own, others = wanted.nonzero()[:, 0], (~wanted).nonzero()[:, 0]
        count = math.ceil((len(own) + share * len(others)) / multiple) * multiple - len(own)
        if count >= len(others):
            return exact(x, head, targets, vocab_size, softcap, weights)
        drawn = (torch.arange(count, device=x.device) * len(others) // count + 7919 * calls) % len(others)
        tokens = torch.cat((own, others[drawn]))
        stands_for = torch.ones(len(tokens), device=x.device)
        stands_for[len(own) :] = len(others) / count
        places = torch.zeros(vocab_size, dtype=torch.int64, device=x.device)
        places[own] = torch.arange(len(own), device=x.device)
        targets = torch.where(targets < 0, -1, places[targets.clamp(min=0)])
        nanochat.loss.real_columns = lambda *_: stands_for  # the loss multiplies the exponentials by it
        try:
            return OfRows.apply(x, head, tokens, lambda x, rows: exact(x, rows, targets, len(tokens), softcap, weights))
        finally:
            nanochat.loss.real_columns = real_columns

    nanochat.gpt.softcapped_cross_entropy = sampled


class OfRows(torch.autograd.Function):
    """loss(x, head[tokens]) with its gradients computed at once; head is a leaf, whose grad_dtype counts."""

    @staticmethod
    def forward(ctx, x: Tensor, head: Tensor, tokens: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x, rows = x.detach().requires_grad_(), head.detach()[tokens].requires_grad_()
        rows.grad_dtype = torch.float32
        with torch.enable_grad():
            value = loss(x, rows)
            value.backward()
        grad = torch.zeros(head.shape, device=head.device).index_copy_(0, tokens, rows.grad)
        ctx.save_for_backward(x.grad, grad.to(head.grad_dtype or head.dtype))
        return value.detach()

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad_x, grad_head = ctx.saved_tensors
        return grad_x * grad.to(grad_x.dtype), grad_head * grad.to(grad_head.dtype), None, None


def table_lr(factor: float = 4.0) -> None:
    """Value and bigram tables learn so much faster."""
    nanochat.optimizers.TABLE_LR *= factor


def bigram_scale(factor: float = 4.0) -> None:
    """The bigram vectors' scales start so much larger."""
    first_scales = GPT.first_scales
    GPT.first_scales = lambda model, layer: [0.1 * factor if s == 0.1 else s for s in first_scales(model, layer)]


def tail_average(power: float = 8.0) -> Callable[[dict], None]:
    """
    The model that is evaluated has the mean of the masters over the warmdown, in which the newest of n weighs
    (power + 1) / (power + n): Shamir & Zhang 2013, arXiv:1212.1824.
    """
    multiplier, gather = nanochat.schedule.lr_multiplier, Sharding.all_gather_params
    means, before, seen = {}, 0.0, 0

    def watched(*args, **kwargs) -> float:
        nonlocal before, seen
        lrm = multiplier(*args, **kwargs)
        seen, before = seen + (lrm < before), lrm
        return lrm

    def averaged(sharding: Sharding) -> None:
        for shard in sharding.shards if seen else ():
            mean = means.setdefault(shard.name, shard.master.clone())
            mean.lerp_(shard.master, (power + 1) / (power + seen))
        gather(sharding)

    def use_means(ran: dict) -> None:
        for shard in ran["sharding"].shards:
            shard.master.copy_(means.get(shard.name, shard.master))
        gather(ran["sharding"])

    nanochat.schedule.lr_multiplier, Sharding.all_gather_params = watched, averaged
    return use_means
