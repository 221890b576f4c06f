"""What the web server and an engine tell each other, and errors as clients see them."""
import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from nanochat.inference.engine import FinishReason
from nanochat.inference.logprobs import TokenLogprob
from nanochat.inference.sampling import SamplingParams

Json = dict[str, Any]
# After the name of a path or a parameter.
NOT_HERE = "is not supported; export the model (python -m scripts.export_hf) and serve it with a server that has it"


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

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status_code, self.headers)


@dataclass
class Chunk:
    """What an engine has written of one choice since the last chunk."""
    index: int                      # number of the choice: the n choices of the first prompt, of the second, …
    tokens: list[int]
    logprobs: Sequence[TokenLogprob] = ()       # none, or one for each token
    finish_reason: FinishReason | None = None


Chunks = AsyncIterator[Chunk]


@dataclass(eq=False)
class Request:
    """
    What a client wants, n choices for each prompt, and what an engine has sent of it. `received` and `watcher` are the
    event loop's; the engine's thread reads the rest.
    """
    prompts: list[list[int]]
    sampling: SamplingParams
    n: int = 1
    stop: Sequence[str] = ()
    forgotten: int = 0                      # messages left out to make room for an answer
    received: asyncio.Queue[Chunk | ApiError] = field(default_factory=asyncio.Queue)
    # Takes choices away from the engine.
    drop: Callable[[set[int]], None] = lambda indices: None
    watcher: asyncio.Task | None = None     # cancels this request when its client disconnects

    def __post_init__(self) -> None:
        self.open = set(range(self.size))   # numbers of the choices that have not ended

    @property
    def size(self) -> int:
        """Choices in all."""
        return len(self.prompts) * self.n

    async def chunks(self) -> Chunks:
        """All chunks until all choices have ended. Raises the ApiError that ends the request early."""
        while self.open or not self.received.empty():
            item = await self.received.get()
            if isinstance(item, ApiError):
                self.open.clear()
                raise item
            if item.index in self.open:
                if item.finish_reason:
                    self.open.remove(item.index)
                yield item

    def close(self, index: int) -> None:
        """End one choice, which is complete although the engine would go on."""
        self.open.discard(index)
        self.drop({index})

    def end(self, error: ApiError) -> None:
        """End all choices that are left, if any."""
        if self.open:
            self.drop(set(self.open))
            self.open.clear()
            self.received.put_nowait(error)
