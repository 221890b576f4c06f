"""
Compiles grammars with llguidance, and tries one in a process of its own, which the system ends if it takes too long:

    python -m nanochat.serve.grammar_trial < GRAMMAR    prints what is wrong with it

llguidance cannot be interrupted, its limits do not cover `allOf`, and its result cannot be sent to another process: the
engine compiles the grammar again, but only after a trial that ended in time. This file does not import torch, so the
process starts in a tenth of a second.
"""
import re
import resource
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Processor time. Usual schemas take milliseconds.
COMPILE_SECONDS = 3
SPECIAL_TOKEN = re.compile(r"<\[\d+\]>")
# Limits in llguidance's own units of work: all answers wait while the next token of one is chosen.
WORK_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=20_000,
    precompute_large_lexemes=False, verbose_errors=False)


def make_matcher(expression: str, vocabulary: LLTokenizer) -> LLMatcher:
    """An error in the grammar shows only after the first mask."""
    # log_level 0: no client's words in the log.
    return LLMatcher(vocabulary, f"start: {expression}", log_level=0, limits=WORK_LIMITS)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (COMPILE_SECONDS, COMPILE_SECONDS))
    # Compiling takes equally long with single-byte tokens. This vocabulary has few special tokens; any one will do.
    matcher = make_matcher(SPECIAL_TOKEN.sub("<[256]>", sys.stdin.read()), LLTokenizer("byte"))
    matcher.compute_bitmask()
    sys.stdout.write(matcher.get_error())
