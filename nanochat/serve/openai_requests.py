"""
The supported part of OpenAI's HTTP interface: what a request may say. replies.py builds the answers.

Extensions:

    top_k                 only the k most probable tokens; 0 or -1: all
    parts                 in an answer's message, and in an assistant's message of a request: everything in order, as
                          [{"type": "text" | "python" | "python_output", "text": ...}, ...]. Calls of the model's own
                          tools and their results are here, not in `content`; a library's passage has a
                          "source", {"title": ..., "place": "notes/wine.md:14"}, "before" if text precedes it, and
                          "missing" if it lacks words of the question. In a request `parts` (or a list of such parts
                          as `content`) replaces `content`, so a received message can be sent back.
    delta.parts           in a stream, [{"index": k, "type": ..., "text": ...}]: more text of part k. OpenAI's Python
                          client appends it there, its JavaScript client does not. Text is in `content` as well
    truncation            "auto": the oldest turns of a conversation are left out if the answer would lack room:
                          max_tokens, at most half of the context. System messages and the last question stay
    forgotten             in a chat's answer or chunk: how many messages were left out, if any
    context_length, max_tokens, temperature, top_k, examples, chat   in the list of models. examples: questions to
                          suggest; chat false: a base model, which continues the messages as one text

Log-probabilities belong to the model's own distribution: after the softcap, before temperature and the request's other
settings, in float32. In a chat `content` has them for the tokens of the content, and `others` for special tokens, calls
and results, each with its offset in the text of all parts. A completion's prompts are texts, read after <|bos|>.

Messages may come in any order: consecutive system and user messages are one turn, the assistant may begin, and its
message at the end is continued.

Differences: max_tokens above the server's limit means the limit. The limit and the end of the context end an answer
with finish_reason "length". usage counts every token that was written, including tools' tokens and the end token.
max_tokens -1 means no limit, as in llama.cpp; of max_tokens and max_completion_tokens the smaller holds. Without
`model` the server's answers. Hints on how to think, or what to store, are ignored; an unsupported parameter that would
change the answer is an error: tools, response_format, echo, penalties and logit_bias are for servers of exported
models.
"""
import codecs
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, TypeAdapter, ValidationError

from nanochat.data.conversation import parts, recent, render_prompt, render_text
from nanochat.inference.sampling import SamplingParams
from nanochat.runtime.files import read_toml
from nanochat.serve.protocol import NOT_HERE, ApiError, Json, Request
from nanochat.serve.served_model import ServedModel

# Parameters that are not fields of a request, and what happens to them.
OTHERS = read_toml("serve/interface.toml")
FIELDS = TypeAdapter(Json)
NO_LIMIT = 10**9
MaxTokens = Annotated[int, Field(ge=1), BeforeValidator(lambda count: NO_LIMIT if count == -1 else count)]
# Fields that SamplingParams has under the same name, with the same meaning.
SAME = {"temperature", "top_p", "seed", "logprobs"}


def as_list(value: Any) -> Any:
    """OpenAI's interface takes a single text in place of a list."""
    return [value] if isinstance(value, str) else value


