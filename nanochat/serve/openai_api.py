"""
OpenAI's HTTP interface, as far as it is supported: what a request may say. replies.py has what an answer looks like.

Extensions:

    top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos   settings of a request: see inference/sampling.py.
                          stop_token_ids end an answer as well as the usual ones, which ignore_eos does not look for
    parts                 of an answer's message, and of an assistant's message in a request: everything in order, as
                          [{"type": "text" | "python" | "python_output", "text": ...}, ...]. What the model has the
                          calculator compute is there, and not in `content`. In a request `parts` (or a list of such
                          parts as `content`) goes before `content`, so a message that was received can be sent back.
    delta.parts           in a stream, [{"index": k, "type": ..., "text": ...}]: the next bit of part k, which OpenAI's
                          Python client appends there (its JavaScript client does not). Text is in `content` as well
    context_length, max_tokens, temperature, top_k, examples, chat   of a model in the list of models. examples:
                          questions to suggest; chat false: a base model, which continues the messages as one text
    /tokenize, /detokenize, /tokenizer_info   as vLLM has them

Log-probabilities are of the model's own distribution: after the softcap, before temperature and all else that a request
asks for, in float32. In a chat they are those of the tokens of `content`. A completion's prompt is read after <|bos|>;
unless the client has sent that token itself, echo begins after it, and so the first token has a log-probability, too.

Messages may come in any order: several of system and user in a row are one turn, the assistant may begin, and its
message at the end is continued.

response_format, tools and tool_choice are OpenAI's, structured_outputs and guided_choice vLLM's: structured.py and
tools.py say how they work here, responses.py what /v1/responses takes. Where a form is prescribed, nothing is
calculated. An answer that max_tokens, the context or a stop string ends before its form is complete does not fit it.

Differences: max_tokens above the server's limit is the limit, and the end of the context ends an answer as well, both
with finish_reason "length"; so does the server's time limit. usage counts every token that was written, also those of
the calculator and the one that ends an answer. A parameter that would change the answer and is not supported is an
error, unless it is set to what happens anyway.
"""
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import from_json

from nanochat.data.conversation import Conversation, check_conversation
from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.engine import default_stop
from nanochat.inference.sampling import SamplingParams
from nanochat.runtime.errors import UserError
from nanochat.serve.api_error import ApiError
from nanochat.serve.structured import Formed
from nanochat.serve.tools import Function, WithTools, describe, parts_of_result, parts_with_calls

# Parameters that do not change an answer: they say who asks, how it is billed or kept.
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "prediction",
}
MOST_ENTRIES = 1024     # of an object in a request
# Values that ask for nothing, of parameters that are not supported. Any other parameter or value is refused.
NEUTRAL: dict[str, tuple] = {
    "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],), "reasoning_effort": ("none",),
    "verbosity": ("medium",), "top_logprobs": (0,), "echo": (False,), "suffix": ("",), "best_of": (1,),
    "use_beam_search": (False,), "length_penalty": (1,), "min_tokens": (0,), "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,), "spaces_between_special_tokens": (True,),
}


# ---- Requests


class Part(BaseModel):
    type: Literal["text", "python", "python_output"]
    text: str


def content_beside_parts(schema: dict[str, Any]) -> None:
    """What a client sends, instead of what is kept of it."""
    content = {"anyOf": [{"type": "string"}, schema["properties"]["parts"]]}
    role = {"enum": [*schema["properties"]["role"]["enum"], "tool"]}
    schema |= {"properties": schema["properties"] | {"content": content, "role": role}, "required": ["role", "content"]}


