"""Messages between the web process and its engine processes, and errors as clients see them."""
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

# Seconds for a request. After them its answers end with the text so far.
TIMEOUT = 300.0


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
    """What a client wants: n choices for each prompt."""
    prompts: list[list[int]]
    sampling: SamplingParams
    grammar: str | None = None              # llguidance's expression that the choices must fit
    n: int = 1
    stop: Sequence[str] = ()
    client: str = ""                        # the address: clients share places and queue fairly
    echo_from: Sequence[int] = ()           # for each prompt the first token that is repeated; (): no echo
    forgotten: int = 0                      # messages left out to make room for an answer
    # The system's monotonic clock is the same in every process.
    started: float = field(default_factory=time.monotonic)
    id: int = field(default_factory=itertools.count().__next__)

    @property
    def size(self) -> int:
        """Choices in all."""
        return len(self.prompts) * self.n


class PlacedLogprob(NamedTuple):
    """The log-probability of a token, and the token's place in the text of a choice."""
    logprob: TokenLogprob
    is_content: bool    # part of a message's content: neither a special token nor part of a tool call
    offset: int         # characters of text before the token


@dataclass
class Chunk:
    """The new text of one choice since its last chunk."""
    index: int                      # number of the choice: the n choices of the first prompt, of the second, …
    deltas: list[Delta] = field(default_factory=list)
    logprobs: list[PlacedLogprob] = field(default_factory=list)
    tokens: int = 0                 # includes tokens without text
    finish_reason: FinishReason | None = None


Chunks = AsyncIterator[Chunk]
# By the request's id.
Batch = dict[int, list[Chunk] | ApiError]
