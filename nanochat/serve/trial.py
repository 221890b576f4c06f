"""
Compiling a grammar, tried first in a process of its own, which the system ends when that takes too long.

llguidance cannot be stopped, and a small schema may keep it busy for ever. What it compiles to cannot be sent from one
process to another either; so the engine compiles again, but only what has ended here in time. Imports no torch: a
process is there in a tenth of a second.
"""
import pickle
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from nanochat.runtime.errors import UserError, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILE_SECONDS = 2     # of the processor, to one more: the system counts whole ones. Usual schemas take milliseconds.
TRIAL = "from nanochat.serve.trial import main; main()"
# Limits of llguidance's work, as it counts it: one answer's next token must not keep the others waiting.
WORK_LIMITS = dict(
    initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=20_000,
    precompute_large_lexemes=False, verbose_errors=False)

idle: list[subprocess.Popen] = []   # processes that wait for the next grammar


def make_matcher(expression: str, vocabulary: "LLTokenizer") -> "LLMatcher":
    """What is wrong with the grammar is known after the first mask only."""
    from llguidance import LLMatcher, LLParserLimits

    # log_level 0: no client's words in the log.
    return LLMatcher(vocabulary, f"start: {expression}", log_level=0, limits=LLParserLimits(**WORK_LIMITS))


def try_to_compile(expression: str, vocab_size: int) -> None:
    """UserError if the grammar is wrong or not supported, or takes more than COMPILE_SECONDS. From any thread."""
    command, pipe = [sys.executable, "-c", TRIAL], subprocess.PIPE
    process = idle.pop() if idle else subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    try:
        pickle.dump((expression, vocab_size), process.stdin)
        process.stdin.flush()
        error = pickle.load(process.stdout)
        idle.append(process)
    except (EOFError, OSError):
        process.wait()
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
    """The process; it ends with its pipe."""
    from llguidance import LLTokenizer

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    while sys.stdin.buffer.peek():
        expression, vocab_size = pickle.load(sys.stdin.buffer)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + COMPILE_SECONDS, most))
        matcher = make_matcher(expression, LLTokenizer(Bytes(vocab_size)))
        matcher.compute_bitmask()
        pickle.dump(matcher.get_error(), sys.stdout.buffer)
        sys.stdout.buffer.flush()
