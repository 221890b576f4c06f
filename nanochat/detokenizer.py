"""Tokens of an answer as text, piece by piece, and as the parts of a message."""
import codecs
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

from nanochat.tokenizer import Tokenizer


class Piece(NamedTuple):
    """A bit of text, and which kind of part of a message it belongs to."""
    type: Literal["text", "python", "python_output"]
    text: str


class Pieces:
    """Turns the tokens of an answer into text, one at a time. A character spread over tokens comes out whole, with the last."""

    STARTS = {"<|python_start|>": "python", "<|python_end|>": "text", "<|output_start|>": "python_output", "<|output_end|>": "text"}

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.type = tokenizer, "text"
        self.names = {tokenizer.encode_special(name): name for name in tokenizer.special_tokens}
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> list[Piece]:
        """The text that this token completes. Special tokens are no text; those of the tool change the type of what follows."""
        if token not in self.names:
            return self._piece(self.utf8.decode(self.tokenizer.decode_bytes([token])))
        rest = self.end()
        self.type = self.STARTS.get(self.names[token], self.type)
        return rest

    def end(self) -> list[Piece]:
        """What is left of a character that never became whole: U+FFFD."""
        return self._piece(self.utf8.decode(b"", final=True))

    def _piece(self, text: str) -> list[Piece]:
        return [Piece(self.type, text)] if text else []


def to_parts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[dict[str, str]]:
    """The tokens of an answer as the parts of a message: {"type": "text" | "python" | "python_output", "text": …}."""
    pieces = Pieces(tokenizer)
    return parts_of([piece for token in tokens for piece in pieces.add(token)] + pieces.end())


def parts_of(pieces: Sequence[Piece]) -> list[dict[str, str]]:
    """The same of pieces: neighbours of one type become one part."""
    parts: list[dict[str, str]] = []
    for piece in pieces:
        if parts and parts[-1]["type"] == piece.type:
            parts[-1]["text"] += piece.text
        else:
            parts.append({"type": piece.type, "text": piece.text})
    return parts


class StopStrings:
    """
    Ends an answer where its text first contains one of some strings, however tokens cut it. The string is not let
    through, and text that may be the beginning of one waits until it is known. Only "text" is looked at, as if what
    stands between were not there.
    """

    def __init__(self, strings: Sequence[str]):
        assert all(strings), "an empty string would end every answer at once"
        self.strings = tuple(strings)
        self.held: list[Piece] = []
        self.found = False

    def add(self, piece: Piece) -> list[Piece]:
        """What may be shown now. When one of the strings is complete, `found` is true and nothing will follow."""
        if not self.strings or (piece.type != "text" and not self.held):
            return [piece]
        self.held.append(piece)
        if piece.type != "text":
            return []
        text = "".join(piece.text for piece in self.held if piece.type == "text")
        matches = [(at + len(string), at) for string in self.strings if (at := text.find(string)) >= 0]
        if matches:
            self.found = True
            return self._release(min(matches)[1])  # the one that is complete first, as if characters came one by one
        return self._release(len(text) - max(map(partial(overlap, text), self.strings)))

    def end(self) -> list[Piece]:
        """What has waited for an end that never came."""
        held, self.held = self.held, []
        return held

    def _release(self, count: int) -> list[Piece]:
        """The first `count` characters of held text, and what is not text up to there."""
        released = []
        while self.held and (count > 0 or self.held[0].type != "text"):
            piece = self.held.pop(0)
            if piece.type == "text" and len(piece.text) > count:
                self.held.insert(0, Piece("text", piece.text[count:]))
                piece = Piece("text", piece.text[:count])
            count -= len(piece.text) if piece.type == "text" else 0
            released.append(piece)
        return released


def overlap(text: str, string: str) -> int:
    """How many characters at the end of the text are the beginning, but not the whole, of the string."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
