"""
Keys and values of tokens that were read before, so that the next turn of a conversation, or another question after the
same system prompt, does not read them again.

They are kept in pieces of PIECE tokens, each under its owner and *all* tokens up to its end: two prompts that begin
alike share the pieces of their common beginning. Owners do not share. A hit is seen in the usage and in the time, so it
would tell one client what another has asked.
"""
from collections import Counter
from collections.abc import Callable

from torch import Tensor

from nanochat.inference.kv_cache import Prefix
from nanochat.runtime.errors import is_out_of_memory

# Tokens of a prompt that are read at once. Every prompt is cut at the multiples of it, so a piece that was kept of one
# prompt is, to the bit, what reading it in another prompt would give.
PIECE = 128


class PromptCache:
    """
    Pieces of at most `limit` bytes together. The least recently used goes first; an owner that has more than half of
    the limit makes room with its own.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.sizes: Counter[str] = Counter()    # bytes by owner
        self.pieces: dict[tuple, Tensor] = {}   # by (owner, *tokens); the least recently used first

    def look_up(self, prefix: Prefix, prompt: list[int], owner: str) -> Prefix:
        """The prefix with this prompt's next pieces, if they are here. The last token is always read, for logits."""
        end = prefix.length + PIECE
        while end < len(prompt) and (owner, *prompt[:end]) in self.pieces:
            piece = self.pieces[owner, *prompt[:end]]
            prefix = Prefix((*prefix.pieces, piece), end, prompt[end - 1])
            end += PIECE
        return prefix

    def keep(self, tokens: list[int], owner: str, piece: Callable[[int, int], Tensor]) -> None:
        """These tokens were read or used now; piece(start, end) gives their keys and values, if they are not here."""
        if not self.limit:
            return
        # From the end: a piece is of no use without those before it, so these must stay longer.
        for start in reversed(range(0, len(tokens) + 1 - PIECE, PIECE)):
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
