"""The text of an answer: delta by delta while its tokens are written, and as the parts of a message."""
import codecs
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from nanochat.data.conversation import text_of
from nanochat.data.tokenizer import SPECIAL_TOKENS, Tokenizer

# Special tokens after which the text belongs to a part of this type.
PartType = Literal["text", "python", "python_output"]
STARTS: dict[str, PartType] = {"<|python_start|>": "python", "<|python_end|>": "text",
          "<|output_start|>": "python_output", "<|output_end|>": "text"}


class Delta(NamedTuple):
    """A few characters, and the type of the part of a message that they belong to."""
    type: PartType
    text: str


class IncrementalDetokenizer:
    """The tokens of an answer as text, token by token. A character spread over several tokens comes with the last."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.type: PartType = "text"
        self.specials = {tokenizer.encode_special(name): STARTS.get(name) for name in SPECIAL_TOKENS}
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> list[Delta]:
        """The text that this token completes. Special tokens have none; some change the type of the text after them."""
        if token not in self.specials:
            return self._deltas(self.tokenizer.decode_bytes([token]))
        rest = self.end()
        self.type = self.specials[token] or self.type
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
    """The text of an answer that the user sees: no tool calls and no tool output."""
    return text_of(to_parts(tokenizer, tokens))


def parts_of(deltas: Iterable[Delta]) -> list[dict[str, str]]:
    """Deltas as parts of a message: consecutive deltas of one type become one part."""
    groups = groupby(deltas, key=lambda delta: delta.type)
    return [{"type": type, "text": "".join(delta.text for delta in group)} for type, group in groups]


class StopStrings:
    """
    Ends an answer before the first of some strings in its text, wherever the token boundaries are. Text that may begin
    such a string is held back until this is decided. No string spans a tool call.
    """

    def __init__(self, strings: Sequence[str]):
        self.strings = strings
        self.held = ""
        self.found = False

    def add(self, delta: Delta) -> list[Delta]:
        """What may be shown now. When a string is complete, `found` becomes true, and nothing more follows."""
        if self.found:
            return []
        if delta.type != "text" or not self.strings:
            return [*self.end(), delta]
        text = self.held + delta.text
        # The string that ends first counts; among strings ending there, the longest.
        spans = [(text.index(string) + len(string), -len(string)) for string in self.strings if string in text]
        if spans:
            self.found = True
            shown = sum(min(spans))
        else:
            # Hold back the longest end of the text that begins a string.
            shown = 0
            while not any(string.startswith(text[shown:]) for string in self.strings):
                shown += 1
        self.held = text[shown:]
        return [Delta("text", text[:shown])] if shown else []

    def end(self) -> list[Delta]:
        """At the end of the text: what was held back, unless a string was found."""
        held = self.held
        self.held = ""
        return [Delta("text", held)] if held and not self.found else []
