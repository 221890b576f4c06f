"""
Answers of a prescribed form: JSON, JSON that fits a schema, one of several texts, a call of a function.

After every token a grammar says which tokens may come next, and the engine draws among these only. llguidance (the
extra "structured") makes grammars from JSON schemas and finds the tokens; what it does not support is refused. JSON is
written without blanks between its tokens: a model that may write blanks may write nothing else until max_tokens.
"""
import asyncio
import functools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanochat.engine import default_stop
from nanochat.errors import UserError, first_line
from nanochat.tokenizer import Tokenizer

MAX_BYTES = 2**16   # of a grammar
# llguidance counts its work. With these limits a grammar of MAX_BYTES takes … s, a token … ms.
LIMITS = dict(
    initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=20_000,
    verbose_errors=False)
COMPILER = ThreadPoolExecutor(1, "grammars")    # a grammar waits for another one, tokens for none


class Grammar:
    """
    What one answer may still become. allowed: (V,) bool, the tokens that may come next; one that ends the answer is
    among them exactly when what was written is complete.
    """

    def __init__(self, matcher: "llguidance.LLMatcher", vocab_size: int):  # noqa: F821
        """UserError if the grammar is wrong or not supported."""
        self.matcher, self.vocab_size = matcher, vocab_size
        self.allowed = self._allowed()

    def start(self) -> "Grammar":
        """A copy, for one more answer."""
        return Grammar(self.matcher.deep_copy(), self.vocab_size)

    def advance(self, token: int) -> None:
        """The answer has one token more, an allowed one. UserError when it takes too long to find the next ones."""
        self.matcher.consume_token(token)
        self.allowed = self._allowed()

    def _allowed(self) -> Tensor:
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        if self.matcher.is_error():
            raise UserError(f"the form of the answer: {first_line(ValueError(self.matcher.get_error()))}")
        return torch.from_numpy(np.unpackbits(bits, count=self.vocab_size, bitorder="little").view(bool))


def json_of(schema: dict[str, Any]) -> str:
    """A grammar's expression for JSON that fits a schema."""
    compact = {"x-guidance": {"whitespace_flexible": False}}  # llguidance's own options, which a client may not choose
    return f"%json {json.dumps(schema | compact)}"


def one_of(texts: Sequence[str]) -> str:
    """A grammar's expression for one of some texts."""
    return " | ".join(map(json.dumps, texts))


async def compile_grammar(expression: str, tokenizer: Tokenizer) -> Grammar:
    """In a thread of its own. UserError for what is wrong, too large or not supported, or if the library is missing."""
    if len(expression) > MAX_BYTES:
        raise UserError(f"the form of the answer has {len(expression):,} characters; at most {MAX_BYTES:,} are allowed")
    return await asyncio.get_running_loop().run_in_executor(COMPILER, compiled, expression, tokenizer)


def compiled(expression: str, tokenizer: Tokenizer) -> Grammar:
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ImportError:
        raise UserError("answers of a prescribed form need the package llguidance: . ./setup.sh structured") from None
    vocabulary, limits = vocabulary_of(tokenizer), LLParserLimits(**LIMITS)
    return Grammar(LLMatcher(vocabulary, f"start: {expression}", log_level=0, limits=limits), tokenizer.get_vocab_size())


@functools.cache
def vocabulary_of(tokenizer: Tokenizer) -> "llguidance.LLTokenizer":  # noqa: F821
    """As llguidance has it. Takes half a second for 65,536 tokens."""
    from llguidance.tiktoken import lltokenizer_from_encoding

    stop = [*default_stop(tokenizer)]
    return lltokenizer_from_encoding(tokenizer.encoding, n_vocab=tokenizer.get_vocab_size(), eos_token=stop)
