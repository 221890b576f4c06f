"""
The words of OpenAI's HTTP interface, as far as they are understood here: what a request may say, what an answer looks
like. What goes beyond it:

    top_k                 a setting of a request: only the k most probable tokens; 0: all
    parts                 of an answer's message, and of an assistant's message in a request: everything in order, as
                          [{"type": "text" | "python" | "python_output", "text": ...}, ...]. What the model has the
                          calculator compute is there, and not in `content`. In a request `parts` (or a list of such
                          parts as `content`) goes before `content`, so a message that was received can be sent back.
    delta.parts           in a stream, [{"index": k, "type": ..., "text": ...}]: the next bit of part k, which OpenAI's
                          Python client appends there (its JavaScript client does not). Text is in `content` as well
    context_length, max_tokens, temperature, top_k, examples, chat   of a model in the list of models. examples: questions to
                          suggest; chat false: a base model, which continues the messages as one text

What differs: max_tokens above the server's limit is the limit, and the end of the context ends an answer as well, both
with finish_reason "length"; so does the server's time limit. usage counts every token that was written: those of the
calculator and the one that ends an answer too. A parameter that would change the answer and is not supported is an
error, unless it is set to what happens anyway.
"""
import json
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from nanochat.conversation import PARTS, Conversation
from nanochat.detokenizer import parts_of
from nanochat.serve.answers import News

# Ignored: they say who asks, how it is billed or kept.
HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls", "prediction",
}
# Not supported; accepted with one of these values, which change nothing.
UNSUPPORTED: dict[str, tuple] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"), "logit_bias": ({},),
    "presence_penalty": (0,), "frequency_penalty": (0,), "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (),
    "web_search_options": (), "reasoning_effort": ("none",), "verbosity": ("medium",), "logprobs": (False,), "top_logprobs": (0,),
}
UNSUPPORTED_IN_COMPLETIONS = UNSUPPORTED | {"logprobs": (), "echo": (False,), "suffix": ("",), "best_of": (1,)}
MAX_STOPS, MAX_STOP_LENGTH = 4, 256


class ApiError(Exception):
    """What is wrong with a request. The official client raises another exception class for each status."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.headers = status, message, code, param, headers

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": error_type(self.status), "param": self.param, "code": self.code}}


def error_type(status: int) -> str:
    return "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"


# ---- Requests


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Strict):
    include_usage: bool | None = False


class Request(Strict):
    """What both kinds of request may say. None is the same as nothing."""
    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    seed: int | None = None
    n: int | None = Field(None, ge=1)
    stop: Any = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def stop_strings(self) -> tuple[str, ...]:
        stops = [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(stop, str) for stop in stops):
            raise ApiError(400, f"stop must be a string or a list of at most {MAX_STOPS} strings", param="stop")
        if not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
            raise ApiError(400, f"each of stop must have 1 to {MAX_STOP_LENGTH} characters", param="stop")
        return tuple(stops)

    def include_usage(self) -> bool:
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)


class Message(BaseModel):
    """Checked by `to_conversation`, which says more clearly what is wrong."""
    model_config = ConfigDict(extra="ignore")
    role: str
    content: Any = None
    parts: Any = None
    tool_calls: Any = None


class ChatRequest(Request):
    messages: Annotated[list[Message], FailFast()]  # not an error for each of half a million
    max_completion_tokens: int | None = Field(None, ge=1)


class CompletionRequest(Request):
    prompt: Any

    def prompts(self) -> list[str] | list[list[int]]:
        """A text, several, the tokens of one, or those of several."""
        prompt = self.prompt
        if isinstance(prompt, str) or isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            prompt = [prompt]
        fine = isinstance(prompt, list) and prompt and (
            all(isinstance(text, str) for text in prompt)
            or all(isinstance(ids, list) and ids and all(type(token) is int for token in ids) for ids in prompt))
        if not fine:
            raise ApiError(400, "prompt must be a text, a list of texts, a list of tokens or a list of such lists", param="prompt")
        return prompt


def parse(kind: type[Request], body: bytes) -> Request:
    """The request in a body. ApiError, 400, for anything that cannot be answered as it is meant."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as errors:
        error = errors.errors(include_url=False, include_input=False, include_context=False)[0]
        where = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in error["loc"]).lstrip(".")
        code = "invalid_json" if error["type"] == "json_invalid" else None
        raise ApiError(400, f"{where}: {error['msg']}" if where else error["msg"], code, where or None) from None
    unsupported = UNSUPPORTED if kind is ChatRequest else UNSUPPORTED_IN_COMPLETIONS
    for name, value in request.model_extra.items():
        if name in HARMLESS or value is None:
            continue
        if name not in unsupported:
            raise ApiError(400, f"unknown parameter: {name:.80}", "unknown_parameter", name[:80])
        if value not in unsupported[name]:
            raise ApiError(400, f"{name} is not supported by this server; leave it out", "unsupported_parameter", name)
    return request


