"""
Answers of a prescribed form: JSON, JSON that fits a schema, one of several texts, a call of a function.

After every token a grammar says which tokens may come next, and the engine draws among these only. llguidance (the
extra "structured") makes grammars from JSON schemas and finds the tokens; what it does not support is refused. JSON is
written without blanks between its tokens: a model that may write blanks may write nothing else until max_tokens.
"""
import asyncio
import copy
import functools
import json
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, FailFast, Field, model_validator
from torch import Tensor

from nanochat.engine import default_stop
from nanochat.errors import UserError, first_line
from nanochat.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_BYTES = 2**16   # of a grammar
# Of llguidance's work, which it counts: so that one answer's next token does not keep the others waiting.
LIMITS = dict(
    initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=20_000,
    precompute_large_lexemes=False, verbose_errors=False)
COMPILER = ThreadPoolExecutor(1, "grammars")    # a grammar waits for another one, tokens for none
TURNS: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()  # by client, while any waits


class Grammar:
    """
    What one answer may still become. allowed: (V,) bool, the tokens that may come next; one that ends the answer is
    among them exactly when what was written is complete.
    """

    def __init__(self, matcher: "LLMatcher", vocab_size: int):
        """UserError if the grammar is wrong or not supported."""
        self.matcher, self.vocab_size = matcher, vocab_size
        self.allowed = self._allowed()

    def start(self) -> "Grammar":
        """A copy, for one more answer."""
        other = copy.copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    def advance(self, token: int) -> None:
        """The answer has one token more, an allowed one. UserError when it takes too long to find the next ones."""
        self.matcher.consume_token(token)
        self.allowed = self._allowed()

    def _allowed(self) -> Tensor:
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        if self.matcher.is_error():
            raise UserError(f"the form of the answer: {first_line(ValueError(self.matcher.get_error()))}")
        return torch.from_numpy(np.unpackbits(bits, count=self.vocab_size, bitorder="little").view(bool))


Choices = Annotated[list[str], Field(min_length=1), FailFast()]


class JsonSchema(BaseModel):
    definition: dict[str, Any] = Field({}, alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel, extra="forbid"):
    choice: Choices


class Formed(BaseModel):
    """The fields of a request that prescribe a form: OpenAI's; for lists of choices vLLM's, the newer and the older."""
    response_format: ResponseFormat = ResponseFormat(type="text")
    structured_outputs: StructuredOutputs | None = None
    guided_choice: Choices = []

    @model_validator(mode="after")
    def check_form(self) -> Self:
        formats = self.response_format.type != "text", self.structured_outputs, self.guided_choice
        if sum(map(bool, formats)) > 1:
            raise ValueError("only one of response_format, structured_outputs and guided_choice can be met")
        if self.response_format.type == "json_schema" and self.response_format.json_schema is None:
            raise ValueError("response_format.json_schema is missing")
        return self

    def form(self, tokenizer: Tokenizer) -> str | None:
        """A grammar's expression for the answer; None: any text."""
        choices = self.structured_outputs.choice if self.structured_outputs else self.guided_choice
        if choices:
            return " | ".join(map(json.dumps, choices))
        if self.response_format.type == "text":
            return None
        any_object = self.response_format.type == "json_object"
        return json_of({"type": "object"} if any_object else self.response_format.json_schema.definition)


def json_of(schema: dict[str, Any]) -> str:
    """A grammar's expression for JSON that fits a schema."""
    compact = {"x-guidance": {"whitespace_flexible": False}}  # llguidance's own options, which a client may not choose
    return f"%json {json.dumps(schema | compact)}"


async def compile_grammar(expression: str, tokenizer: Tokenizer, client: str = "") -> Grammar:
    """
    In a thread of its own, at most one for each client at a time: another client waits for one of them. UserError for
    what is wrong, too large or not supported, or if the library is missing.
    """
    if re.search(r'"multipleOf": [-\d]', expression):
        raise UserError("the form of the answer: multipleOf is not supported; leave it out")
    if len(expression) > MAX_BYTES:
        words = f"{len(expression):,} characters; at most {MAX_BYTES:,} are allowed"
        raise UserError(f"the form of the answer: {words}")
    async with TURNS.setdefault(client, asyncio.Lock()):
        return await asyncio.get_running_loop().run_in_executor(COMPILER, compiled, expression, tokenizer)


def compiled(expression: str, tokenizer: Tokenizer) -> Grammar:
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ImportError:
        raise UserError("answers of a prescribed form need the package llguidance: . ./setup.sh structured") from None
    vocabulary, limits = vocabulary_of(tokenizer), LLParserLimits(**LIMITS)
    matcher = LLMatcher(vocabulary, f"start: {expression}", log_level=0, limits=limits)  # 0: no user's words in the log
    return Grammar(matcher, tokenizer.get_vocab_size())


@functools.cache
def vocabulary_of(tokenizer: Tokenizer) -> "LLTokenizer":
    """As llguidance has it. Takes half a second for 65,536 tokens."""
    from llguidance.tiktoken import lltokenizer_from_encoding

    stop = [*default_stop(tokenizer)]
    return lltokenizer_from_encoding(tokenizer.encoding, n_vocab=tokenizer.get_vocab_size(), eos_token=stop)
