"""Log-probabilities in an answer: they leave together with the text of their tokens, in OpenAI's two shapes."""
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.logprobs import TokenLogprob


class PlacedLogprob(NamedTuple):
    """The log-probability of a token of a choice's text."""
    logprob: TokenLogprob
    is_content: bool    # of a message: neither a special token nor one of the calculator's
    offset: int         # characters of the text before it


class HeldLogprobs:
    """The log-probabilities of tokens whose text was not shown yet, since it may be the beginning of a stop string."""

    def __init__(self):
        self.held: deque[PlacedLogprob] = deque()
        self.written = self.shown = 0   # characters

    def add(self, logprob: TokenLogprob, is_content: bool) -> None:
        """Of the next token; call it before its characters are counted in `written`."""
        self.held.append(PlacedLogprob(logprob, is_content, self.written))

    def release(self, everything: bool = False) -> list[PlacedLogprob]:
        """Those of tokens of which a character has been shown."""
        released = []
        while self.held and (everything or self.held[0].offset < self.shown):
            released.append(self.held.popleft())
        return released


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself, as OpenAI writes it: of different tokens never the same, whether or not it is whole UTF-8."""
    data = tokenizer.decode_bytes([token])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, placed: Sequence[PlacedLogprob]) -> dict[str, Any]:
    """Of the tokens of a message's content: their bytes, put end to end, are its text."""
    def described(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": token_text(tokenizer, token), "logprob": logprob, "bytes": [*tokenizer.decode_bytes([token])]}

    content = [described(token, value) | {"top_logprobs": [described(*one) for one in top]}
               for (token, value, top), is_content, _ in placed if is_content]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, placed: Sequence[PlacedLogprob]) -> dict[str, Any]:
    """Of all tokens. A token's top_logprobs have the token itself, too, and are null where nothing predicts it."""
    def named(logprob: TokenLogprob) -> dict[str, float] | None:
        pairs = [*logprob.top, logprob[:2]]
        return None if logprob.logprob is None else {token_text(tokenizer, token): value for token, value in pairs}

    return {
        "tokens": [token_text(tokenizer, one.logprob.token) for one in placed],
        "token_logprobs": [one.logprob.logprob for one in placed],
        "top_logprobs": [named(one.logprob) for one in placed],
        "text_offset": [one.offset for one in placed],
    }
