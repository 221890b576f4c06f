"""
Softcapped cross-entropy of a language model's head: forward and backward in one pass over the logits.

The logits are the largest tensor of a step (tokens x vocabulary). Here they exist one chunk of rows at a time:
product with the head; softcap, sums and gradient in one fused kernel; both products of the backward pass, on a CPU
while the chunk is still in its cache. Only tensors of the inputs' sizes are kept for the backward pass, no logits.
"""
from collections.abc import Iterator
from math import ceil

import torch
from torch import Tensor

from nanochat.model.products import HeadProducts
from nanochat.runtime.compiling import compiled, of_any_length

# Logits that exist at once. 2^22 are 8 MiB of bfloat16, which fit a CPU's cache.
CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**28}


def softcapped_cross_entropy(
    x: Tensor,
    head: Tensor,
    targets: Tensor,
    vocab_size: int,
    softcap: float | None,
    weights: Tensor | None = None,
    head_products: type = HeadProducts,
) -> Tensor:
    """
    Sum over the targets of −log softmax(softcap · tanh(x headᵀ / softcap))[target], in float32, a scalar.

    x: (N, C); head: (V, C) with V ≥ vocab_size; rows beyond vocab_size are padding and get no probability;
    targets: (N,) int64, negative where there is nothing to predict; a target in the padding has infinite loss;
    softcap: at most MAX_SOFTCAP; None or 0 for plain logits; weights: (N,) float32, a factor for each target's loss.
    Gradients flow to x and head, in their dtypes (head's in its `grad_dtype`, float32 where that is None), and to
    weights: each target's loss. head_products: the class that multiplies with the head.
    """
    valid = (targets >= 0).float()
    weights = valid if weights is None else valid * weights
    return SoftcappedCrossEntropy.apply(x, head, targets, weights, vocab_size, softcap, head_products)


def token_losses(
    x: Tensor,
    head: Tensor,
    targets: Tensor,
    vocab_size: int,
    softcap: float | None,
) -> Tensor:
    """The loss of each target, (N,) float32, zero where the target is negative. No gradients."""
    real = real_columns(head, vocab_size)
    losses = []
    for rows, row_targets in row_chunks(head.size(0), x, targets.clamp(min=0)):
        row_losses, _, _ = losses_and_gradient(rows @ head.T, row_targets, real, softcap)
        losses.append(row_losses)
    return torch.cat(losses) * (targets >= 0)


class SoftcappedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        head: Tensor,
        targets: Tensor,
        weights: Tensor,
        vocab_size: int,
        softcap: float | None,
        head_products: type,
    ) -> Tensor:
        multiply = head_products(head)
        real = real_columns(head, vocab_size)
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x = torch.empty_like(x)
        # The sum over chunks is taken in float32.
        grad_head = torch.zeros_like(head, dtype=torch.float32)
        each_loss = torch.empty_like(weights)
        chunks = row_chunks(head.size(0), x, targets.clamp(min=0), weights, grad_x, each_loss)
        for rows, row_targets, row_weights, rows_grad, row_losses in chunks:
            losses, total, grad = losses_and_gradient(multiply.logits(rows), row_targets, real, softcap)
            loss += (losses * row_weights).sum()
            to_rows, to_head = multiply.gradients(grad, total, row_weights, rows)
            rows_grad.copy_(to_rows)
            row_losses.copy_(losses)
            compiled(add_to)(grad_head, to_head)
            del to_rows, to_head
        ctx.save_for_backward(grad_x, grad_head, each_loss)
        ctx.head_dtype = head.grad_dtype or torch.float32
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        grad_x, grad_head, each_loss = ctx.saved_tensors
        grad_x = grad_x * grad_loss.to(grad_x.dtype)
        return grad_x, (grad_head * grad_loss).to(ctx.head_dtype), None, each_loss * grad_loss, None, None, None


def row_chunks(vocab: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Chunks of rows of all tensors, none with too many logits; all but the last have one shape: one kernel."""
    rows = chunk_rows(len(tensors[0]), vocab, tensors[0].device.type)
    if rows > 0:
        yield from zip(*(tensor.split(rows) for tensor in tensors))


def chunk_rows(rows: int, vocab: int, device_type: str) -> int:
    """The number of rows of a chunk, a multiple of 16 if `rows` is one, as 8-bit products need."""
    most = max(CHUNK_LOGITS.get(device_type, 2**24), 16 * vocab)
    while rows * vocab > most:
        rows = 16 * ceil(rows / 32)
    return rows


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap · tanh(logits / softcap) in float32, or the plain logits without a softcap."""
    logits = logits.float()
    if not softcap:
        return logits
    return softcap * torch.tanh(logits / softcap)


def real_columns(head: Tensor, vocab_size: int) -> Tensor:
    """(V,) float32: one for a token, zero for padding. A float factor, because a comparison of integers inside the
    kernels kept a CPU from vectorising them: they took four times as long."""
    return (torch.arange(head.size(0), device=head.device) < vocab_size).float()


def losses_and_gradient(
    logits: Tensor,
    targets: Tensor,
    real: Tensor,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    For a chunk of raw logits (N, V): the losses, (N,) float32; the sums of exponentials, (N,); and these sums times the
    gradient with respect to the raw logits, (N, V) in the logits' dtype.
    """
    total, shift, grad = of_any_length(compiled(exponentials_and_gradient))(logits, real, softcap)
    # The targets' own entries in float32: where p is near one, p − 1 would drown in the rounding of a stored p.
    logit, tanh = capped(logits.gather(1, targets[:, None])[:, 0], softcap)  # (N,)
    # The last term is 0, or −inf for a target in the padding.
    losses = total.log() - (logit - shift) - real[targets].log()
    target_grad = ((logit - shift).exp() - total) * (1 - tanh * tanh)
    # Not scatter_, which on a CPU makes a float32 copy of the logits.
    grad[torch.arange(len(grad), device=grad.device), targets] = target_grad.to(grad.dtype)
    return losses, total, grad


def exponentials_and_gradient(
    logits: Tensor,
    real: Tensor,
    softcap: float | None,
) -> tuple[Tensor, Tensor | float, Tensor]:
    """
    Σ exp(capped logit − shift) over the real columns, (N,) float32; the shift, (N,) or 0; and exp(capped logit − shift)
    · (1 − tanh²), (N, V) in the logits' dtype.
    """
    # One name for all steps, so that only one tensor of the logits' size is alive.
    exp, tanh = capped(logits, softcap)
    if softcap:  # nothing is subtracted: capped logits are at most `softcap`, and exp(softcap) is far from overflow
        shift = 0.0
        exp = exp.exp() * real
    else:
        exp = exp.masked_fill(real == 0, float("-inf"))
        shift = exp.amax(-1)
        exp = (exp - shift[:, None]).exp()
    return exp.sum(-1), shift, (exp * (1 - tanh * tanh)).to(logits.dtype)


def capped(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | float]:
    """The logits after the softcap, in float32, and the tanh whose 1 − tanh² is their slope; 0 without a softcap."""
    logits = logits.float()
    if not softcap:
        return logits, 0.0
    # Half the time of torch.tanh, with an absolute error of 1e-7.
    tanh = 1 - 2 / ((logits * (2 / softcap)).exp() + 1)
    return softcap * tanh, tanh


def add_to(total: Tensor, part: Tensor) -> None:
    """Compiled, because eagerly a CPU first makes a float32 copy of the part."""
    total.add_(part)
