"""Answers in OpenAI's interface: from the chunks of an engine to JSON or server-sent events."""
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from nanochat.data.conversation import text_of
from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.detokenizer import Delta, IncrementalDetokenizer, StopStrings, parts_of
from nanochat.inference.logprobs import TokenLogprob
from nanochat.serve.openai_requests import BaseRequest
from nanochat.serve.protocol import ApiError, Chunk, Chunks, Json, Request
from nanochat.serve.served_model import ServedModel


class PlacedLogprob(NamedTuple):
    """The log-probability of a token, and the token's place in the text of a choice."""
    logprob: TokenLogprob
    is_content: bool    # part of a message's content: neither a special token nor part of a tool call
    offset: int         # characters of text before the token


class Choice:
    """One continuation of a prompt: from an engine's tokens to text that may be shown."""

    def __init__(self, index: int, tokenizer: Tokenizer, stop: Sequence[str]):
        self.index = index
        self.detokenizer, self.stop = IncrementalDetokenizer(tokenizer), StopStrings(stop)
        self.tokens = 0
        self.written = 0                            # characters
        self.parts: list[Json] = []
        self.logprobs: list[PlacedLogprob] = []
        self.held: list[PlacedLogprob] = []         # of tokens whose text has not been shown
        self.begun = False                          # an event has given the message's role
        self.finish_reason: str | None = None

    def add(self, chunk: Chunk) -> tuple[list[Delta], list[PlacedLogprob]]:
        """Take in an engine's tokens. Returns what may be shown now; a log-probability comes with its token's text."""
        deltas: list[Delta] = []
        for number, token in enumerate(chunk.tokens):
            if self.stop.found:
                break
            new = self.detokenizer.add(token)
            is_content = self.detokenizer.type == "text" and token not in self.detokenizer.specials
            if chunk.logprobs:
                self.held.append(PlacedLogprob(chunk.logprobs[number], is_content, self.written))
            self.written += sum(len(delta.text) for delta in new)
            self.tokens += 1
            deltas += self.searched(new)
        shown: float = self.written - len(self.stop.held)
        if chunk.finish_reason:
            deltas += self.searched(self.detokenizer.end()) + self.stop.end()
        self.finish_reason = "stop" if self.stop.found else chunk.finish_reason
        # The last tokens may have no text; but what a stop string cuts off stays hidden.
        if chunk.finish_reason and not self.stop.found:
            shown = math.inf
        count = sum(one.offset < shown for one in self.held)
        logprobs, self.held = self.held[:count], self.held[count:]
        self.logprobs += logprobs
        return deltas, logprobs

    def searched(self, deltas: list[Delta]) -> list[Delta]:
        """What of these is neither a stop string nor the beginning of one."""
        return [shown for delta in deltas for shown in self.stop.add(delta)]


class Reply:
    """
    The answer to one request. `add` takes an engine's chunk; `whole` is the response so far, `events` a stream. This
    class is the reply to a completion; ChatReply overrides how a choice looks: `delta` in an event, `message` in the
    whole response, `show` its log-probabilities.
    """
    kind = chunk_kind = "text_completion"

    def __init__(self, asked: BaseRequest, model: ServedModel, request: Request):
        self.asked, self.model, self.request = asked, model, request
        self.head = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": model.id}
        if request.forgotten:
            self.head["forgotten"] = request.forgotten
        self.choices = [Choice(index, model.tokenizer, request.stop) for index in range(request.size)]

    def add(self, chunk: Chunk) -> tuple[Choice, Json, list[PlacedLogprob]]:
        """Take in the chunk; returns its choice and the content of an event, with the new text."""
        choice = self.choices[chunk.index]
        deltas, logprobs = choice.add(chunk)
        if choice.finish_reason and not chunk.finish_reason:
            self.request.close(chunk.index)
        new = []
        for part in parts_of(deltas):
            if choice.parts and choice.parts[-1]["type"] == part["type"]:
                choice.parts[-1]["text"] += part["text"]
            else:
                choice.parts.append(part)
                if passage := self.model.tools.source(choice.parts):
                    fields = passage._asdict().items()
                    choice.parts[-1]["source"] = {name: value for name, value in fields if value and name != "text"}
            new.append(part | {"index": len(choice.parts) - 1})
        return choice, self.delta(choice, new), logprobs

    def described(self, choice: Choice, content: Json, placed: Sequence[PlacedLogprob]) -> Json:
        logprobs = self.show(placed) if placed else None
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def delta(self, choice: Choice, parts: list[Json]) -> Json:
        """The content of an event. parts: its new text."""
        return {"text": "".join(part["text"] for part in parts)}

    def message(self, choice: Choice) -> Json:
        """The content of a whole response's choice."""
        return self.delta(choice, choice.parts)

    def show(self, placed: Sequence[PlacedLogprob]) -> Json:
        """Log-probabilities of all tokens."""
        shown: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in placed:
            token, value, top = one.logprob
            name = self.token_text(token)
            tops = {self.token_text(other): logprob for other, logprob in top}
            for key, entry in zip(shown, (name, value, tops | {name: value}, one.offset)):
                shown[key].append(entry)
        return shown

    def token_text(self, token: int) -> str:
        """A token in OpenAI's spelling: bytes of incomplete UTF-8 are escaped."""
        return self.model.tokenizer.decode_bytes([token]).decode(errors="backslashreplace")

    def whole(self) -> Json:
        """The response."""
        choices = [self.described(choice, self.message(choice), choice.logprobs) for choice in self.choices]
        return self.head | {"object": self.kind, "choices": choices, "usage": self.usage()}

    async def events(self, chunks: Chunks) -> AsyncIterator[bytes]:
        """Server-sent events. An error is also an event; the official client raises APIError for it."""
        head = self.head | {"object": self.chunk_kind}
        try:
            async for chunk in chunks:
                yield sse(head | {"choices": [self.described(*self.add(chunk))]})
            if self.asked.stream_options.get("include_usage"):
                yield sse(head | {"choices": [], "usage": self.usage()})
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield sse(error.body())

    def usage(self) -> Json:
        read = sum(map(len, self.request.prompts))
        written = sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def sse(data: Json) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class ChatReply(Reply):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def delta(self, choice: Choice, parts: list[Json]) -> Json:
        delta: Json = {}
        if parts:
            delta = {"content": text_of(parts), "parts": parts}
        if not choice.begun:
            choice.begun = True
            delta = {"role": "assistant", "content": ""} | delta
        return {"delta": delta}

    def message(self, choice: Choice) -> Json:
        return {"message": {"role": "assistant", "content": text_of(choice.parts), "parts": choice.parts}}

    def show(self, placed: Sequence[PlacedLogprob]) -> Json:
        """
        Log-probabilities of the content's tokens, whose bytes, joined, are the text of the content. Extensions:
        `others` has all other tokens (special ones and parts of calls), and all have offsets in the text of all parts.
        """
        shown: Json = {"content": [], "others": []}
        for one in placed:
            token, value, top = one.logprob
            tops = [self.named(*pair) for pair in top]
            entry = self.named(token, value) | {"top_logprobs": tops, "offset": one.offset}
            shown["content" if one.is_content else "others"].append(entry)
        return shown

    def named(self, token: int, logprob: float) -> Json:
        data = self.model.tokenizer.decode_bytes([token])
        return {"token": self.token_text(token), "logprob": logprob, "bytes": [*data]}
