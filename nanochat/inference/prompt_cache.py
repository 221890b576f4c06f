"""
Keys and values of what was read before, so that the next turn of a conversation, or another question after the same
beginning, does not read it again.

They are kept in pieces, each under its owner and all tokens up to its end: equal beginnings are kept once. No owner
finds another's: what is found shows in the usage and by the time that it saves, and would tell what the other one has
asked.
"""
from collections import Counter
from collections.abc import Callable

from torch import Tensor

from nanochat.inference.kv_cache import CachedModel, Prefix
from nanochat.runtime.errors import is_out_of_memory

# Tokens of a prompt that are read at once. Every prompt is cut at the multiples of it: so a piece that was kept of one
# prompt is, to the bit, what reading it in another would give.
PIECE = 128


class PromptCache:
    """
    Pieces of at most `limit` bytes together. The ones that were not used for longest go first; an owner that has more
    than half of the limit makes room with its own.
    """

    def __init__(self, model: CachedModel, limit: int):
        self.model, self.limit = model, limit
        self.sizes: Counter[str] = Counter()    # bytes by owner
        self.pieces: dict[tuple, Tensor] = {}   # by (owner, *tokens); the next one to go comes first

    def look_up(self, prefix: Prefix, prompt: list[int], owner: str) -> Prefix:
        """The prefix of this prompt with the pieces that are here. The last token is never: its logits are wanted."""
        while (end := prefix.length + PIECE) < len(prompt) and (owner, *prompt[:end]) in self.pieces:
            piece = self.pieces[owner, *prompt[:end]]
            prefix = Prefix((*prefix.pieces, piece), end, prompt[end - 1], prefix.cached + PIECE)
        return prefix

    def read(self, prefix: Prefix, prompt: list[int], owner: str, every: bool) -> Prefix:
        """The prefix of this prompt with the next piece, which the model reads. every: as in `extend`."""
        prefix = self.model.extend(prefix, prompt[prefix.length : prefix.length + PIECE], every)
        self.keep(prompt[: prefix.length], owner, lambda start, end: prefix.pieces[start // PIECE])
        return prefix

    def keep(self, tokens: list[int], owner: str, piece: Callable[[int, int], Tensor]) -> None:
        """These tokens were read or used now; piece(start, end) → their keys and values, if they are not here."""
        # From the end: a piece is of no use without those before it, which so stay longer.
        for start in reversed(range(0, len(tokens) + 1 - PIECE, PIECE)) if self.limit else ():
            key = owner, *tokens[: start + PIECE]
            kept = self.pieces.pop(key, None)
            if kept is None:
                try:
                    kept = piece(start, start + PIECE)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    self.pieces, self.sizes = {}, Counter()  # answers need the memory more
                    return
                self.sizes[owner] += kept.nbytes
            self.pieces[key] = kept
        while self.sizes.total() > self.limit:
            only_own = self.sizes[owner] > self.limit / 2
            oldest = next(key for key in self.pieces if key[0] == owner or not only_own)
            self.sizes[oldest[0]] -= self.pieces.pop(oldest).nbytes
            self.sizes += Counter()     # owners without pieces are forgotten
