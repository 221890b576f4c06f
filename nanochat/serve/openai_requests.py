"""
OpenAI's HTTP interface, as far as it is supported: what a request may say. replies.py has what an answer looks like.

Extensions:

    top_k                 only the k most probable tokens; 0 or -1: all
    parts                 of an answer's message, and of an assistant's message in a request: everything in order, as
                          [{"type": "text" | "python" | "python_output", "text": ...}, ...]. What the model has its
                          tools compute or look up is there, and not in `content`; a passage of a library has a
                          "source", {"title": ..., "place": "notes/wine.md:14"}. In a request `parts` (or a list of such
                          parts as `content`) goes before `content`, so a message that was received can be sent back.
    delta.parts           in a stream, [{"index": k, "type": ..., "text": ...}]: the next bit of part k, which OpenAI's
                          Python client appends there (its JavaScript client does not). Text is in `content` as well
    truncation            "auto": the oldest turns of a conversation are left out where they leave an answer no room, a
                          quarter of the context. System messages and the last question stay
    forgotten             of a chat's answer or chunk: how many messages were left out, if any
    context_length, max_tokens, temperature, top_k, examples, chat   of a model in the list of models. examples:
                          questions to suggest; chat false: a base model, which continues the messages as one text

Log-probabilities are of the model's own distribution: after the softcap, before temperature and all else that a request
asks for, in float32. In a chat they are those of the tokens of `content`. A completion's prompt is read after <|bos|>;
unless the client has sent that token itself, echo begins after it, and so the first token has a log-probability, too.

Messages may come in any order: several of system and user in a row are one turn, the assistant may begin, and its
message at the end is continued. tools.py and structured.py say how functions and response formats work here. Where a
form is prescribed, nothing is calculated. An answer that max_tokens, the context or a stop string ends before its form
is complete does not fit it.

The Responses interface stores nothing: every request brings its whole conversation in `input`.

Differences: max_tokens above the server's limit is the limit, and the end of the context ends an answer as well, both
with finish_reason "length"; so does the server's time limit. usage counts every token that was written, also the
calculator's and the end token. max_tokens -1 is llama.cpp's: as many as may be. A hint on how to think, or what to
keep, is ignored; a parameter that would change the answer and is not supported is an error.
"""
import codecs
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
)
from pydantic_core import from_json

from nanochat.data.conversation import parts, recent, render_prompt, render_text
from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.engine import default_stop
from nanochat.inference.sampling import SamplingParams
from nanochat.serve.functions import (
    AllowedTools,
    Function,
    ToolCall,
    ToolChoice,
    Tools,
    call_grammar,
    describe,
)
from nanochat.serve.protocol import ApiError, Json
from nanochat.serve.structured import AnyResponseFormat, ResponseFormat

# Parameters that change no answer here: they say who asks, how it is billed or kept, or are hints for what this server
# does not do. Any other that is not supported is refused, unless its value asks for nothing: null, false, 0, "", [].
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "cache_prompt", "keep_alive", "prediction", "parallel_tool_calls", "max_tool_calls", "verbosity", "text",
    "reasoning_effort", "reasoning", "chat_template_kwargs",
}
# Values that ask for nothing, too.
NEUTRAL = {"repetition_penalty": 1, "repeat_penalty": 1, "typical_p": 1, "truncation": "disabled",
           "modalities": ["text"]}
NO_LIMIT = 10**9
MAX_STOPS = 32
# JSON.stringify writes half of a pair where a text was cut within an emoji. No UTF-8 has it: U+FFFD stands for it.
LONE_SURROGATE = re.compile(
    rb"(?i)(?<!\\)((?:\\\\)*)"     # not escaped itself
    rb"(?:\\ud[89ab][0-9a-f]{2}(?!\\ud[c-f])|(?<!\\ud[89ab][0-9a-f]{2})\\ud[c-f][0-9a-f]{2})")
MAX_BIASES = 1024   # entries of logit_bias, of which each step has to add every one
# Fields that SamplingParams has under the same name, with the same meaning.
SAME = {"temperature", "top_p", "seed", "presence_penalty", "frequency_penalty"}

Encoded = tuple[list[list[int]], list[int]]     # prompts, and for each the token from which on it is repeated; []: none


def as_list(value: Any) -> Any:
    """OpenAI's interface takes a single text for a list of one."""
    return [value] if isinstance(value, str) else value


def as_prompts(prompt: Any) -> list:
    """Likewise a single prompt, a text or its tokens."""
    is_single = isinstance(prompt, str) or all(isinstance(token, int) for token in prompt)
    return [prompt] if is_single else prompt


