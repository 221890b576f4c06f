"""Products with a model's matrices: the door behind which fp8.py has 8 bits, and kv_cache.py weights for decoding."""
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class SquaredReLU(torch.autograd.Function):
    """
    relu(x)². It keeps only its result, which the next product keeps anyway: relu(x) is its root, to the bit (the root
    halves the relative rounding error of the square, and rounds it away).
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = F.relu(x).square()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return 2 * y.sqrt() * grad


class HeadProducts:
    """A head's three products with a chunk of rows."""

    def __init__(self, head: Tensor):
        self.head = head  # (V, C)

    def logits(self, rows: Tensor) -> Tensor:
        """rows (N, C) → (N, V)."""
        return rows @ self.head.T

    def gradients(self, grad: Tensor, total: Tensor, weights: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """
        With g = grad · weights / total: g · head, (N, C), and gᵀ · rows, (V, C). grad: (N, V), no number of a row
        exceeds the row's total; total, weights: (N,) float32; rows: (N, C).
        """
        # Each row's factor is applied in the products, which saves a pass over the logits.
        factor = (weights / total)[:, None]
        return (grad @ self.head) * factor, grad.T @ (rows * factor).to(rows.dtype)


class Products:
    """In the model's own dtype. x: (…, C); weights: (M, C) each."""

    head: type = HeadProducts

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x times the weight transposed, (…, M)."""
        return F.linear(x, weight)

    def linears(self, x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """(…, M) for each weight, in one product: fewer, larger kernels, and a third of the compile time."""
        return F.linear(x, torch.cat(weights)).split([len(weight) for weight in weights], dim=-1)

    def mlp(self, x: Tensor, weight_in: Tensor, weight_out: Tensor) -> Tensor:
        """relu² between two products: (…, C)."""
        return F.linear(SquaredReLU.apply(F.linear(x, weight_in)), weight_out)
