"""What the web process and its engines' processes send to each other, and errors as clients see them."""
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException

from nanochat.inference.detokenizer import Delta
from nanochat.inference.engine import FinishReason
from nanochat.inference.logprobs import TokenLogprob
from nanochat.inference.sampling import SamplingParams

Json = dict[str, Any]

TIMEOUT = 300.0     # seconds for a request; then its answers end with what they have


class ApiError(HTTPException):
    """An error in OpenAI's shape. The official client raises another exception class for each status."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        self.code, self.param = code, param

    def body(self) -> Json:
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, headers={"Retry-After": "5"})


@dataclass(eq=False)
class Request:
    """What a client asks for: n choices for each prompt."""
    prompts: list[list[int]]
    sampling: SamplingParams
    grammar: str | None = None              # what the choices must fit, for llguidance
    n: int = 1
    stop: Sequence[str] = ()
    client: str = ""                        # its address: places and queue are shared fairly among clients
    echo_from: Sequence[int] = ()           # for each prompt: from this token on it is repeated; (): no echo
    started: float = field(default_factory=time.monotonic)  # the system's clock: the same in every process
    id: int = field(default_factory=itertools.count().__next__)

    @property
    def size(self) -> int:
        """Choices in all."""
        return len(self.prompts) * self.n


class PlacedLogprob(NamedTuple):
    """The log-probability of a token of a choice's text."""
    logprob: TokenLogprob
    is_content: bool    # of a message: neither a special token nor one of the calculator's
    offset: int         # characters of the text before it


@dataclass
class Chunk:
    """What was written of one choice since its last chunk."""
    index: int                      # of the choice: first the n choices of the first prompt, then those of the second
    deltas: list[Delta] = field(default_factory=list)
    logprobs: list[PlacedLogprob] = field(default_factory=list)
    tokens: int = 0                 # those without text count as well
    cached: int = 0                 # tokens of its prompt that were in the prompt cache
    finish_reason: FinishReason | None = None


Chunks = AsyncIterator[list[Chunk]]
Batch = dict[int, list[Chunk] | ApiError]   # by the request's id
