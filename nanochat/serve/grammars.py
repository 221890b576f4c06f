"""
Grammars: after every token they say which ones may come next, and the engine draws among these only. llguidance (the
extra "structured") makes them from JSON schemas and finds the tokens; what it does not support is refused.
"""
import copy
import functools
import re
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.engine import default_stop
from nanochat.runtime.errors import UserError, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_BYTES = 2**16   # of a grammar
# Of llguidance's work, which it counts: so that one answer's next token does not keep the others waiting.
LIMITS = dict(
    initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=20_000,
    precompute_large_lexemes=False, verbose_errors=False)


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


def compile_grammar(expression: str, tokenizer: Tokenizer) -> Grammar:
    """Takes up to seconds. UserError for what is wrong, too large or not supported, or if the library is missing."""
    if re.search(r'"multipleOf": [-\d]', expression):
        raise UserError("the form of the answer: multipleOf is not supported; leave it out")
    if len(expression) > MAX_BYTES:
        words = f"{len(expression):,} characters; at most {MAX_BYTES:,} are allowed"
        raise UserError(f"the form of the answer: {words}")
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