def to_conversation(messages: Sequence[Message]) -> Conversation:
    """As nanochat.conversation has it. ApiError where a role or content has no place there; `check_conversation` sees the rest."""
    return {"messages": [to_message(message, f"messages[{number}]") for number, message in enumerate(messages)]}


def to_message(message: Message, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    if role not in ("system", "user", "assistant"):
        raise ApiError(400, f"{where}: role {role!r:.40} is not supported; expected system, developer, user or assistant", param=f"{where}.role")
    if message.tool_calls:
        raise ApiError(400, f"{where}: tool calls are not supported; the calculator's are in parts", "unsupported_parameter", f"{where}.tool_calls")
    kinds = tuple(PARTS) if role == "assistant" else ("text",)
    name = "parts" if role == "assistant" and message.parts is not None else "content"
    content = getattr(message, name)
    if isinstance(content, str) and name == "content":
        return {"role": role, "content": content}
    if not isinstance(content, list):
        raise ApiError(400, f"{where}: {name} must be {'a text or ' * (name == 'content')}a list of parts", param=f"{where}.{name}")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str)):
            raise ApiError(400, f"{where}: a part of the {role}'s {name} must have a type ({', '.join(kinds)}) and a text", param=f"{where}.{name}")
    parts = [{"type": part["type"], "text": part["text"]} for part in content]
    return {"role": role, "content": parts if role == "assistant" else "".join(part["text"] for part in parts)}


# ---- Answers


def dumps(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def event(data: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + dumps(data) + b"\n\n"


class Reply:
    """The answers to one request, in the shape of text completions."""
    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, model: str, step: int, prompt_tokens: int, include_usage: bool = False):
        self.head = {"id": self.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model, "system_fingerprint": f"step_{step}"}
        self.prompt_tokens, self.completion_tokens, self.include_usage = prompt_tokens, 0, include_usage
        self.news: dict[int, list[News]] = defaultdict(list)  # by answer, for `whole`
        self.begun: dict[int, list[str]] = {}  # answers of which there was an event: the types of their parts

    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": self.prompt_tokens + self.completion_tokens}

    def add(self, several: Sequence[News]) -> None:
        for news in several:
            self.news[news.index].append(news)
            self.completion_tokens += news.tokens

    def whole(self) -> dict[str, Any]:
        """All that was added, as one response."""
        choices = []
        for index, several in sorted(self.news.items()):
            parts = parts_of([piece for news in several for piece in news.pieces])
            choices.append({"index": index} | self.complete(parts) | {"logprobs": None, "finish_reason": several[-1].finish_reason})
        return self.head | {"object": self.kind, "choices": choices, "usage": self.usage()}

    def chunks(self, several: Sequence[News]) -> bytes:
        """The events that tell of it."""
        choices = []
        for news in several:
            self.completion_tokens += news.tokens
            deltas = self.deltas(parts_of(news.pieces), news.index)
            choices += [{"index": news.index} | delta | {"logprobs": None, "finish_reason": None} for delta in deltas]
            if news.finish_reason:
                choices.append({"index": news.index} | self.last | {"logprobs": None, "finish_reason": news.finish_reason})
        usage = {"usage": None} if self.include_usage else {}
        return b"".join(event(self.head | {"object": self.chunk_kind, "choices": [choice]} | usage) for choice in choices)

    def end(self) -> bytes:
        """The events after the last answer has ended."""
        usage = event(self.head | {"object": self.chunk_kind, "choices": [], "usage": self.usage()}) if self.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    # What differs from the chat's

    last: dict[str, Any] = {"text": ""}

    def complete(self, parts: list[dict[str, str]]) -> dict[str, Any]:
        return {"text": "".join(part["text"] for part in parts)}

    def deltas(self, parts: list[dict[str, str]], index: int) -> list[dict[str, Any]]:
        """What is new of the answer of that index."""
        return [self.complete(parts)] if parts else []


class ChatReply(Reply):
    """The same in the shape of chat completions."""
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    last = {"delta": {}}

    def complete(self, parts: list[dict[str, str]]) -> dict[str, Any]:
        content = "".join(part["text"] for part in parts if part["type"] == "text")
        return {"message": {"role": "assistant", "content": content, "refusal": None, "parts": parts}}

    def deltas(self, parts: list[dict[str, str]], index: int) -> list[dict[str, Any]]:
        deltas = [] if index in self.begun else [{"delta": {"role": "assistant", "content": ""}}]
        types = self.begun.setdefault(index, [])
        for part in parts:
            if types[-1:] != [part["type"]]:
                types.append(part["type"])
            content = {"content": part["text"]} if part["type"] == "text" else {}
            deltas.append({"delta": content | {"parts": [{"index": len(types) - 1} | part]}})
        return deltas
