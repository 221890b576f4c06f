"""What an answer looks like in OpenAI's interface: from the chunks of a worker to JSON or server-sent events."""
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from nanochat.data.conversation import text_of
from nanochat.inference.detokenizer import Delta, parts_of
from nanochat.inference.logprobs import TokenLogprob
from nanochat.inference.tools import NOTHING
from nanochat.serve.functions import read_call
from nanochat.serve.openai_requests import BaseRequest
from nanochat.serve.protocol import ApiError, Chunk, Chunks, Json, PlacedLogprob, Request
from nanochat.serve.worker import ServedModel


@dataclass
class Written:
    """What has been written of a choice."""
    index: int
    begun: bool = False
    parts: list[Json] = field(default_factory=list)
    logprobs: list[PlacedLogprob] = field(default_factory=list)
    call: Json | None = None
    finish_reason: str | None = None


class Reply:
    """The choices of one request, as one response or as server-sent events: here those of a completion."""
    kind = chunk_kind = "text_completion"

    def __init__(self, asked: BaseRequest, model: ServedModel, request: Request):
        self.asked, self.tokenizer, self.tools = asked, model.tokenizer, model.tools
        self.id = uuid.uuid4().hex
        self.head = {"id": self.id, "created": int(time.time()), "model": asked.model}
        if asked._forgotten:
            self.head["forgotten"] = asked._forgotten
        self.prompt_tokens = sum(map(len, request.prompts))
        self.completion_tokens, self.cached_tokens = 0, 0
        self.written = [Written(index) for index in range(request.size)]

    def add(self, chunks: Sequence[Chunk]) -> list[Json]:
        """Take these chunks in; returns the choices of the events that say what is new."""
        choices = []
        for chunk in chunks:
            self.completion_tokens += chunk.tokens
            self.cached_tokens += chunk.cached
            written = self.written[chunk.index]
            written.logprobs += chunk.logprobs
            written.finish_reason = chunk.finish_reason
            written.parts = parts_of([Delta(**part) for part in written.parts] + chunk.deltas)
            news = self.news(written, parts_of(chunk.deltas))
            choices.append(self.choice(chunk, written, news))
        return choices

    def choice(self, chunk: Chunk | Written, written: Written, content: Json) -> Json:
        logprobs = self.describe(chunk.logprobs) if chunk.logprobs else None
        return {"index": written.index, **content, "logprobs": logprobs, "finish_reason": written.finish_reason}

    def news(self, written: Written, parts: list[Json]) -> Json:
        """What an event says of these parts, the last ones of what is written."""
        return {"text": "".join(part["text"] for part in parts)}

    def content(self, written: Written) -> Json:
        """What a whole response says of a choice."""
        return self.news(written, written.parts)

    def describe(self, placed: Sequence[PlacedLogprob]) -> Json:
        """Log-probabilities of all tokens."""
        return {
            "tokens": [self.token_text(one.logprob.token) for one in placed],
            "token_logprobs": [one.logprob.logprob for one in placed],
            "top_logprobs": [self.top(one.logprob) for one in placed],
            "text_offset": [one.offset for one in placed],
        }

    def top(self, logprob: TokenLogprob) -> dict[str, float] | None:
        """The most probable tokens and the token itself. Nothing predicts the first token of all."""
        if logprob.logprob is None:
            return None
        return {self.token_text(token): value for token, value in [*logprob.top, logprob[:2]]}

    def token_text(self, token: int) -> str:
        """As OpenAI writes tokens, whether or not they are whole UTF-8."""
        return self.tokenizer.decode_bytes([token]).decode(errors="backslashreplace")

    def whole(self) -> Json:
        """All that was added, as one response."""
        choices = [self.choice(one, one, self.content(one)) for one in self.written]
        return self.head | {"object": self.kind, "choices": choices, "usage": self.usage()}

    async def events(self, chunks: Chunks) -> AsyncIterator[bytes]:
        """As server-sent events. An error is an event as well, for which the official client raises APIError."""
        head = self.head | {"object": self.chunk_kind}
        try:
            async for several in chunks:
                for choice in self.add(several):
                    yield sse(head | {"choices": [choice]})
            if self.asked.stream_options.get("include_usage"):
                yield sse(head | {"choices": [], "usage": self.usage()})
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield sse(error.body())

    def usage(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def sse(data: Json) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class ChatReply(Reply):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def news(self, written: Written, parts: list[Json]) -> Json:
        delta: Json = {}
        if not written.begun:
            written.begun = True
            delta = {"role": "assistant", "content": ""}
        for index, part in enumerate(parts, len(written.parts) - len(parts)):
            begins = written.parts[index]["text"] == part["text"]  # clients append texts, so a source is sent once
            source = self.source(written, index) if begins else {}
            delta.setdefault("parts", []).append({"index": index} | part | source)
            if part["type"] == "text":
                delta["content"] = delta.get("content", "") + part["text"]
        if written.finish_reason and written.parts and written.parts[-1]["type"] == "python":
            written.call = read_call(written.parts[-1]["text"], self.asked.functions)
        if written.call:
            written.finish_reason = "tool_calls"
            delta["tool_calls"] = [{"index": 0} | written.call]
        return {"delta": delta}

    def source(self, written: Written, index: int) -> Json:
        """Where the passage in a part comes from; nothing for a part that is no passage."""
        call, part = ({"type": "text"}, *written.parts)[index : index + 2]
        if call["type"] != "python" or part["type"] != "python_output" or part["text"] == NOTHING:
            return {}
        passage = self.tools.find(call["text"])
        return {"source": {"title": passage.title, "place": passage.place}} if passage else {}

    def content(self, written: Written) -> Json:
        parts = [part | self.source(written, index) for index, part in enumerate(written.parts)]
        text = text_of(parts)
        message = {"role": "assistant", "content": text, "parts": parts}
        if written.call:
            message |= {"content": text or None, "tool_calls": [written.call]}
        return {"message": message}

    def describe(self, placed: Sequence[PlacedLogprob]) -> Json:
        """Log-probabilities of the tokens of a message's content: their bytes, put end to end, are its text."""
        content = []
        for one in placed:
            if one.is_content:
                token, value, top = one.logprob
                tops = [self.named(*pair) for pair in top]
                content.append(self.named(token, value) | {"top_logprobs": tops})
        return {"content": content}

    def named(self, token: int, logprob: float | None) -> Json:
        return {"token": self.token_text(token), "logprob": logprob, "bytes": [*self.tokenizer.decode_bytes([token])]}
