"""
Softcapped cross-entropy of a language model's head: forward and backward in one pass over the logits.

The logits are the largest tensor of a step (tokens x vocabulary). Here they exist one chunk of rows at a time:
product with the head, softcap, loss and its gradient in one fused kernel, and both products of the backward pass
while the chunk is still warm. What is kept for the backward pass is the size of the inputs, not of the logits.
"""
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanochat.compiling import compiled
from nanochat.errors import UserError

VOCAB_MULTIPLE = 64  # columns of the logits are padded to it: whole tiles in the largest matrix product
MAX_SOFTCAP = 64  # exp(softcap), summed over any vocabulary, stays far below float32's largest number
CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**28}  # logits in flight; 8 MiB of bf16 fit a CPU's cache


class Negatives(NamedTuple):
    """The tokens that the targets of a step are told apart from, instead of the whole vocabulary."""
    tokens: Tensor  # (S,) int64; from some place on padding
    counts: Tensor  # (S,) float32: how many tokens each stands for; zero: padding
    places: Tensor  # (V,) int64: where each token of the vocabulary is among them; in the padding if it is not


def negatives(vocab_size: int, share: float, seed: int, step: int, device: torch.device) -> Negatives | None:
    """
    Part of the vocabulary for sampled softmax (Jean et al. 2015, arXiv:1412.2007), so that the expected Σ exp(logit)
    stays that of all; None if the share is all. Half of them are the first tokens, which a BPE tokenizer has learned
    first as the most frequent ones; the others are one token of each of so many stretches of the rest, drawn by seed
    and step: every rank and micro-step of the step has the same.
    """
    half = round(vocab_size * share / 2)
    if 2 * half >= vocab_size:
        return None
    edges = np.linspace(half, vocab_size, half + 1).astype(int)
    drawn = np.random.default_rng([seed, step]).integers(edges[:-1], edges[1:])
    padding = VOCAB_MULTIPLE - 2 * half % VOCAB_MULTIPLE
    tokens = np.concatenate((np.arange(half), drawn, np.zeros(padding, int)))
    counts = np.concatenate((np.ones(half), np.diff(edges), np.zeros(padding))).astype(np.float32)
    places = np.full(vocab_size, 2 * half)
    places[tokens[: 2 * half]] = np.arange(2 * half)
    return Negatives(*(torch.from_numpy(array).to(device) for array in (tokens, counts, places)))


def softcapped_cross_entropy(
    x: Tensor, head: Tensor, targets: Tensor, vocab_size: int, softcap: float | None, weights: Tensor | None = None,
    sampled: Negatives | None = None,
) -> Tensor:
    """
    Sum over the targets of −log softmax(softcap · tanh(x headᵀ / softcap))[target], in float32, a scalar.

    x: (N, C); head: (V, C) with V ≥ vocab_size, the rows beyond it being padding that gets no probability;
    targets: (N,) int64, negative where there is nothing to predict, and the loss of one in the padding is infinite;
    softcap: at most MAX_SOFTCAP; None or 0 for plain logits; weights: (N,) float32, what each target counts for;
    sampled: these instead of the vocabulary, besides each target itself; needs a softcap.
    Gradients flow to x and head, in their dtypes (head's in float32 where its `grad_dtype` asks for that).
    """
    if sampled is not None and not softcap:
        raise UserError("a sampled softmax without a softcap is not there: set softcap, or softmax_share=1")
    valid = (targets >= 0).float()
    weights = valid if weights is None else valid * weights
    return SoftcappedCrossEntropy.apply(x, head, targets, weights, vocab_size, softcap, sampled)


def token_losses(x: Tensor, head: Tensor, targets: Tensor, vocab_size: int, softcap: float | None) -> Tensor:
    """The same loss for each target by itself, (N,) float32, zero where the target is negative. No gradients."""
    real, losses = real_columns(head, vocab_size), []
    for rows, row_targets in chunks(head.size(0), x, targets):
        logits = rows @ head.T
        total, shift = compiled(sum_of_exponentials)(logits, real, softcap)
        row_targets = row_targets.clamp(min=0)
        logit = logits.gather(1, row_targets[:, None])[:, 0]
        losses.append(losses_and_target_gradient(logit, total, shift, real[row_targets], softcap)[0])
    return torch.cat(losses) * (targets >= 0)


class SoftcappedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, softcap: float | None,
        sampled: Negatives | None,
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        real, ids = real_columns(head, vocab_size), targets.clamp(min=0)
        columns, counts = (head, real) if sampled is None else (head[sampled.tokens], sampled.counts)
        grad_x, grad_columns, start = torch.empty_like(x), torch.zeros_like(columns, dtype=torch.float32), 0
        grad_own = None if sampled is None else torch.empty_like(x, dtype=torch.float32)  # of head[ids]
        for rows, row_ids, row_weights in chunks(len(columns), x, ids, weights):
            chunk = slice(start, start := start + len(rows))
            logits = rows @ columns.T
            total, shift, grad = compiled(exponentials_and_gradient)(logits, counts, softcap)
            places = row_ids if sampled is None else sampled.places[row_ids]
            logit = logits.gather(1, places[:, None])[:, 0]
            if sampled is not None:  # the target counts once, whether it was drawn or not
                own, drawn = head[row_ids].float(), counts[places] * capped(logit, softcap)[0].exp()
                logit = (rows.float() * own).sum(-1)
                total = total - drawn + capped(logit, softcap)[0].exp()
            losses, target_grad = losses_and_target_gradient(logit, total, shift, real[row_ids], softcap)
            grad[torch.arange(len(grad), device=x.device), places] = (
                target_grad.to(grad.dtype) if sampled is None else torch.zeros_like(logit, dtype=grad.dtype))
            loss += (losses * row_weights).sum()
            # What is left of the gradient is a factor of each row: in the products it costs no pass over the logits.
            scale = (row_weights / total)[:, None]
            grad_x[chunk] = (grad @ columns) * scale
            # Sums over chunks are kept in fp32, whatever the dtype of the products.
            compiled(add_to)(grad_columns, grad.T @ (rows * scale).to(rows.dtype))
            if sampled is not None:
                scale = scale * target_grad[:, None]
                grad_x[chunk] += (own * scale).to(x.dtype)
                grad_own[chunk] = rows * scale
        if sampled is not None:  # sums in a fixed order, as an embedding's
            grad_head = torch.ops.aten.embedding_dense_backward(grad_own, ids, len(head), -1, False)
            grad_columns = grad_head.index_add_(0, sampled.tokens, grad_columns)
        ctx.save_for_backward(grad_x, grad_columns)
        ctx.head_dtype = head.dtype if head.grad_dtype is None else head.grad_dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        grad_x, grad_head = ctx.saved_tensors
        return grad_x * grad_loss.to(grad_x.dtype), (grad_head * grad_loss).to(ctx.head_dtype), *[None] * 5


def chunks(vocab: int, *tensors: Tensor):
    """Chunks of rows of all tensors, none with too many logits; of one shape (a compiled kernel) but for the last."""
    rows = chunk_rows(len(tensors[0]), vocab, tensors[0].device.type)
    return zip(*(tensor.split(rows) for tensor in tensors))


def chunk_rows(rows: int, vocab: int, device_type: str) -> int:
    """How many rows a chunk has."""
    count = 1
    while -(-rows // count) * vocab > CHUNK_LOGITS.get(device_type, 2**24) and count < rows:
        count *= 2
    return -(-rows // count)


def cap(logits: Tensor, vocab_size: int, softcap: float | None) -> Tensor:
    """softcap · tanh(logits / softcap) in float32, or the plain logits without a softcap; −inf in padded columns."""
    padded = torch.arange(logits.size(-1), device=logits.device) >= vocab_size
    logits = logits.float()
    return (softcap * torch.tanh(logits / softcap) if softcap else logits).masked_fill(padded, float("-inf"))


def real_columns(head: Tensor, vocab_size: int) -> Tensor:
    """(V,) float32: one for a token, zero for padding. A float factor, because a comparison of integers inside the
    kernels kept a CPU from vectorising them: they took four times as long."""
    return (torch.arange(head.size(0), device=head.device) < vocab_size).float()


def capped(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | float]:
    """The logits after the softcap, in float32, and the tanh whose 1 − tanh² is their slope: 0 without a softcap."""
    if not softcap:
        return logits.float(), 0.0
    logits = logits.float()
    tanh = 1 - 2 / ((logits * (2 / softcap)).exp() + 1)  # half the time of torch.tanh, with an absolute error of 1e-7
    return softcap * tanh, tanh


def exponentials(logits: Tensor, real: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """exp(capped logit − shift), (N, V) float32, zero in padded columns; the shift, (N,) or 0; the tanh of `capped`."""
    logits, tanh = capped(logits, softcap)
    if softcap:  # nothing is subtracted: capped logits are at most `softcap`, and exp(softcap) is far from overflow
        return logits.exp() * real, 0.0, tanh
    logits = logits.masked_fill(real == 0, float("-inf"))
    shift = logits.amax(-1)
    return (logits - shift[:, None]).exp(), shift, tanh


def sum_of_exponentials(logits: Tensor, real: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | float]:
    """Σ exp(capped logit − shift) over the real columns, (N,) float32, and the shift, (N,) or 0."""
    exp, shift, _ = exponentials(logits, real, softcap)
    return exp.sum(-1), shift


def exponentials_and_gradient(
    logits: Tensor, real: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor | float, Tensor]:
    """
    Σ exp(capped logit − shift), (N,), the shift, and exp(capped logit − shift) · (1 − tanh²), (N, V) in the logits'
    dtype: times weight / Σ it is the gradient with respect to the raw logits but for the targets' own entries.
    """
    exp, shift, tanh = exponentials(logits, real, softcap)
    return exp.sum(-1), shift, (exp * (1 - tanh * tanh)).to(logits.dtype)


def add_to(total: Tensor, part: Tensor) -> None:
    """Compiled, because eagerly a CPU first makes a float32 copy of the part."""
    total.add_(part)


def losses_and_target_gradient(
    logit: Tensor, total: Tensor, shift: Tensor | float, real: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """
    From the raw logit of each row's target, (N,): −log p and (p − 1) · (1 − tanh²) · total, (N,) float32; where there
    is no target, some finite numbers. In float32: where p is near one, p − 1 would drown in the rounding of a stored p.
    """
    logit, tanh = capped(logit, softcap)
    loss = total.log() - (logit - shift) - real.log()  # the last is zero, or −inf for a target in the padding
    return loss, ((logit - shift).exp() - total) * (1 - tanh * tanh)
