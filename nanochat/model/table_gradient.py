"""
The gradient of a table of token vectors on a GPU: for each token, the sum over its places, always in the same order.
torch's kernel took a millisecond on an H100, mostly not for memory traffic; 22 layers have twelve tables.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.model.gpt import GPT
from nanochat.model.layers import Embedding

# Places and columns that one program adds up.
PLACES, COLUMNS = 64, 512


def compile_model(model: GPT) -> None:
    """
    Compile the blocks and, on a GPU, give tables the kernels. Here, because exported models come without the kernels.
    """
    model.compile_blocks()
    for module in model.modules():
        if isinstance(module, Embedding) and module.weight.is_cuda:
            module.lookup = Lookup.apply


class Lookup(torch.autograd.Function):
    """F.embedding."""

    @staticmethod
    def forward(ctx, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(table)
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (tokens,) = ctx.saved_tensors
        return None, sum_by_token(grad.flatten(0, -2), tokens.flatten(), ctx.rows)


@torch.library.custom_op("nanochat::sum_by_token", mutates_args=())
def sum_by_token(grad: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """grad (N, C), tokens (N,) int64 < rows → (rows, C), in grad's dtype; sums in float32."""
    return grad.new_zeros(rows, grad.size(1), dtype=torch.float32).index_add_(0, tokens, grad.float()).to(grad.dtype)


@sum_by_token.register_fake
def _(grad: Tensor, tokens: Tensor, rows: int) -> Tensor:
    return grad.new_empty(rows, grad.size(1))


@sum_by_token.register_kernel("cuda")
def _(grad: Tensor, tokens: Tensor, rows: int) -> Tensor:
    from nanochat.model import table_kernels  # Triton comes with torch for CUDA only

    places, columns = grad.shape
    ordered, order = tokens.sort(stable=True)
    # Where each token's places begin in sorted order, and where the last token's end.
    begins = torch.searchsorted(ordered, torch.arange(rows + 1, device=tokens.device))
    total = grad.new_empty(rows, columns)
    programs, parts = -(-places // PLACES), -(-columns // COLUMNS)
    # For tokens that span programs, two sums per program: of a token that began earlier, of a token that continues.
    partial = grad.new_empty(programs, 2, columns, dtype=torch.float32)
    table_kernels.add_places[programs, parts](
        grad.contiguous(), ordered, order, begins, total, partial, places, columns, PLACES, COLUMNS)
    table_kernels.add_programs[rows, parts](begins, total, partial, columns, PLACES, COLUMNS)
    return total
