"""Errors in OpenAI's shape."""
from typing import Any

from starlette.exceptions import HTTPException


class ApiError(HTTPException):
    """What a client is told instead of an answer. The official client raises another exception class per status."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        self.code, self.param = code, param

    def body(self) -> dict[str, Any]:
        status = self.status_code
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, "unavailable", headers={"Retry-After": "5"})
