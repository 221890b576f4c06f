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
    """A few characters, and the type of the part of a message that they belong to."""
    type: Literal["text", "python", "python_output"]
    text: str


class IncrementalDetokenizer:
    """The tokens of an answer as text, token by token. A character spread over several tokens comes with the last."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.type = "text"
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
        """U+FFFD if the last character's other bytes never came."""
        return self._deltas(b"", final=True)

    def _deltas(self, data: bytes, final: bool = False) -> list[Delta]:
        text = self.utf8.decode(data, final)
        return [Delta(self.type, text)] if text else []


def to_parts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[dict[str, str]]:
    """The tokens of an answer as parts of a message: {"type": "text" | "python" | "python_output", "text": …}."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = []
    for token in tokens:
        deltas += detokenizer.add(token)
    return parts_of(deltas + detokenizer.end())


def answer_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of an answer that the user sees: without calls of the tool and their output."""
    return "".join(part["text"] for part in to_parts(tokenizer, tokens) if part["type"] == "text")


def parts_of(deltas: Iterable[Delta]) -> list[dict[str, str]]:
    """Deltas as parts of a message: neighbours of one type become one part."""
    groups = groupby(deltas, key=lambda delta: delta.type)
    return [{"type": type, "text": "".join(delta.text for delta in group)} for type, group in groups]


class StopStrings:
    """
    Ends an answer before the first of some strings in its text, however the tokens cut it. Text that may be the
    beginning of a string is held back until that is known. Only "text" is searched, as if nothing stood between.
    """

    def __init__(self, strings: Sequence[str]):
        assert all(strings), "an empty string would end every answer at once"
        self.strings = strings
        self.held: list[Delta] = []     # a character each
        self.found = False

    def add(self, delta: Delta) -> list[Delta]:
        """What may be shown now. When a string is complete, `found` becomes true, and nothing more will follow."""
        if not self.strings:
            return [delta]
        shown = []
        for character in delta.text:
            if self.found:
                break
            self.held.append(Delta(delta.type, character))
            text = "".join(held.text for held in self.held if held.type == "text")
            complete = [len(string) for string in self.strings if text.endswith(string)]
            self.found = bool(complete)
            if not complete:  # how much of the text's end is the beginning of a string
                ends = range(len(text) + 1)
                complete = [n for n in ends if any(string.startswith(text[len(text) - n :]) for string in self.strings)]
            shown += self._release(len(text) - max(complete))
        return shown

    def end(self) -> list[Delta]:
        """The answer ends without another token: what was held back, unless a string was found."""
        return [] if self.found else self.held

    def _release(self, count: int) -> list[Delta]:
        """The first `count` characters of the held text, and everything else up to there."""
        places = [i for i, delta in enumerate(self.held) if delta.type == "text"] + [len(self.held)]
        released = self.held[: places[count]]
        del self.held[: places[count]]
        return released
