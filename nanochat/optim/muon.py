"""
Muon: orthogonalized momentum. Update rules are pure functions of tensors; DistMuon applies them to a rank's shards.

Jordan et al. 2024, kellerjordan.github.io/posts/muon. Every matrix moves by a matrix whose singular values are all near
one, so that directions with small gradients are learned, too.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nanochat.optim.sharding import Sharding, ShardOptimizer, StepStats

# Odd quintic polynomials, one per step, each the best for the interval of singular values left by the previous step.
# Amsel et al. 2025 ("Polar Express"), arXiv:2505.16932, for five steps; docs/decisions.md has the comparison with
# the fixed (3.4445, −4.7750, 2.0315) of the original Muon.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# nanochat's value; the paper of NorMuon has 0.95.
SECOND_MOMENT_BETA = 0.9
# Lower bound of lengths and their squares, so that nothing is divided by zero.
SMALLEST = 1e-20


def orthogonalize(G: Tensor) -> Tensor:
    """
    The nearest semi-orthogonal matrices to a stack of matrices, by five steps of Newton–Schulz iteration.

    G: (..., rows, cols), any float dtype; the iteration runs in G's dtype. Returns the same shape; singular values of
    at least 1/1000 of the Frobenius norm end within [0.7, 1.2], zero matrices stay zero.
    """
    X = G.reshape(-1, *G.shape[-2:])  # (n, rows, cols)
    is_tall = X.size(-2) > X.size(-1)
    if is_tall:  # the Gram matrix is taken on the shorter side
        X = X.mT
    # 2% above the Frobenius norm: rounding must not leave a singular value above one, where the iteration diverges.
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # bA + cA²
        X = torch.baddbmm(X, B, X, beta=a)           # aX + BX
    if is_tall:
        X = X.mT
    return X.reshape(G.shape)


def normuon(update: Tensor, second_moment: Tensor, ok: Tensor) -> Tensor:
    """
    NorMuon (Li et al. 2025, arXiv:2510.05491): the rows of a stack (n, rows, cols), or the columns of wide matrices,
    are divided by the root of their second moment. Every matrix gets the Frobenius norm of a semi-orthogonal one, which
    is the root of its shorter side: five polynomials leave small singular values below one, and matrices with many of
    them would move less.

    second_moment: the moving average of the squared lengths, (n, longer side) float32, updated in place unless ok is 0.
    A common factor has no effect, so an average that began at zero needs no bias correction.
    """
    # Once orthogonalized, the rows of a wide matrix already have equal lengths, like the columns of a tall one.
    dim = -1 if update.size(-2) >= update.size(-1) else -2
    # On a CPU vector_norm would take eight times as long over columns.
    squares = update.square().sum(dim, dtype=torch.float32)
    average = second_moment.lerp_(squares, (1 - SECOND_MOMENT_BETA) * ok)
    factors = average.clamp(min=SMALLEST).rsqrt()
    norm = (squares * factors.square()).sum(-1, keepdim=True)  # squared
    factors = factors * (min(update.shape[-2:]) / norm.clamp(min=SMALLEST)).sqrt()
    return (update * factors.unsqueeze(dim)).to(update.dtype)


def nesterov_momentum(
    grad: Tensor,
    buffer: Tensor,
    momentum: float,
    ok: Tensor,
) -> Tensor:
    """Moves the buffer towards the gradient in place, unless ok is 0; returns the gradient moved towards the buffer."""
    buffer.lerp_(grad, (1 - momentum) * ok)
    return torch.lerp(grad, buffer, momentum)


def muon_update(
    master: Tensor,
    update: Tensor,
    lr: Tensor,
    decay: Tensor | None,
) -> None:
    """
    One step in place on any range of elements; with lr and decay 0 nothing changes. decay: lr · weight decay, or None.
    It acts only where it agrees in sign with the update ("cautious" weight decay, Liang et al. 2024, arXiv:2411.16085),
    so it never opposes the gradient.
    """
    update = update.to(master.dtype)
    if decay is not None:
        agree = (update * master > 0).to(master.dtype)
        master.sub_(lr * update + decay * agree * master)
    else:
        master.addcmul_(update, lr, value=-1)


# ---- update: gradient and momentum, mixed, travel to a matrix's owner; orthogonalized they travel back

class MatrixExchange:
    """
    The matrices of one shape: brings their shards to the rank of the shard group that owns the matrix, and back. A rank
    may own no matrix, and keep no shard. One rank sends nothing. The owner keeps NorMuon's second moments.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        owners: dict[str, int],
        sharding: Sharding,
    ):
        """owners: the matrices' names, and which rank of the shard group owns each."""
        self.shape = shape
        self.groups = sharding.groups
        self.ranks = sharding.shard_count
        self.nothing = torch.empty(0, dtype=sharding.dtype, device=sharding.device)
        rank = sharding.shard_rank

        # Every rank lists all pieces in the same order, by their matrix's owner, so messages need no names.
        pieces = [(name, r) for name in sorted(owners, key=owners.get) for r in sharding.ranges[name]]
        kept = {s.name: s for s in sharding.shards}
        self.shards = [kept[name] for name, r in pieces if r.rank == rank]  # this rank's, in order of sending
        self.owned = [name for name in owners if owners[name] == rank]
        self.second_moment = torch.zeros(len(self.owned), max(shape), device=sharding.device)  # (n, longer side)
        # Pieces of the owned matrices, matrix by matrix, and in order of arrival.
        self.pieces_owned = [piece for piece in pieces if owners[piece[0]] == rank]
        self.arriving = sorted(self.pieces_owned, key=lambda piece: piece[1].rank)
        # Elements to each owner, and from each rank.
        self.outgoing = [0] * self.ranks
        self.incoming = [0] * self.ranks
        for s in self.shards:
            self.outgoing[owners[s.name]] += len(s.master)
        for _, r in self.arriving:
            self.incoming[r.rank] += r.size

    def send(self, updates: list[Tensor]) -> None:
        """Start sending the updates of this rank's `shards`, flat, to the owners."""
        self.start(updates, self.outgoing, self.incoming)

    def receive(self) -> Tensor:
        """Wait for `send`: a stack (n, rows, cols) of the matrices that this rank owns; n may be 0."""
        received = self.finish()
        if self.ranks > 1:
            parts = dict(zip(self.arriving, received.split([r.size for _, r in self.arriving])))
            received = torch.cat([received[:0], *(parts[piece] for piece in self.pieces_owned)])
        return received.view(len(self.owned), *self.shape)

    def send_back(self, stack: Tensor) -> None:
        """Start sending the shards of the owned matrices to the ranks that keep them."""
        flat = dict(zip(self.owned, stack.flatten(1)))
        self.start([flat[name][r.start : r.end] for name, r in self.arriving], self.incoming, self.outgoing)

    def receive_back(self) -> tuple[Tensor, ...]:
        """Wait for `send_back`: an update for each of this rank's `shards`, flat."""
        return self.finish().split([len(s.master) for s in self.shards])

    def start(
        self,
        parts: list[Tensor],
        outgoing: list[int],
        incoming: list[int],
    ) -> None:
        self.source = torch.cat([self.nothing, *parts])  # referenced until it is sent
        self.received = self.source
        self.work = None
        if self.ranks > 1:
            self.received = self.source.new_empty(sum(incoming))
            self.work = dist.all_to_all_single(
                self.received, self.source, incoming, outgoing, self.groups["shard"], async_op=True)

    def finish(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        received = self.received
        self.source = self.received = self.work = None  # free the memory
        return received


class DistMuon(ShardOptimizer):
    """
    Muon for matrices, on a rank's shards. Momentum is elementwise and stays in the shards. Once per step the shards of
    each matrix travel to one rank of the shard group (the work is balanced), are orthogonalized there in stacks of one
    shape and in the compute dtype, and travel back. NorMuon's second moments stay with that rank.
    """

    kind = "muon"

    def __init__(
        self,
        sharding: Sharding,
        names: list[str],
        lr: float,
        weight_decay: float = 0.0,
    ):
        shards = [shard for shard in sharding.shards if shard.name in names]
        group = {"shards": shards, "lr": lr, "weight_decay": weight_decay, "initial_weight_decay": weight_decay,
                 "momentum": 0.95}
        super().__init__([group], "momentum")
        self.dtype = sharding.dtype
        self.exchanges: list[MatrixExchange] = []
        self.owned["second_moment"] = {}  # of all exchanges

        names_of_shape: dict[tuple[int, int], list[str]] = {}
        for name, p in sharding.model.named_parameters():
            if name in names:
                names_of_shape.setdefault(tuple(p.shape), []).append(name)
        loads = [0] * sharding.shard_count
        for shape in sorted(names_of_shape, key=work_of, reverse=True):
            owners: dict[str, int] = {}
            # The largest matrix first, each to the least loaded rank.
            for name in names_of_shape[shape]:
                owners[name] = loads.index(min(loads))
                loads[owners[name]] += work_of(shape)
            exchange = MatrixExchange(shape, owners, sharding)
            self.exchanges.append(exchange)
            self.owned["second_moment"].update(zip(exchange.owned, exchange.second_moment))

    @torch.no_grad()
    def step(self, stats: StepStats) -> None:
        """Apply the shards' gradients, unless the step is not ok: then nothing changes on any rank."""
        (group,) = self.param_groups
        # All shapes are sent before any is awaited: one travels while another is computed.
        for exchange in self.exchanges:
            updates = []
            for s in exchange.shards:
                update = nesterov_momentum(s.grad, self.state["momentum"][s.name], group["momentum"], stats.ok)
                updates.append(update.to(self.dtype))
            exchange.send(updates)
        for exchange in self.exchanges:
            # MuonEq (Chang et al. 2026, arXiv:2603.28254): rows get equal lengths, so that small ones count, too.
            matrices = F.normalize(exchange.receive(), dim=-1, eps=SMALLEST)  # (owned ones, rows, cols)
            update = orthogonalize(matrices)
            exchange.send_back(normuon(update, exchange.second_moment, stats.ok))
        for exchange in self.exchanges:
            rows, cols = exchange.shape
            # An orthogonal update of a tall matrix changes each of its outputs less; √(rows/cols) compensates for it.
            lr = group["lr"] * max(1.0, rows / cols) ** 0.5
            # A decay that was chosen for a tiny horizon could flip weights' signs.
            decay = min(lr * group["weight_decay"], 1.0)
            for s, update in zip(exchange.shards, exchange.receive_back()):
                muon_update(s.master, update, lr * stats.ok, decay * stats.ok if decay else None)


def work_of(shape: tuple[int, int]) -> int:
    """Proportional to the FLOPs of orthogonalizing a matrix."""
    rows, cols = shape
    return rows * cols * min(shape)
