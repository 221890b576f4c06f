"""
Softcapped cross-entropy of a language model's head: forward and backward in one pass over the logits.

The logits are the largest tensor of a step (tokens x vocabulary). Here they exist one chunk of rows at a time:
product with the head, softcap, loss and its gradient in one fused kernel, and both products of the backward pass
while the chunk is still warm. What is kept for the backward pass is the size of the inputs, not of the logits.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.compiling import compiled

CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**28}  # logits in flight; 8 MiB of fp32 fit a CPU's cache


def softcapped_cross_entropy(x: Tensor, head: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> Tensor:
    """
    Sum over the targets of −log softmax(softcap · tanh(x headᵀ / softcap))[target], in float32, a scalar.

    x: (N, C); head: (V, C) with V ≥ vocab_size, the rows beyond it being padding that gets no probability;
    targets: (N,) int64, negative where there is nothing to predict. Gradients flow to x and head, in their dtypes
    (head's in float32 where its `grad_dtype` asks for that).
    """
    return SoftcappedCrossEntropy.apply(x, head, targets, vocab_size, softcap)


def token_losses(x: Tensor, head: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> Tensor:
    """The same loss for each target by itself, (N,) float32, zero where the target is negative. No gradients."""
    losses = [
        compiled(capped_losses)(rows @ head.T, row_targets, vocab_size, softcap)
        for rows, row_targets in chunks(x, targets, head.size(0))
    ]
    return torch.cat(losses)


class SoftcappedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, head: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x, grad_head, start = torch.empty_like(x), None, 0
        for rows, row_targets in chunks(x, targets, head.size(0)):
            losses, grad = compiled(capped_losses_and_gradient)(rows @ head.T, row_targets, vocab_size, softcap)
            loss += losses.sum()
            torch.mm(grad, head, out=grad_x[start : start + len(rows)])
            start += len(rows)
            # Sums over chunks are kept in fp32, whatever the dtype of the products.
            grad_head = (grad.T @ rows).float() if grad_head is None else grad_head.add_(grad.T @ rows)
        ctx.save_for_backward(grad_x, grad_head)
        ctx.head_dtype = head.dtype if head.grad_dtype is None else head.grad_dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        grad_x, grad_head = ctx.saved_tensors
        return grad_x * grad_loss.to(grad_x.dtype), (grad_head * grad_loss).to(ctx.head_dtype), None, None, None


def chunks(x: Tensor, targets: Tensor, vocab: int):
    """Pairs of row blocks of x and targets, all of one shape (a compiled kernel for each), none with too many logits."""
    count = 1
    while len(x) // count * vocab > CHUNK_LOGITS.get(x.device.type, 2**24) and len(x) % (2 * count) == 0:
        count *= 2
    return zip(x.chunk(count), targets.chunk(count))


def cap(logits: Tensor, vocab_size: int, softcap: float) -> Tensor:
    """softcap · tanh(logits / softcap) in float32, −inf in the padded columns."""
    padded = torch.arange(logits.size(-1), device=logits.device) >= vocab_size
    return (softcap * torch.tanh(logits.float() / softcap)).masked_fill(padded, float("-inf"))


def capped_losses(logits: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> Tensor:
    return F.cross_entropy(cap(logits, vocab_size, softcap), targets, ignore_index=-1, reduction="none")


def capped_losses_and_gradient(logits: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> tuple[Tensor, Tensor]:
    """
    Losses (N,) and the gradient of their sum with respect to the raw logits (N, V), in the logits' dtype:
    (softmax − onehot) · (1 − tanh²), zero in rows without a target and in padded columns.
    """
    column = torch.arange(logits.size(-1), device=logits.device)
    tanh = torch.tanh(logits.float() / softcap)
    capped = (softcap * tanh).masked_fill(column >= vocab_size, float("-inf"))
    # No maximum is subtracted: capped logits are at most `softcap`, and exp(softcap) is far from overflow.
    exp = capped.exp()
    total = exp.sum(-1, keepdim=True)
    is_target = column == targets[:, None]
    valid = (targets >= 0).float()
    losses = (total[:, 0].log() - torch.where(is_target, capped, 0.0).sum(-1)) * valid
    grad = (exp / total - is_target.float()) * (1 - tanh * tanh) * valid[:, None]
    return losses, grad.to(logits.dtype)
