"""
Softcapped cross-entropy of a language model's head: forward and backward in one pass over the logits.

The logits are the largest tensor of a step (tokens x vocabulary). Here they exist one chunk of rows at a time:
product with the head, softcap, loss and its gradient in one fused kernel, and both products of the backward pass
while the chunk is still warm. What is kept for the backward pass is the size of the inputs, not of the logits.
"""
import torch
from torch import Tensor

from nanochat.runtime.compiling import compiled, of_any_length

VOCAB_MULTIPLE = 64  # columns of the logits are padded to it: whole tiles in the largest matrix product
MAX_SOFTCAP = 64  # exp(softcap), summed over any vocabulary, stays far below float32's largest number
CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**28}  # logits in flight; 8 MiB of bf16 fit a CPU's cache


def softcapped_cross_entropy(
    x: Tensor, head: Tensor, targets: Tensor, vocab_size: int, softcap: float | None, weights: Tensor | None = None
) -> Tensor:
    """
    Sum over the targets of −log softmax(softcap · tanh(x headᵀ / softcap))[target], in float32, a scalar.

    x: (N, C); head: (V, C) with V ≥ vocab_size, the rows beyond it being padding that gets no probability;
    targets: (N,) int64, negative where there is nothing to predict, and the loss of one in the padding is infinite;
    softcap: at most MAX_SOFTCAP; None or 0 for plain logits; weights: (N,) float32, what each target counts for.
    Gradients flow to x and head, in their dtypes (head's in its `grad_dtype`, float32 where that is None).
    """
    valid = (targets >= 0).float()
    weights = valid if weights is None else valid * weights
    if x.device.type == "cpu":  # on a GPU the host would have to wait until it knows how many there are
        counted = weights.nonzero()[:, 0]
        if len(counted) < len(x):  # what counts for nothing needs no logits
            x, targets, weights = (part.index_select(0, counted) for part in (x, targets, weights))
    return SoftcappedCrossEntropy.apply(x, head, targets, weights, vocab_size, softcap)


def token_losses(x: Tensor, head: Tensor, targets: Tensor, vocab_size: int, softcap: float | None) -> Tensor:
    """The same loss for each target by itself, (N,) float32, zero where the target is negative. No gradients."""
    real, losses = real_columns(head, vocab_size), []
    for rows, row_targets in chunks(head.size(0), x, targets):
        logits = rows @ head.T
        total, shift, _ = of_any_length(compiled(exponentials_and_gradient))(logits, real, softcap)
        row_targets = row_targets.clamp(min=0)
        logit = logits.gather(1, row_targets[:, None])[:, 0]
        losses.append(losses_and_target_gradient(logit, total, shift, real[row_targets], softcap)[0])
    return torch.cat(losses) * (targets >= 0)


class SoftcappedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, softcap: float | None
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        real, targets = real_columns(head, vocab_size), targets.clamp(min=0)
        grad_x, grad_head, start = torch.empty_like(x), torch.zeros_like(head, dtype=torch.float32), 0
        for rows, row_targets, row_weights in chunks(head.size(0), x, targets, weights) if len(x) else ():
            logits = rows @ head.T
            total, shift, grad = of_any_length(compiled(exponentials_and_gradient))(logits, real, softcap)
            logit = logits.gather(1, row_targets[:, None])[:, 0]
            losses, target_grad = losses_and_target_gradient(logit, total, shift, real[row_targets], softcap)
            # Not scatter_, which on a CPU makes a float32 copy of the logits.
            grad[torch.arange(len(grad), device=x.device), row_targets] = target_grad.to(grad.dtype)
            loss += (losses * row_weights).sum()
            # What is left of the gradient is a factor of each row: in the products it costs no pass over the logits.
            scale = (row_weights / total)[:, None]
            grad_x[start : start + len(rows)] = (grad @ head) * scale
            start += len(rows)
            # Sums over chunks are kept in fp32, whatever the dtype of the products.
            compiled(add_to)(grad_head, grad.T @ (rows * scale).to(rows.dtype))
        ctx.save_for_backward(grad_x, grad_head)
        ctx.head_dtype = head.grad_dtype or torch.float32
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        grad_x, grad_head = ctx.saved_tensors
        return grad_x * grad_loss.to(grad_x.dtype), (grad_head * grad_loss).to(ctx.head_dtype), None, None, None, None


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


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap · tanh(logits / softcap) in float32, or the plain logits without a softcap."""
    logits = logits.float()
    return softcap * torch.tanh(logits / softcap) if softcap else logits


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


def exponentials_and_gradient(
    logits: Tensor, real: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor | float, Tensor]:
    """
    Σ exp(capped logit − shift) over the real columns, (N,) float32, the shift, (N,) or 0, and exp(capped logit − shift)
    · (1 − tanh²), (N, V) in the logits' dtype: times weight / Σ it is the gradient with respect to the raw logits but
    for the targets' own entries.
    """
    exp, tanh = capped(logits, softcap)  # of this name there is one tensor at a time: each is as large as the logits
    if softcap:  # nothing is subtracted: capped logits are at most `softcap`, and exp(softcap) is far from overflow
        exp, shift = exp.exp() * real, 0.0
    else:
        exp = exp.masked_fill(real == 0, float("-inf"))
        shift = exp.amax(-1)
        exp = (exp - shift[:, None]).exp()
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
