"""
A grammar is first compiled in a process of its own, which the system ends if it takes too long.

llguidance cannot be interrupted, and a small schema may keep it busy for ever. Its result cannot be sent to another
process either, so the engine compiles the grammar again, but only after a trial that ended in time. This file does not
import torch, so the process starts in a tenth of a second.
"""
import functools
import importlib.util
import re
import resource
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from nanochat.runtime.errors import UserError, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_LENGTH = 2**16
# Processor time. The system counts whole seconds and allows one more. Usual schemas take milliseconds.
COMPILE_SECONDS = 2
SPECIAL_TOKEN = re.compile(r"<\[\d+\]>")
TRIAL = "from nanochat.serve.grammar_trial import main; main()"
# Limits in llguidance's own units of work: all answers wait while the next token of one is chosen.
WORK_LIMITS = dict(
    initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=20_000,
    precompute_large_lexemes=False, verbose_errors=False)


def make_matcher(expression: str, vocabulary: "LLTokenizer") -> "LLMatcher":
    """An error in the grammar shows only after the first mask."""
    from llguidance import LLMatcher, LLParserLimits

    # log_level 0: no client's words in the log.
    return LLMatcher(vocabulary, f"start: {expression}", log_level=0, limits=LLParserLimits(**WORK_LIMITS))


@functools.lru_cache(256)
def try_to_compile(expression: str) -> None:
    """
    UserError if the grammar is wrong, too long, not supported, or takes more than COMPILE_SECONDS, or if the library is
    missing. RuntimeError if the trial itself fails. Successes are remembered. Can be called from any thread.
    """
    if importlib.util.find_spec("llguidance") is None:
        raise UserError("answers of a prescribed form need the package llguidance: . ./setup.sh structured")
    if len(expression) > MAX_GRAMMAR_LENGTH:
        sizes = f"{len(expression):,} characters; at most {MAX_GRAMMAR_LENGTH:,} are allowed"
        raise UserError(f"the form of the answer: {sizes}")
    command = [sys.executable, "-X", "utf8", "-c", TRIAL]
    pipes: Any = dict(input=expression, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8")
    trial = subprocess.run(command, **pipes)
    error = trial.stdout
    if trial.returncode > 0:
        raise RuntimeError(f"the trial of a grammar ended with code {trial.returncode}")
    # A negative code means a signal: time was up.
    if trial.returncode:
        error = f"it takes more than {COMPILE_SECONDS} s to compile; use fewer or simpler patterns"
    if error:
        raise UserError(f"the form of the answer: {first_line(ValueError(error))}")


def main() -> None:
    """The process of a trial: a grammar on stdin, what is wrong with it on stdout."""
    from llguidance import LLTokenizer

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (COMPILE_SECONDS + 1, most))
    # Compiling takes equally long with single-byte tokens. This vocabulary has few special tokens; any one will do.
    expression = SPECIAL_TOKEN.sub("<[256]>", sys.stdin.read())
    matcher = make_matcher(expression, LLTokenizer("byte"))
    matcher.compute_bitmask()
    sys.stdout.write(matcher.get_error())
