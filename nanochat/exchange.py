"""
Pieces of matrices travel to the one rank that works on each matrix as a whole, and back. What Muon needs: momentum is
elementwise and lives in slices like all other state, but a matrix can be orthogonalised only as a whole.
"""
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.ownership import Piece


class MatrixExchange:
    """
    For matrices of one shape. pieces: who keeps what of each; owners: the rank of the shard group that works on each.
    Any number of matrices and ranks: a rank may own none, and keep a piece of none. One rank sends nothing.
    """

    def __init__(
        self, shape: tuple[int, int], pieces: dict[str, list[Piece]], owners: list[int], rank: int, ranks: int,
        group: dist.ProcessGroup | None, dtype: torch.dtype, device: torch.device,
    ):
        self.shape, self.ranks, self.group, self.dtype, self.device = shape, ranks, group, dtype, device
        kept = {name: piece for name, parts in pieces.items() for piece in parts if piece.rank == rank}
        owned = {o: [name for name, owner in zip(pieces, owners) if owner == o] for o in range(ranks)}
        # To each owner, in its order of matrices, and from each rank, in mine.
        self.order = [name for owner in range(ranks) for name in owned[owner] if name in kept]
        self.sizes = {name: piece.end - piece.start for name, piece in kept.items()}
        self.outgoing = [sum(self.sizes.get(name, 0) for name in owned[owner]) for owner in range(ranks)]
        self.arriving = [
            (i, piece) for source in range(ranks)
            for i, name in enumerate(owned[rank]) for piece in pieces[name] if piece.rank == source
        ]
        self.incoming = [sum(piece.end - piece.start for _, piece in self.arriving if piece.rank == source) for source in range(ranks)]
        self.owned = len(owned[rank])

    def send(self, updates: dict[str, Tensor]) -> tuple:
        """Start sending the flat pieces this rank keeps, by name, to the owners."""
        return self.start([updates[name] for name in self.order], self.outgoing, self.incoming)

    def matrices(self, sent: tuple) -> Tensor:
        """What `send` brought here: a stack (n, rows, cols) of the matrices this rank owns; n may be 0."""
        received = self.finish(sent)
        if self.ranks > 1:
            stack, at = torch.empty(self.owned, prod(self.shape), dtype=self.dtype, device=self.device), 0
            for i, piece in self.arriving:
                stack[i, piece.start : piece.end] = received[at : at + piece.end - piece.start]
                at += piece.end - piece.start
            received = stack
        return received.view(self.owned, *self.shape)

    def send_back(self, stack: Tensor) -> tuple:
        """Start sending the pieces of the owned matrices to the ranks that keep them."""
        flat = stack.reshape(self.owned, prod(self.shape))
        return self.start([flat[i, piece.start : piece.end] for i, piece in self.arriving], self.incoming, self.outgoing)

    def pieces(self, sent_back: tuple) -> dict[str, Tensor]:
        """What `send_back` brought here, by name."""
        return dict(zip(self.order, self.finish(sent_back).split([self.sizes[name] for name in self.order])))

    def start(self, parts: list[Tensor], outgoing: list[int], incoming: list[int]) -> tuple:
        buffer = torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype, device=self.device)
        if self.ranks == 1:
            return None, buffer, buffer
        received = torch.empty(sum(incoming), dtype=self.dtype, device=self.device)
        return dist.all_to_all_single(received, buffer, incoming, outgoing, self.group, async_op=True), received, buffer

    def finish(self, started: tuple) -> Tensor:
        work, received, _buffer = started  # the buffer is referenced until here
        if work is not None:
            work.wait()
        return received
