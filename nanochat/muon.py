"""
Muon: momentum, orthogonalised. The update rules are pure functions of tensors; the optimizer is on top of them.

Jordan et al. 2024, kellerjordan.github.io/posts/muon. Every matrix moves by a matrix whose singular values are all
near one: no direction of the gradient is drowned by the few that dominate it.
"""
import torch
from torch import Tensor
from torch.nn import Parameter

from nanochat.adamw import write_back

# Odd quintic polynomials, one per step, each the best for the interval of singular values the one before it leaves.
# Amsel et al. 2025 ("Polar Express"), arXiv:2505.16932, for five steps; docs/decisions.md has the comparison with
# the fixed (3.4445, −4.7750, 2.0315) of the original Muon.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalize(G: Tensor) -> Tensor:
    """
    The nearest semi-orthogonal matrices to a stack of matrices, by five steps of Newton–Schulz iteration.

    G: (..., rows, cols), any float dtype; the iteration runs in G's dtype. Returns the same shape; singular values of
    at least 1/1000 of the Frobenius norm end within [0.7, 1.2], zero matrices stay zero.
    """
    stack = G.reshape(-1, *G.shape[-2:])
    X = stack.mT if G.size(-2) > G.size(-1) else stack  # the Gram matrix is taken on the shorter side
    # 2% above the Frobenius norm: rounding must not leave a singular value above one, where the iteration diverges.
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)  # aX + (bA + cA²)X
    return (X.mT if G.size(-2) > G.size(-1) else X).reshape(G.shape)


def nesterov_momentum(grad: Tensor, buffer: Tensor, momentum: float) -> Tensor:
    """Moves the buffer (in place) towards the gradient and returns the gradient moved towards the buffer."""
    buffer.lerp_(grad, 1 - momentum)
    return torch.lerp(grad, buffer, momentum)


def muon_update(master: Tensor, update: Tensor, lr: Tensor, decay: Tensor) -> None:
    """
    One step in place on any slice. decay = lr · weight decay; it acts only where it and the update agree in sign
    ("cautious" weight decay, Liang et al. 2024, arXiv:2411.16085): it never undoes what the gradient asks for.
    """
    update = update.to(master.dtype)
    agree = (update * master > 0).to(master.dtype)
    master.sub_(lr * update + decay * agree * master)


def shape_scale(rows: int, cols: int) -> float:
    """An orthogonal update of a tall matrix moves its outputs less, entry by entry; √(rows/cols) makes up for it."""
    return max(1.0, rows / cols) ** 0.5


class Muon:
    """
    Muon on float32 masters, for matrices. Matrices of one shape are kept in one stack, so that a step is a handful
    of batched products; parameters become views of the stacks (until the model is cast to another dtype).
    A parameter's attributes `lr_mul` and `wd_mul` scale its learning rate and weight decay.
    """

    def __init__(self, params: dict[str, Parameter], lr: float, weight_decay: float = 0.0, momentum: float = 0.95):
        self.param_groups = [{
            "params": params, "lr": lr, "initial_lr": lr,
            "weight_decay": weight_decay, "initial_weight_decay": weight_decay, "momentum": momentum,
        }]
        self.names_by_shape: dict[tuple[int, int], list[str]] = {}
        for name, p in params.items():
            assert p.ndim == 2 and p.dtype == torch.float32, f"Muon takes float32 matrices, not {name}: {p.dtype} {p.shape}"
            self.names_by_shape.setdefault(tuple(p.shape), []).append(name)
        self.masters, self.momentum_buffers = {}, {}
        for shape, names in self.names_by_shape.items():
            self.masters[shape] = torch.stack([params[name].data for name in names])  # (n, rows, cols)
            self.momentum_buffers[shape] = torch.zeros_like(self.masters[shape])
            for name, master in zip(names, self.masters[shape]):
                params[name].data = master

    @torch.no_grad()
    def step(self) -> None:
        """Apply the gradients of all matrices. Orthogonalisation runs in the dtype of the parameters."""
        (group,) = self.param_groups
        for (rows, cols), names in self.names_by_shape.items():
            params = [group["params"][name] for name in names]
            master, buffer = self.masters[rows, cols], self.momentum_buffers[rows, cols]
            grad = torch.stack([p.grad for p in params]).float()
            update = orthogonalize(nesterov_momentum(grad, buffer, group["momentum"]).to(params[0].dtype))
            lr = [group["lr"] * shape_scale(rows, cols) * getattr(p, "lr_mul", 1.0) for p in params]
            decay = [group["lr"] * getattr(p, "lr_mul", 1.0) * group["weight_decay"] * getattr(p, "wd_mul", 1.0) for p in params]
            scalars = torch.tensor([lr, decay], dtype=torch.float32).to(grad.device)[..., None, None]
            muon_update(master, update, *scalars)  # (n, 1, 1): a rate for each matrix
            for p, matrix in zip(params, master):
                write_back(p, matrix)

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that must survive a restart, by parameter name; views of the stacks."""
        tensors = {}
        for shape, names in self.names_by_shape.items():
            for name, master, buffer in zip(names, self.masters[shape], self.momentum_buffers[shape]):
                tensors |= {f"master.{name}": master, f"momentum.{name}": buffer}
        return tensors