class BaseRequest(BaseModel):
    """The fields that all kinds of requests have. The server's defaults replace what is missing or null."""
    model_config = ConfigDict(allow_inf_nan=False)
    # The name of the field with the prompt.
    param: ClassVar[str]
    uses_tools: ClassVar[bool] = False
    model: str = ""         # empty: the server's only one
    max_tokens: MaxTokens = NO_LIMIT
    temperature: float = Field(ge=0)
    top_k: int = Field(ge=-1)
    top_p: float = Field(1.0, ge=0, le=1)
    seed: int | None = None
    n: int = Field(1, ge=1)
    # How many of the most probable tokens are told for each token of the answer; None: no log-probabilities.
    logprobs: int | None = Field(None, ge=0, le=20)
    # Every character of an answer is compared with every string.
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=32), BeforeValidator(as_list)] = []
    stream: bool = False
    stream_options: dict[str, bool | None] = {}

    @classmethod
    def parse(cls, body: bytes, defaults: Json) -> Self:
        """The request in a body. ApiError, 400, for anything that cannot be answered as meant."""
        try:
            # PowerShell and others put a byte order mark in front.
            fields = FIELDS.validate_json(body.removeprefix(codecs.BOM_UTF8))
            known = cls.model_fields.keys() | OTHERS["ignored"]
            for name, value in fields.items():
                if value and name not in known and value != OTHERS["neutral"].get(name):
                    words = f"{name:.80} {NOT_HERE}, or leave it out"
                    raise ApiError(400, words, "unsupported_parameter", name[:80])
            return cls.model_validate(defaults | {name: value for name, value in fields.items() if value is not None})
        except ValidationError as errors:
            error = errors.errors()[0]
            where = ".".join(map(str, error["loc"]))
            raise ApiError(400, f"{where or 'the body'}: {error['msg']}", param=where) from None

    def encode(self, model: ServedModel) -> Json:
        """The fields of a Request that say what the model reads."""
        raise NotImplementedError

    def prepare(self, model: ServedModel, max_new_tokens: int) -> Request:
        """The request as an engine reads it. ApiError, 400, if this model cannot answer it."""
        encoded = self.encode(model)
        prompts = encoded["prompts"]
        if len(prompts) * self.n > model.max_batch:
            raise ApiError(400, f"too many answers at once: this server takes at most {model.max_batch}", param="n")
        longest = max(map(len, prompts))
        if longest > model.context:
            # OpenAI's words: clients look for them.
            words = (f"This model's maximum context length is {model.context} tokens. However, your {self.param} "
                     f"resulted in {longest} tokens. Please reduce the length of the {self.param}.")
            raise ApiError(400, words, "context_length_exceeded", self.param)
        sampling = SamplingParams(
            max_tokens=min(self.max_tokens, max_new_tokens), top_k=max(self.top_k, 0),
            tools=self.uses_tools and model.chats, **self.model_dump(include=SAME))
        return Request(sampling=sampling, n=self.n, stop=self.stop, **encoded)


# ---- Conversations


def as_parts(content: Any) -> Any:
    return [] if content is None else parts(content)


class MessagePart(BaseModel):
    type: Literal["text", "python", "python_output"]
    text: str


# FailFast: one error, not one for each of half a million wrong parts.
Parts = Annotated[list[MessagePart], FailFast(), BeforeValidator(as_parts)]


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts = []
    parts: Parts = []

    def turn(self) -> Json:
        """The message in nanochat.data.conversation's form."""
        # An answer that was stopped at once has no content.
        if self.role == "assistant":
            return {"role": self.role, "content": [part.model_dump() for part in self.parts or self.content]}
        if not self.content:
            raise ApiError(400, "content must be a text or a list of parts", param="messages")
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatRequest(BaseRequest):
    param: ClassVar[str] = "messages"
    uses_tools: ClassVar[bool] = True
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    # OpenAI's newer name. Clients that do not know which one a server takes send both.
    max_completion_tokens: MaxTokens = NO_LIMIT
    truncation: Literal["auto", "disabled"] = "disabled"
    # In a chat `logprobs` is true or false.
    top_logprobs: int = Field(0, ge=0, le=20)

    def model_post_init(self, context: Any) -> None:
        self.max_tokens = min(self.max_tokens, self.max_completion_tokens)
        self.logprobs = self.top_logprobs if self.logprobs or self.top_logprobs else None

    def encode(self, model: ServedModel) -> Json:
        turns = [message.turn() for message in self.messages]

        def encoded(messages: list[Json]) -> list[int]:
            conversation = {"messages": messages}
            if not model.chats:
                return render_text(model.tokenizer, conversation)
            return render_prompt(model.tokenizer, conversation, continue_last=True)

        kept = turns
        if self.truncation == "auto":
            room = min(self.max_tokens, model.context // 2)
            kept = recent(turns, lambda messages: len(encoded(messages)), model.context - room)
        return {"prompts": [encoded(kept)], "forgotten": len(turns) - len(kept)}


class CompletionRequest(BaseRequest):
    """Continues texts, without tools."""
    param: ClassVar[str] = "prompt"
    # At most 1,024: 340,000 empty prompts take 18 seconds to encode.
    prompt: Annotated[list[str], Field(min_length=1, max_length=1024), FailFast(), BeforeValidator(as_list)]
    max_tokens: MaxTokens = 16

    def encode(self, model: ServedModel) -> Json:
        return {"prompts": model.tokenizer.encode(self.prompt, prepend="<|bos|>")}
