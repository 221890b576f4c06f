"""
Compiling a grammar, tried first in a process of its own, which the system ends when that takes too long.

llguidance cannot be stopped, and a small schema may keep it busy for ever. What it compiles to cannot be sent from one
process to another either; so the engine compiles again, but only what has ended here in time. Imports no torch: a
process is there in a tenth of a second.
"""
import functools
import resource
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from nanochat.runtime.errors import UserError, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILE_SECONDS = 2     # of the processor, to one more: the system counts whole ones. Usual schemas take milliseconds.
TRIAL = "from nanochat.serve.grammar_trial import main; main()"
# Limits of llguidance's work, as it counts it: one answer's next token must not keep the others waiting.
WORK_LIMITS = dict(
    initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=20_000,
    precompute_large_lexemes=False, verbose_errors=False)


def make_matcher(expression: str, vocabulary: "LLTokenizer") -> "LLMatcher":
    """What is wrong with the grammar is known after the first mask only."""
    from llguidance import LLMatcher, LLParserLimits

    # log_level 0: no client's words in the log.
    return LLMatcher(vocabulary, f"start: {expression}", log_level=0, limits=LLParserLimits(**WORK_LIMITS))


@functools.lru_cache(256)
def try_to_compile(expression: str, vocab_size: int) -> None:
    """
    UserError if the grammar is wrong or not supported, or takes more than COMPILE_SECONDS; RuntimeError if the process
    fails for a reason of its own. What has passed once passes. From any thread.
    """
    command = [sys.executable, "-X", "utf8", "-c", TRIAL, str(vocab_size)]
    pipes: Any = dict(input=expression, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8")
    trial = subprocess.run(command, **pipes)
    error = trial.stdout
    if trial.returncode > 0:
        raise RuntimeError(f"the trial of a grammar ended with code {trial.returncode}")
    if trial.returncode:  # by a signal: its time was over
        error = f"it takes more than {COMPILE_SECONDS} s to compile; use fewer or simpler patterns"
    if error:
        raise UserError(f"the form of the answer: {first_line(ValueError(error))}")


class Bytes:
    """A tokenizer as llguidance asks for one: single bytes. Compiling takes as long as with any other of this size."""
    is_tokenizer_wrapper, bos_token_id, __call__ = True, None, staticmethod(lambda text: [*text.encode()])

    def __init__(self, vocab_size: int):
        self.special_token_ids = range(256, vocab_size)
        self.eos_token_id = vocab_size - 1
        self.tokens = [bytes([token]) for token in range(256)] + [b"\xff%d" % token for token in self.special_token_ids]


def main() -> None:
    """The process."""
    from llguidance import LLTokenizer

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (COMPILE_SECONDS + 1, most))
    matcher = make_matcher(sys.stdin.read(), LLTokenizer(Bytes(int(sys.argv[1]))))
    matcher.compute_bitmask()
    sys.stdout.write(matcher.get_error())
