"""
Muon: orthogonalized momentum. Update rules are pure functions of tensors; DistMuon applies them to a rank's shards.

Jordan et al. 2024, kellerjordan.github.io/posts/muon. Every matrix moves by a matrix whose singular values are all near
one, so that directions with small gradients are learned, too.
"""
from math import prod
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.optim.partition import ShardRange
from nanochat.optim.zero import Sharding, StepStats

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

Variant = Literal["muon", "normuon", "muoneq", "muonplus"]
SECOND_BETA = 0.95       # of NorMuon's second moment
SMALLEST = 1e-20         # squared length of a row or column below which it is not made longer


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


def even_out(update: Tensor, dim: int, second: Tensor | None = None, ok: Tensor | float = 1.0) -> Tensor:
    """
    Rows (dim −1) or columns (dim −2) of a stack (n, rows, cols) made one length; every matrix keeps its Frobenius norm.
    second: the moving average of their squared lengths, (n, rows or cols) float32, moved in place unless ok is 0; each
    is divided by the root of that instead. A factor common to all has no effect, so that an average which began at zero
    needs no correction.
    """
    squares = torch.linalg.vector_norm(update, dim=dim, dtype=torch.float32).square()
    average = squares if second is None else second.lerp_(squares, (1 - SECOND_BETA) * ok)
    factors = average.clamp(min=SMALLEST).rsqrt()
    before, after = squares.sum(-1, keepdim=True), (squares * factors.square()).sum(-1, keepdim=True)
    factors = factors * (before / after.clamp(min=SMALLEST)).sqrt()
    return (update * factors.unsqueeze(dim)).to(update.dtype)


def direction(momentum: Tensor, variant: Variant, second: Tensor | None, ok: Tensor) -> Tensor:
    """
    What a stack of matrices (n, rows, cols) moves along, the same shape: their momentum, orthogonalized. In that, rows
    of a wide matrix, or columns of a tall one, are of one norm. The others, along its longer side, are evened out
      normuon   by their second moment. Li et al. 2025, arXiv:2510.05491 (there by rows, whatever the shape)
      muonplus  at once, without state. Zhang et al. 2026, arXiv:2602.21545 (there rows and columns in turn)
    muoneq evens out the rows of the momentum instead, before. Chang et al. 2026, arXiv:2603.28254.
    """
    update = orthogonalize(even_out(momentum, -1) if variant == "muoneq" else momentum)
    longer = -1 if update.size(-2) >= update.size(-1) else -2
    return even_out(update, longer, second, ok) if variant in ("normuon", "muonplus") else update


def nesterov_momentum(grad: Tensor, buffer: Tensor, momentum: float, ok: Tensor) -> Tensor:
    """Moves the buffer towards the gradient in place, unless ok is 0; returns the gradient moved towards the buffer."""
    buffer.lerp_(grad, (1 - momentum) * ok)
    return torch.lerp(grad, buffer, momentum)


def muon_update(master: Tensor, update: Tensor, lr: Tensor, decay: Tensor | None) -> None:
    """
    One step in place on any range of elements; with lr and decay 0 nothing changes. decay: lr · weight decay, or None.
    It acts only where it agrees in sign with the update ("cautious" weight decay, Liang et al. 2024, arXiv:2411.16085),
    so that it never undoes what the gradient asks for.
    """
    update = update.to(master.dtype)
    if decay is not None:
        agree = (update * master > 0).to(master.dtype)
        master.sub_(lr * update + decay * agree * master)
    else:
        master.addcmul_(update, lr, value=-1)


def shape_scale(rows: int, cols: int) -> float:
    """An orthogonal update of a tall matrix changes each of its outputs less; √(rows/cols) compensates for it."""
    return max(1.0, rows / cols) ** 0.5