class Message(BaseModel):
    """`parts` is what there is to read: the parts of an assistant's message if it has any, or else its content."""
    model_config = ConfigDict(json_schema_extra=content_beside_parts)
    role: Literal["system", "developer", "user", "assistant"]
    parts: Annotated[list[Part], FailFast()]  # not an error for each of half a million

    @model_validator(mode="before")
    @classmethod
    def choose_parts(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        if message.get("role") == "tool":
            return {"role": "assistant", "parts": parts_of_result(message.get("content"))}
        parts = message.get("parts") if message.get("role") == "assistant" else None
        parts = message.get("content") if parts is None else parts
        if calls := message.get("tool_calls"):
            parts = parts_with_calls(parts, calls)
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        if not isinstance(parts, list):
            raise ValueError("content must be a text or a list of parts")
        return {"role": message.get("role"), "parts": parts}

    def turn(self) -> dict[str, Any]:
        """The message as nanochat.data.conversation has it."""
        role = "system" if self.role == "developer" else self.role
        if role != "assistant" and all(part.type == "text" for part in self.parts):
            return {"role": role, "content": "".join(part.text for part in self.parts)}
        return {"role": role, "content": [part.model_dump() for part in self.parts]}


def conversation_of(messages: Sequence[Message]) -> Conversation:
    """As nanochat.data.conversation has it."""
    conversation = {"messages": [message.turn() for message in messages]}
    try:
        check_conversation(conversation, "messages", any_order=True)
    except UserError as error:
        raise ApiError(400, str(error), param="messages") from None
    return conversation


StopString = Annotated[str, Field(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Field(max_length=16)]


def as_list(stop: Any) -> list:
    """`stop` as a list; OpenAI's interface takes a single text as well."""
    if not isinstance(stop, (str, list)):
        raise ValueError("must be a text or a list of texts")
    return [stop] if isinstance(stop, str) else stop


def json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    return fields


class Body(BaseModel):
    """The JSON of a request. null stands for what is missing."""
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @classmethod
    def parse(cls, body: bytes | dict[str, Any], max_messages: int = 0, **defaults: float) -> Self:
        """
        The request in a body. ApiError, 400, for anything that cannot be answered as it is meant. More messages than
        max_messages are refused before any of them is read.
        """
        fields = json_object(body) if isinstance(body, bytes) else body
        messages = fields.get("messages") if max_messages else None
        if isinstance(messages, list) and len(messages) > max_messages:
            words = f"{len(messages):,} messages; at most {max_messages:,} are allowed"
            raise ApiError(400, words, "too_many_messages", "messages")
        for name, value in fields.items():
            if isinstance(value, dict) and len(value) > MOST_ENTRIES:  # an error for each would hold up the event loop
                words = f"{name:.80}: {len(value):,} entries; at most {MOST_ENTRIES:,} are allowed"
                raise ApiError(400, words, param=name[:80])
        try:
            return cls.model_validate(defaults | {name: value for name, value in fields.items() if value is not None})
        except ValidationError as errors:
            error = errors.errors(include_url=False, include_input=False, include_context=False)[0]
            where = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in error["loc"]).lstrip(".")
            if b'"parts"' not in (body if isinstance(body, bytes) else b""):
                where = where.replace(".parts[", ".content[")  # as the client named it
            words = error["msg"].removeprefix("Value error, ")
            words = "must be a JSON object" if error["type"] == "model_type" else words
            raise ApiError(400, f"{where}: {words}" if where else words, param=where or None) from None


class BaseRequest(Body, Formed):
    """What both kinds of request may say. The server's defaults stand for what is missing or null."""
    model: str
    max_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0)
    top_k: int = Field(ge=-1)
    top_p: float = Field(1.0, ge=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_ENTRIES)] = {}
    seed: int | None = None
    n: int = Field(1, ge=1)
    stop: Annotated[StopStrings, BeforeValidator(as_list, json_schema_input_type=StopString | StopStrings)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=64)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, bool | None] = {}

    @model_validator(mode="after")
    def check_supported(self) -> Self:
        for name, value in self.model_extra.items():
            if name not in IGNORED and value not in NEUTRAL.get(name, ()):
                words = f"{name:.80} is not supported by this server; leave it out"
                raise ApiError(400, words, "unsupported_parameter", name[:80])
        return self

    def told(self) -> dict[str, int | None]:
        """The log-probabilities that are asked for, as SamplingParams has it."""
        return {}

    @property
    def functions(self) -> list[Function]:
        """Of the caller's own, which may be called."""
        return []

    def sampling(self, most_tokens: int, tokenizer: Tokenizer, tools: bool, form: str | None) -> SamplingParams:
        """As the engine has it, but for the form's grammar. most_tokens: the server's limit."""
        if form and self.ignore_eos:
            raise ApiError(400, "ignore_eos: an answer of a prescribed form ends where that does", param="ignore_eos")
        stop = [*(() if self.ignore_eos else default_stop(tokenizer)), *self.stop_token_ids]
        if self.functions:  # a call ends the answer, as do expressions that the calculator cannot read
            stop.append(tokenizer.encode_special("<|python_end|>"))
        vocab_size, bias = tokenizer.get_vocab_size(), []
        for token, value in self.logit_bias.items():
            if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size):
                words = f"logit_bias: {token!r:.80} is no token; expected 0 to {vocab_size - 1}"
                raise ApiError(400, words, param="logit_bias")
            bias.append((int(token), value))
        return SamplingParams(
            min(self.max_tokens, most_tokens), self.temperature, max(self.top_k, 0), self.top_p, self.seed,
            tuple(stop), tools and form is None,
            self.presence_penalty, self.frequency_penalty, self.repetition_penalty, tuple(bias), self.min_p,
            **self.told())


class ChatRequest(WithTools, BaseRequest):
    messages: Annotated[list[Message], FailFast()]
    max_completion_tokens: int | None = Field(None, ge=1)  # the newer name of max_tokens
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs without logprobs; set logprobs=true", param="top_logprobs")
        return self

    def told(self) -> dict[str, int | None]:
        return {"logprobs": self.top_logprobs if self.logprobs else None}

    def definitions(self) -> list[Message]:
        """What the model is told of the functions, before the messages."""
        return [Message(role="system", content=describe(self.functions))] if self.functions else []


Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Prompts = str | Annotated[list[str], Field(min_length=1)] | Tokens | Annotated[list[Tokens], Field(min_length=1)]


def as_prompts(prompt: Any) -> list[str | list[int]]:
    """A text, several, the tokens of one, or those of several: always as a list of prompts."""

    def is_one(prompt: Any) -> bool:
        return isinstance(prompt, str) or (
            isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt))

    prompts = [prompt] if is_one(prompt) else prompt
    if not isinstance(prompts, list) or not prompts or not all(map(is_one, prompts)):
        raise ValueError("must be a text, a list of texts, a list of tokens or a list of such lists")
    return prompts


class CompletionRequest(BaseRequest):
    prompt: Annotated[Any, BeforeValidator(as_prompts, json_schema_input_type=Prompts)]
    max_tokens: int = Field(ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)  # here even 0 asks for them
    echo: bool = False

    @model_validator(mode="after")
    def check_max_tokens(self) -> Self:
        if not self.max_tokens and not self.echo:
            raise ApiError(400, "max_tokens=0 without echo asks for nothing; expected at least 1", param="max_tokens")
        return self

    def told(self) -> dict[str, int | None]:
        # With max_tokens=0 the engine has only the prompt to read: for its log-probabilities, wanted or not.
        reads = self.echo and (self.logprobs is not None or not self.max_tokens)
        return {"logprobs": self.logprobs, "prompt_logprobs": (self.logprobs or 0) if reads else None}
