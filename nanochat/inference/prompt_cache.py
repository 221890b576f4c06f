"""
Keys and values of tokens that were read before, so that the next turn of a conversation, or another question after the
same system prompt, does not read them again.

They are kept in pieces of PIECE tokens. A piece's key is its owner and *all* tokens up to its end: two prompts that
begin alike share the pieces of their common beginning. Owners do not share: usage and time reveal a hit, which would
tell one client what another asked.
"""
from collections.abc import Callable

from torch import Tensor

from nanochat.inference.kv_cache import Prefix, begins_after

# Prompt tokens that are read at once. Every prompt is cut at multiples of PIECE, so a piece kept from one prompt
# equals, to the bit, the same piece read in another prompt.
PIECE = 128
# Of a chat or a server: the earlier turns of a conversation are read only once.
PROMPT_CACHE_BYTES = 2**29


class PromptCache:
    """Pieces of at most `limit` bytes in all; the least recently used goes first. document_token: the model's."""

    def __init__(self, limit: int, document_token: int):
        self.limit = limit
        self.document_token = document_token
        self.size = 0   # bytes
        self.pieces: dict[tuple, Tensor] = {}   # by (owner, *tokens); the least recently used first

    def look_up(self, prefix: Prefix, prompt: list[int], owner: str) -> Prefix:
        """The prefix with this prompt's next pieces, if cached. The last token is always read, for its logits."""
        end = prefix.length + PIECE
        while end < len(prompt):
            piece = self.pieces.get((owner, *prompt[:end]))
            if piece is None:
                break
            begins = begins_after(prefix, prompt[prefix.length : end], self.document_token)
            prefix = Prefix((*prefix.pieces, piece), end, prompt[end - 1], begins[-1])
            end += PIECE
        return prefix

    def keep(self, tokens: list[int], owner: str, piece: Callable[[int, int], Tensor]) -> None:
        """Mark these tokens' pieces as just used; piece(start, end) gives keys and values not yet cached."""
        if not self.limit:
            return
        # From the end: a piece is useless without the pieces before it, so those must stay longer.
        for start in reversed(range(0, len(tokens) + 1 - PIECE, PIECE)):
            end = start + PIECE
            key = owner, *tokens[:end]
            kept = self.pieces.pop(key, None)
            if kept is None:
                kept = piece(start, end)
                self.size += kept.nbytes
            # A dict keeps its order: the most recently used piece is last.
            self.pieces[key] = kept
        while self.size > self.limit:
            oldest = next(iter(self.pieces))
            self.size -= self.pieces.pop(oldest).nbytes
