"""The text of an answer: delta by delta while its tokens are written, and as the parts of a message."""
import codecs
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from nanochat.data.tokenizer import Tokenizer

# Special tokens after which the text belongs to a part of this type.
STARTS = {"<|python_start|>": "python", "<|python_end|>": "text",
          "<|output_start|>": "python_output", "<|output_end|>": "text"}


class Delta(NamedTuple):
    """A bit of text, and the type of the part of a message that it belongs to."""
    type: Literal["text", "python", "python_output"]
    text: str


class IncrementalDetokenizer:
    """The tokens of an answer as text, token by token. A character spread over several tokens comes with the last."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.type = tokenizer, "text"
        self.starts = {tokenizer.encode_special(name): STARTS.get(name) for name in tokenizer.special_tokens}
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> list[Delta]:
        """The text that this token completes. Special tokens have none; some change the type of what follows."""
        if token not in self.starts:
            return self._deltas(self.tokenizer.decode_bytes([token]))
        rest = self.end()
        self.type = self.starts[token] or self.type
        return rest

    def end(self) -> list[Delta]:
        """What is left of a character whose other bytes never came: U+FFFD."""
        return self._deltas(b"", final=True)

    def _deltas(self, data: bytes, final: bool = False) -> list[Delta]:
        text = self.utf8.decode(data, final)
        return [Delta(self.type, text)] if text else []


def to_parts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[dict[str, str]]:
    """The tokens of an answer as parts of a message: {"type": "text" | "python" | "python_output", "text": …}."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    return parts_of([delta for token in tokens for delta in detokenizer.add(token)] + detokenizer.end())


def parts_of(deltas: Iterable[Delta]) -> list[dict[str, str]]:
    """Deltas as parts of a message: neighbours of one type become one part."""
    groups = groupby(deltas, key=lambda delta: delta.type)
    return [{"type": type, "text": "".join(delta.text for delta in group)} for type, group in groups]


class StopStrings:
    """
    Ends an answer before the first of some strings in its text, however the tokens cut it. Text that may be the
    beginning of a string waits until that is known. Only "text" is searched, as if nothing stood between.
    """

    def __init__(self, strings: Sequence[str]):
        assert all(strings), "an empty string would end every answer at once"
        self.strings = tuple(strings)
        self.held: list[Delta] = []     # a character each
        self.found = False

    def add(self, delta: Delta) -> list[Delta]:
        """What may be shown now. When a string is complete, `found` becomes true, and nothing more will follow."""
        if self.found or not self.strings:
            return [] if self.found else [delta]
        self.held += [Delta(delta.type, character) for character in delta.text]
        text = "".join(delta.text for delta in self.held if delta.type == "text")
        matches = [(at + len(string), at) for string in self.strings if (at := text.find(string)) >= 0]
        if matches:
            self.found = True
            return self._release(min(matches)[1])  # complete first, as if characters came one by one
        beginnings = (string[:n] for string in self.strings for n in range(min(len(string), len(text) + 1)))
        return self._release(len(text) - max((len(start) for start in beginnings if text.endswith(start)), default=0))

    def end(self) -> list[Delta]:
        """The answer ends without another token: what has waited, unless a string was found."""
        return [] if self.found else self.held

    def _release(self, count: int) -> list[Delta]:
        """The first `count` characters of the held text, and what is not text up to there."""
        places = [i for i, delta in enumerate(self.held) if delta.type == "text"] + [len(self.held)]
        released, self.held = self.held[: places[count]], self.held[places[count] :]
        return released
