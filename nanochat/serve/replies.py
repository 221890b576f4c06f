"""Answers in OpenAI's interface: from the chunks of a worker to JSON or server-sent events."""
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from nanochat.data.conversation import text_of
from nanochat.inference.detokenizer import parts_of
from nanochat.serve.functions import read_call
from nanochat.serve.openai_requests import BaseRequest
from nanochat.serve.protocol import ApiError, Chunk, Chunks, Json, PlacedLogprob, Request
from nanochat.serve.worker import ServedModel


@dataclass
class Written:
    """One choice so far: the sum of its chunks."""
    index: int
    begun: bool = False             # an event has given the message's role
    parts: list[Json] = field(default_factory=list)
    logprobs: list[PlacedLogprob] = field(default_factory=list)
    call: Json | None = None
    finish_reason: str | None = None


class Reply:
    """
    The answer to one request. `add` takes a worker's chunk; `whole` is the response so far, `events` a stream. This
    class is the reply to a completion; other interfaces override how a choice looks: `delta` in an event, `message` in
    the whole response, `show` its log-probabilities.
    """
    kind = chunk_kind = "text_completion"

    def __init__(self, asked: BaseRequest, model: ServedModel, request: Request):
        self.asked, self.model = asked, model
        self.id = uuid.uuid4().hex
        self.head = {"id": self.id, "created": int(time.time()), "model": asked.model}
        if request.forgotten:
            self.head["forgotten"] = request.forgotten
        self.prompt_tokens = sum(map(len, request.prompts))
        self.completion_tokens = 0
        self.written = [Written(index) for index in range(request.size)]

    def add(self, chunk: Chunk) -> tuple[Written, Json]:
        """Take in the chunk; returns its choice and the content of an event, with the new text."""
        self.completion_tokens += chunk.tokens
        written = self.written[chunk.index]
        written.logprobs += chunk.logprobs
        written.finish_reason = chunk.finish_reason
        new = []
        for part in parts_of(chunk.deltas):
            if written.parts and written.parts[-1]["type"] == part["type"]:
                written.parts[-1]["text"] += part["text"]
            else:
                part |= self.source(written, part)
                written.parts.append(part)
            new.append(part | {"index": len(written.parts) - 1})
        return written, self.delta(written, new)

    def source(self, written: Written, part: Json) -> Json:
        """Where the passage that a part begins comes from; {} if the part is not a passage."""
        passage = self.model.tools.source([*written.parts, part])
        return {"source": {"title": passage.title, "place": passage.place}} if passage else {}

    def choice(self, written: Written, content: Json, placed: Sequence[PlacedLogprob]) -> Json:
        logprobs = self.show(placed) if placed else None
        return {"index": written.index, **content, "logprobs": logprobs, "finish_reason": written.finish_reason}

    def delta(self, written: Written, parts: list[Json]) -> Json:
        """The content of an event. parts: its new text."""
        return {"text": "".join(part["text"] for part in parts)}

    def message(self, written: Written) -> Json:
        """The content of a whole response's choice."""
        return self.delta(written, written.parts)

    def show(self, placed: Sequence[PlacedLogprob]) -> Json:
        """Log-probabilities of all tokens."""
        shown: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in placed:
            token, value, top = one.logprob
            name = self.token_text(token)
            tops = {self.token_text(other): logprob for other, logprob in top}
            # Nothing predicts the very first token: its value and its alternatives are None.
            alternatives = None if value is None else tops | {name: value}
            for key, entry in zip(shown, (name, value, alternatives, one.offset)):
                shown[key].append(entry)
        return shown

    def token_text(self, token: int) -> str:
        """A token in OpenAI's spelling: bytes of incomplete UTF-8 are escaped."""
        return self.model.tokenizer.decode_bytes([token]).decode(errors="backslashreplace")

    def whole(self) -> Json:
        """The response."""
        choices = [self.choice(written, self.message(written), written.logprobs) for written in self.written]
        return self.head | {"object": self.kind, "choices": choices, "usage": self.usage()}

    async def events(self, chunks: Chunks) -> AsyncIterator[bytes]:
        """Server-sent events. An error is also an event; the official client raises APIError for it."""
        head = self.head | {"object": self.chunk_kind}
        try:
            async for chunk in chunks:
                yield sse(head | {"choices": [self.choice(*self.add(chunk), chunk.logprobs)]})
            if self.asked.stream_options.get("include_usage"):
                yield sse(head | {"choices": [], "usage": self.usage()})
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield sse(error.body())

    def usage(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


def sse(data: Json) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class ChatReply(Reply):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def delta(self, written: Written, parts: list[Json]) -> Json:
        delta: Json = {}
        if parts:
            delta = {"content": text_of(parts), "parts": parts}
        if not written.begun:
            written.begun = True
            delta = {"role": "assistant", "content": ""} | delta
        if written.finish_reason and written.parts and written.parts[-1]["type"] == "python":
            written.call = read_call(written.parts[-1]["text"], self.asked.functions)
        if written.call:
            written.finish_reason = "tool_calls"
            delta["tool_calls"] = [{"index": 0} | written.call]
        return {"delta": delta}

    def message(self, written: Written) -> Json:
        text = text_of(written.parts)
        message = {"role": "assistant", "content": text, "parts": written.parts}
        if written.call:
            message |= {"content": text or None, "tool_calls": [written.call]}
        return {"message": message}

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

    def named(self, token: int, logprob: float | None) -> Json:
        data = self.model.tokenizer.decode_bytes([token])
        return {"token": self.token_text(token), "logprob": logprob, "bytes": [*data]}
