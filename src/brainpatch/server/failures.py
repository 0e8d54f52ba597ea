"""Errors as OpenAI's API writes them: `{"error": {"message", "type", "param", "code"}}` with a status."""

from __future__ import annotations

from typing import Any, Final

from brainpatch.errors import ERRORS, BrainPatchError

STATUS: Final[dict[str, int]] = {
    "BP106": 413,
    "BP301": 409,
    "BP401": 404,
    "BP407": 503,
    "BP409": 503,
    "BP501": 503,
    "BP506": 500,
    "BP507": 503,
    "BP508": 500,
    "BP701": 401,
    "BP702": 404,
    "BP703": 413,
    "BP704": 400,
    "BP705": 429,
    "BP706": 503,
    "BP707": 400,
    "BP708": 408,
    "BP709": 404,
    "BP710": 409,
}
"""Error code -> HTTP status, where it is not 400."""

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_PARAM: Final = {"BP401": "brainpatch", "BP402": "brainpatch", "BP403": "brainpatch", "BP702": "model"}


def status_of(error: BrainPatchError) -> int:
    """The HTTP status that an error is answered with."""
    return STATUS.get(error.code, 400)


def as_json(error: BrainPatchError) -> dict[str, Any]:
    """The body of the answer."""
    status = status_of(error)
    return {
        "error": {
            "message": f"{ERRORS[error.code].title}: {error.reason}. {error.remedy}".replace(".. ", ". "),
            "type": _TYPES.get(status, "server_error"),
            "param": _PARAM.get(error.code),
            "code": error.code,
        }
    }


def headers_of(error: BrainPatchError) -> dict[str, str]:
    """Headers that belong to the status."""
    if status_of(error) in (429, 503):
        return {"Retry-After": "1"}
    if status_of(error) == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {}
