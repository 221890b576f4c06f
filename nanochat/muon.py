"""
Muon: momentum, orthogonalised. The update rules are pure functions of tensors; the optimizer is on top of them.

Jordan et al. 2024, kellerjordan.github.io/posts/muon. Every matrix moves by a matrix whose singular values are all
near one: no direction of the gradient is drowned by the few that dominate it.
"""
import torch
from torch import Tensor

from nanochat.exchange import MatrixExchange
from nanochat.ownership import balance
from nanochat.zero import Sharding, StepStats

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


def nesterov_momentum(grad: Tensor, buffer: Tensor, momentum: float, ok: Tensor) -> Tensor:
    """Moves the buffer (in place, unless ok is 0) towards the gradient and returns the gradient moved towards the buffer."""
    buffer.lerp_(grad, (1 - momentum) * ok)
    return torch.lerp(grad, buffer, momentum)


def muon_update(master: Tensor, update: Tensor, lr: Tensor, decay: Tensor | None) -> None:
    """
    One step in place on any slice; with lr and decay 0 nothing changes. decay = lr · weight decay, None for none; it
    acts only where it and the update agree in sign ("cautious" weight decay, Liang et al. 2024, arXiv:2411.16085): it
    never undoes what the gradient asks for.
    """
    update = update.to(master.dtype)
    if decay is not None:
        agree = (update * master > 0).to(master.dtype)
        master.sub_(lr * update + decay * agree * master)
    else:
        master.addcmul_(update, lr, value=-1)


def shape_scale(rows: int, cols: int) -> float:
    """An orthogonal update of a tall matrix moves its outputs less, entry by entry; √(rows/cols) makes up for it."""
    return max(1.0, rows / cols) ** 0.5


class DistMuon:
    """
    Muon for matrices, on a rank's slices. Momentum is elementwise and stays in the slices; once per step the pieces of
    each matrix travel to one rank of the shard group (each has about the same work), are orthogonalised there in
    stacks of one shape and in the compute dtype, and travel back.
    A slice's `lr_mul` and `wd_mul` scale its learning rate and weight decay.
    """

    kind = "muon"

    def __init__(self, sharding: Sharding, names: list[str], lr: float, weight_decay: float = 0.0, momentum: float = 0.95):
        slices = [s for s in sharding.slices if s.name in set(names)]
        self.param_groups = [{
            "slices": slices, "lr": lr, "initial_lr": lr,
            "weight_decay": weight_decay, "initial_weight_decay": weight_decay, "momentum": momentum,
        }]
        self.dtype = sharding.dtype
        self.state = {"momentum": {s.name: torch.zeros_like(s.master) for s in slices}}
        self.counters: dict[str, Tensor] = {}
        self.exchanges: dict[tuple[int, int], MatrixExchange] = {}
        trained = set(names) & sharding.pieces.keys()  # not the frozen ones
        shapes = {name: tuple(p.shape) for name, p in sharding.model.named_parameters() if name in trained}
        loads = [0.0] * sharding.shards
        for shape in sorted(set(shapes.values()), key=lambda s: -s[0] * s[1] * min(s)):  # the dearest first
            assert len(shape) == 2, f"Muon takes matrices, not {shape}"
            pieces = {name: sharding.pieces[name] for name in shapes if shapes[name] == shape}
            owners = balance([shape[0] * shape[1] * min(shape)] * len(pieces), loads)
            self.exchanges[shape] = MatrixExchange(
                shape, pieces, owners, sharding.shard_rank, sharding.shards, sharding.shard_group, sharding.dtype, sharding.device
            )

    @torch.no_grad()
    def step(self, stats: StepStats) -> None:
        """Apply the slices' gradients, unless the stats says that no rank may."""
        (group,) = self.param_groups
        kept = {shape: [s for s in group["slices"] if s.shape == shape] for shape in self.exchanges}
        # All shapes are sent before the first is waited for: one shape travels while another is worked on.
        sent, sent_back = {}, {}
        for shape, exchange in self.exchanges.items():
            updates = {}
            for s in kept[shape]:
                update = nesterov_momentum(s.grad, self.state["momentum"][s.name], group["momentum"], stats.ok)
                updates[s.name] = update.to(self.dtype)
            sent[shape] = exchange.send(updates)
        for shape, exchange in self.exchanges.items():
            sent_back[shape] = exchange.send_back(orthogonalize(exchange.matrices(sent.pop(shape))))
        for shape, exchange in self.exchanges.items():
            updates = exchange.pieces(sent_back.pop(shape))
            for s in kept[shape]:
                lr, decay = group["lr"] * s.lr_mul, group["weight_decay"] * s.wd_mul
                muon_update(s.master, updates[s.name], lr * shape_scale(*shape) * stats.ok, lr * decay * stats.ok if decay else None)