class MatrixExchange:
    """
    Brings the shards of all matrices of one shape to the one rank of the shard group that owns each matrix, and back. A
    rank may own no matrix, and keep a shard of none. On one rank nothing is sent.
    """

    def __init__(
        self, shape: tuple[int, int], ranges: dict[str, list[ShardRange]], owners: list[int], sharding: Sharding
    ):
        self.shape, self.group, self.ranks = shape, sharding.shard_group, sharding.shard_count
        self.nothing = torch.empty(0, dtype=sharding.dtype, device=sharding.device)
        rank, ranks = sharding.shard_rank, range(sharding.shard_count)
        owned = [[name for name, owner in zip(ranges, owners) if owner == r] for r in ranks]
        sizes = {name: r.end - r.start for name, parts in ranges.items() for r in parts if r.rank == rank}
        # Outgoing are this rank's shards, by owner; incoming are all shards of its own matrices, by the rank that keeps
        # them. Each rank gets them in the order of its list of matrices.
        self.kept = {name: sizes[name] for names in owned for name in names if name in sizes}  # elements
        self.outgoing = [sum(sizes.get(name, 0) for name in names) for names in owned]
        self.arriving = [
            (i, r) for source in ranks for i, name in enumerate(owned[rank]) for r in ranges[name] if r.rank == source
        ]
        self.incoming = [sum(r.end - r.start for _, r in self.arriving if r.rank == source) for source in ranks]
        self.owned = owned[rank]

    def send(self, updates: dict[str, Tensor]) -> None:
        """Start sending this rank's shards of the updates, flat, to the owners."""
        self.start([updates[name] for name in self.kept], self.outgoing, self.incoming)

    def receive(self) -> Tensor:
        """What `send` brought: a stack (n, rows, cols) of the matrices that this rank owns; n may be 0."""
        received = self.finish()
        if self.ranks == 1:
            return received.view(len(self.owned), *self.shape)
        stack = received.new_empty(len(self.owned), prod(self.shape))
        for (i, r), part in zip(self.arriving, received.split([r.end - r.start for _, r in self.arriving])):
            stack[i, r.start : r.end] = part
        return stack.view(len(self.owned), *self.shape)

    def send_back(self, stack: Tensor) -> None:
        """Start sending the shards of the owned matrices to the ranks that keep them."""
        flat = stack.reshape(len(self.owned), prod(self.shape))
        self.start([flat[i, r.start : r.end] for i, r in self.arriving], self.incoming, self.outgoing)

    def receive_back(self) -> dict[str, Tensor]:
        """What `send_back` brought: this rank's shards by name, flat."""
        return dict(zip(self.kept, self.finish().split(list(self.kept.values()))))

    def start(self, parts: list[Tensor], outgoing: list[int], incoming: list[int]) -> None:
        source = torch.cat([self.nothing, *parts])
        work, received = None, source
        if self.ranks > 1:
            received = source.new_empty(sum(incoming))
            work = dist.all_to_all_single(received, source, incoming, outgoing, self.group, async_op=True)
        self.started = work, received, source  # the source is referenced until it is sent

    def finish(self) -> Tensor:
        (work, received, _source), self.started = self.started, None
        if work is not None:
            work.wait()
        return received


class DistMuon:
    """
    Muon for matrices, on a rank's shards. Momentum is elementwise and stays in the shards. Once per step the shards of
    each matrix travel to one rank of the shard group (each has about the same work), are orthogonalized there in stacks
    of one shape and in the compute dtype, and travel back. NorMuon's second moments stay with that rank.
    """

    kind = "muon"

    def __init__(
        self, sharding: Sharding, names: list[str], lr: float, weight_decay: float = 0.0, momentum: float = 0.95,
        variant: Variant = "muon",
    ):
        shards = [shard for shard in sharding.shards if shard.name in names]
        self.param_groups = [{
            "shards": shards, "lr": lr, "initial_lr": lr,
            "weight_decay": weight_decay, "initial_weight_decay": weight_decay, "momentum": momentum,
        }]
        self.dtype, self.variant = sharding.dtype, variant
        self.state = {"momentum": {shard.name: torch.zeros_like(shard.master) for shard in shards}}
        self.counters: dict[str, Tensor] = {}
        self.exchanges: dict[tuple[int, int], MatrixExchange] = {}
        parameters = sharding.model.named_parameters()
        shapes = {name: tuple(p.shape) for name, p in parameters if name in names and name in sharding.ranges}
        loads = [0] * sharding.shard_count
        for shape in sorted(set(shapes.values()), key=lambda s: -work_of(s)):
            ranges = {name: sharding.ranges[name] for name in shapes if shapes[name] == shape}
            owners = []
            for _ in ranges:  # the dearest matrices first, each to the first rank that has the least work so far
                owners.append(loads.index(min(loads)))
                loads[owners[-1]] += work_of(shape)
            self.exchanges[shape] = MatrixExchange(shape, ranges, owners, sharding)
        self.seconds: dict[tuple[int, int], Tensor] = {}  # of each shape, a row for each matrix that this rank owns
        self.owned: dict[str, dict[str, Tensor]] = {}     # the same rows by name
        if variant == "normuon":
            owned = {shape: exchange.owned for shape, exchange in self.exchanges.items()}
            self.seconds = {s: torch.zeros(len(names), max(s), device=sharding.device) for s, names in owned.items()}
            self.owned = {"second_moment": {name: row for s in owned for name, row in zip(owned[s], self.seconds[s])}}

    @torch.no_grad()
    def step(self, stats: StepStats) -> None:
        """Apply the shards' gradients, unless the step is not ok: then nothing changes on any rank."""
        (group,) = self.param_groups
        shards = {shape: [s for s in group["shards"] if s.shape == shape] for shape in self.exchanges}
        # All shapes are sent before the first is waited for: one travels while another is worked on.
        for shape, exchange in self.exchanges.items():
            updates = {}
            for s in shards[shape]:
                update = nesterov_momentum(s.grad, self.state["momentum"][s.name], group["momentum"], stats.ok)
                updates[s.name] = update.to(self.dtype)
            exchange.send(updates)
        for shape, exchange in self.exchanges.items():
            exchange.send_back(direction(exchange.receive(), self.variant, self.seconds.get(shape), stats.ok))
        for shape, exchange in self.exchanges.items():
            updates = exchange.receive_back()
            lr = group["lr"] * shape_scale(*shape)
            decay = min(lr * group["weight_decay"], 1.0)  # chosen for a tiny horizon it could turn weights around
            for s in shards[shape]:
                muon_update(s.master, updates[s.name], lr * stats.ok, decay * stats.ok if decay else None)


def work_of(shape: tuple[int, int]) -> int:
    """Proportional to the FLOPs of orthogonalizing a matrix."""
    assert len(shape) == 2, f"Muon takes matrices, not {shape}"
    return shape[0] * shape[1] * min(shape)
