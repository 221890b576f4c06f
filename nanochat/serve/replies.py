"""What an answer looks like in OpenAI's interface: from the chunks of a worker to JSON or server-sent events."""
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.detokenizer import parts_of
from nanochat.serve.api_error import ApiError
from nanochat.serve.engine_process import Chunk
from nanochat.serve.logprobs import PlacedLogprob, chat_logprobs, completion_logprobs
from nanochat.serve.openai_api import BaseRequest, ChatRequest
from nanochat.serve.tools import read_call


class Reply:
    """The choices of one request in OpenAI's shapes: as one response, or as server-sent events."""

    def __init__(self, asked: BaseRequest, model: str, step: int, tokenizer: Tokenizer, prompt_tokens: int):
        self.is_chat = isinstance(asked, ChatRequest)
        self.include_usage = bool(asked.stream_options.get("include_usage"))
        self.kind, prefix = ("chat.completion", "chatcmpl-") if self.is_chat else ("text_completion", "cmpl-")
        self.head = {
            "id": prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model,
            "system_fingerprint": f"step_{step}",
        }
        self.describe = partial(chat_logprobs if self.is_chat else completion_logprobs, tokenizer)
        self.prompt_tokens, self.completion_tokens, self.cached_tokens = prompt_tokens, 0, 0
        self.parts: dict[int, list[dict[str, str]]] = {}        # by choice
        self.logprobs: dict[int, list[PlacedLogprob]] | None = {} if asked.told().get("logprobs") is not None else None
        self.finish_reasons: dict[int, str | None] = {}
        self.functions, self.calls = asked.functions, {}        # the calls by choice

    def add(self, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        """Take these chunks in; returns the choices of the events that say what is new."""
        choices, nothing = [], {"delta": {}} if self.is_chat else {"text": ""}
        for chunk in chunks:
            if self.is_chat and chunk.index not in self.parts:
                choices.append(choice(chunk.index, {"delta": {"role": "assistant", "content": ""}}))
            parts, new = self.parts.setdefault(chunk.index, []), []
            for part in parts_of(chunk.deltas):
                if not parts or parts[-1]["type"] != part["type"]:
                    parts.append(part | {"text": ""})
                parts[-1]["text"] += part["text"]
                content = {"content": part["text"]} if part["type"] == "text" else {}
                delta = {"delta": content | {"parts": [{"index": len(parts) - 1} | part]}}
                new.append(choice(chunk.index, delta if self.is_chat else {"text": part["text"]}))
            if chunk.finish_reason and (call := read_call(parts, self.functions)):
                self.calls[chunk.index], chunk.finish_reason = call, "tool_calls"
                new.append(choice(chunk.index, {"delta": {"tool_calls": [{"index": 0} | call]}}))
            if chunk.finish_reason or (chunk.logprobs and not new):
                new.append(choice(chunk.index, nothing, chunk.finish_reason))
            if chunk.logprobs:
                self.logprobs.setdefault(chunk.index, []).extend(chunk.logprobs)
                new[0]["logprobs"] = self.describe(chunk.logprobs)
            choices += new
            self.finish_reasons[chunk.index] = chunk.finish_reason
            self.completion_tokens += chunk.tokens
            self.cached_tokens += chunk.cached
        return choices

    def whole(self) -> dict[str, Any]:
        """All that was added, as one response."""
        choices = []
        for index, parts in sorted(self.parts.items()):
            text = "".join(part["text"] for part in parts if part["type"] == "text" or not self.is_chat)
            message = {"role": "assistant", "content": text, "refusal": None, "parts": parts}
            if index in self.calls:
                message |= {"content": text or None, "tool_calls": [self.calls[index]]}
            content = {"message": message} if self.is_chat else {"text": text}
            choices.append(choice(index, content, self.finish_reasons[index]))
            if self.logprobs is not None:
                choices[-1]["logprobs"] = self.describe(self.logprobs.get(index, []))
        return self.head | {"object": self.kind, "choices": choices, "usage": self.usage()}

    async def events(self, first: Sequence[Chunk], later: AsyncIterator[Sequence[Chunk]]) -> AsyncIterator[bytes]:
        """As server-sent events. An error is an event as well, for which the official client raises APIError."""
        head = self.head | {"object": "chat.completion.chunk" if self.is_chat else self.kind}
        no_usage = {"usage": None} if self.include_usage else {}

        def progress(chunks: Sequence[Chunk]) -> bytes:
            return b"".join(event(head | {"choices": [one]} | no_usage) for one in self.add(chunks))

        try:
            yield progress(first)
            async for chunks in later:
                yield progress(chunks)
            if self.include_usage:
                yield event(head | {"choices": [], "usage": self.usage()})
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield event(error.body())

    def usage(self) -> dict[str, Any]:
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total,
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens}}


def event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def choice(index: int, content: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index} | content | {"logprobs": None, "finish_reason": finish_reason}