def check_tokens(tokens: Iterable[int], tokenizer: Tokenizer, param: str) -> None:
    vocab_size = tokenizer.get_vocab_size()
    if not all(0 <= token < vocab_size for token in tokens):
        raise ApiError(400, f"{param}: the tokens are 0 to {vocab_size - 1}", param=param)


class BaseRequest(BaseModel):
    """The fields that all kinds of requests have. The server's defaults stand for what is missing or null."""
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    param: ClassVar[str]            # the field that has the prompt
    calculates: ClassVar[bool] = False
    model: str
    max_tokens: int = Field(NO_LIMIT, ge=1)     # at most the server's limit
    temperature: float = Field(ge=0)
    top_k: int = Field(ge=-1)
    top_p: float = Field(1.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[
        dict[Annotated[int, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_BIASES)] = {}
    seed: int | None = None
    n: int = Field(1, ge=1, lt=10**6)   # at most as many as the server takes at once
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=MAX_STOPS),
        BeforeValidator(as_list)] = []
    stream: bool = False
    stream_options: dict[str, bool | None] = {}
    _forgotten: int = 0             # messages that `encode` has left out

    @classmethod
    def parse(cls, body: bytes, defaults: Json) -> Self:
        """The request in a body. ApiError, 400, for anything that cannot be answered as it is meant."""
        body = body.removeprefix(codecs.BOM_UTF8)
        try:
            fields = from_json(LONE_SURROGATE.sub(rb"\1\\ufffd", body), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from None
        if not isinstance(fields, dict):
            raise ApiError(400, "the body must be a JSON object")
        fields = {name: value for name, value in fields.items() if value is not None}
        for newer in ("max_completion_tokens", "max_output_tokens"):
            if newer in fields:
                fields["max_tokens"] = fields.pop(newer)
        if fields.get("max_tokens") == -1:
            fields["max_tokens"] = NO_LIMIT
        try:
            asked = cls.model_validate(defaults | fields)
        except ValidationError as errors:
            error = errors.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(map(str, error["loc"]))
            raise ApiError(400, f"{where}: {error['msg']}", param=where) from None
        neutral = NEUTRAL | {"best_of": asked.n}
        for name, value in asked.model_extra.items():
            if value and name not in IGNORED and value != neutral.get(name):
                words = f"{name:.80} is not supported by this server; leave it out"
                raise ApiError(400, words, "unsupported_parameter", name[:80])
        return asked

    @property
    def size(self) -> int:
        """Choices in all: known before a prompt is encoded."""
        return self.n

    @property
    def functions(self) -> Sequence[Function]:
        """The caller's own that may be called."""
        return ()

    @property
    def logprobs_asked(self) -> Json:
        """Settings of SamplingParams."""
        raise NotImplementedError

    def grammar(self, tokenizer: Tokenizer) -> str | None:
        """A grammar's expression for the answer; None: any text."""
        return None

    def encode(self, tokenizer: Tokenizer, chats: bool, context: int) -> Encoded:
        """chats: False for a base model, for which messages are one text to continue. context: in tokens."""
        raise NotImplementedError

    def sampling(self, tokenizer: Tokenizer, max_new_tokens: int, tools: bool) -> SamplingParams:
        stop = default_stop(tokenizer)
        if self.functions:  # a call ends the answer, as do expressions that the calculator cannot read
            stop += (tokenizer.encode_special("<|python_end|>"),)
        check_tokens(self.logit_bias, tokenizer, "logit_bias")
        return SamplingParams(
            max_tokens=min(self.max_tokens, max_new_tokens), top_k=max(self.top_k, 0), stop=stop, tools=tools,
            logit_bias=tuple(self.logit_bias.items()), **self.logprobs_asked, **self.model_dump(include=SAME))


# ---- Conversations


def as_parts(content: Any) -> Any:
    return [] if content is None else parts(content)


def chat_type(type: Any) -> Any:
    """The Responses interface has other names for texts."""
    return "text" if type in ("input_text", "output_text", "refusal") else type


class MessagePart(BaseModel):
    type: Annotated[Literal["text", "python", "python_output"], BeforeValidator(chat_type)]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


Parts = Annotated[list[MessagePart], FailFast(), BeforeValidator(as_parts)]  # not an error for each of half a million


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Parts = []
    parts: Parts = []
    refusal: Parts = []
    tool_calls: list[ToolCall] | None = None

    def turn(self) -> Json:
        """As nanochat.data.conversation has it. A function's call and result are parts of the assistant's turn."""
        content = self.content or self.refusal
        if not (content or self.parts or self.tool_calls):
            raise ApiError(400, "content must be a text or a list of parts", param="messages")
        text = "".join(part.text for part in content)
        if self.role == "tool":
            return {"role": "assistant", "content": [{"type": "python_output", "text": text}]}
        if self.role != "assistant":
            return {"role": self.role, "content": text}
        parts = [part.model_dump() for part in self.parts or content]
        if self.tool_calls and parts and parts[-1]["type"] == "python":
            parts = parts[:-1]  # a message of this server: its last part is the call
        calls = [call.function.part() for call in self.tool_calls or []]
        return {"role": self.role, "content": parts + calls}


class ConversationRequest(BaseRequest):
    """What chat and the Responses interface have in common."""
    calculates: ClassVar[bool] = True
    if TYPE_CHECKING:  # fields of the subclasses, which name them differently in JSON
        messages: list[Message]
        format: ResponseFormat
        @property
        def wants_logprobs(self) -> bool: ...
    tools: Tools = []
    tool_choice: ToolChoice = "auto"
    truncation: Literal["auto", "disabled"] = "disabled"
    top_logprobs: int = Field(0, ge=0, le=20)

    @property
    def logprobs_asked(self) -> Json:
        return {"logprobs": self.top_logprobs if self.wants_logprobs else None}

    @property
    def functions(self) -> Sequence[Function]:
        if isinstance(self.tool_choice, AllowedTools):
            allowed = [tool.name for tool in self.tool_choice.tools]
            return [function for function in self.tools if function.name in allowed]
        return [] if self.tool_choice == "none" else self.tools

    def grammar(self, tokenizer: Tokenizer) -> str | None:
        mode = self.tool_choice.mode if isinstance(self.tool_choice, AllowedTools) else self.tool_choice
        if mode == "required" and not self.functions:
            raise ApiError(400, "tool_choice asks for a function that tools does not have", param="tool_choice")
        text = self.format.grammar()
        if not self.functions or mode == "auto" and text is None:
            return text
        call = call_grammar(self.functions, tokenizer)
        return f"{call} | {text}" if mode == "auto" else call

    def turns(self) -> list[Json]:
        return [message.turn() for message in self.messages]

    def encode(self, tokenizer: Tokenizer, chats: bool, context: int) -> Encoded:
        turns = self.turns()
        if self.functions:
            turns.insert(0, {"role": "system", "content": describe(self.functions)})
        render = partial(render_prompt, continue_last=True) if chats else render_text
        if self.truncation == "auto":
            room = min(self.max_tokens, context // 4)
            kept = recent(turns, lambda some: len(render(tokenizer, {"messages": some})), context - room)
            self._forgotten = len(turns) - len(kept)
            turns = kept
        return [render(tokenizer, {"messages": turns})], []


class ChatRequest(ConversationRequest):
    param: ClassVar[str] = "messages"
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    format: AnyResponseFormat = Field(ResponseFormat(), alias="response_format")
    wants_logprobs: bool = Field(False, alias="logprobs")


Tokens = Annotated[list[int], Field(fail_fast=True)]  # FailFast() cannot be a part of a union


class CompletionRequest(BaseRequest):
    """Continues texts, or lists of tokens, after <|bos|>; nothing is calculated. The tokens may be special ones."""
    param: ClassVar[str] = "prompt"
    prompt: Annotated[
        str | Tokens | Annotated[list[str | Tokens], Field(fail_fast=True)], AfterValidator(as_prompts)]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)  # here even 0 asks for them
    echo: bool = False

    @property
    def logprobs_asked(self) -> Json:
        # With max_tokens=0 the engine has only the prompt to read: for its log-probabilities, wanted or not.
        reads = not self.max_tokens or self.echo and self.logprobs is not None
        return {"logprobs": self.logprobs, "prompt_logprobs": (self.logprobs or 0) if reads else None}

    @property
    def size(self) -> int:
        return len(self.prompt) * self.n

    def encode(self, tokenizer: Tokenizer, chats: bool, context: int) -> Encoded:
        bos = tokenizer.get_bos_token_id()
        prompts, echo_from = [], []
        for prompt in cast(list[str | list[int]], self.prompt):
            tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            check_tokens(tokens, tokenizer, "prompt")
            added = [] if tokens[:1] == [bos] else [bos]    # is not repeated
            prompts.append(added + tokens)
            if self.echo:
                echo_from.append(len(added))
        return prompts, echo_from
