"""What an operator decides about a server, and how it travels into vLLM's own server: by the environment."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from brainpatch.errors import RequestError, ServerError

ENVIRONMENT: Final = {
    "patches": "BRAINPATCH_PATCHES",
    "default_off": "BRAINPATCH_DEFAULT_OFF",
    "admin_key": "BRAINPATCH_ADMIN_KEY",
    "model_id": "BRAINPATCH_MODEL_ID",
    "compatibility_mode": "BRAINPATCH_MODE",
    "max_requests": "BRAINPATCH_MAX_REQUESTS",
}
"""Setting -> environment variable that an own vLLM reads it from. `patches` is a list of words, or a JSON list."""

MAX_BODY_BYTES: Final = 32 << 20
"""A request's body; images in messages make it large."""
_GUARDED: Final = ("/v1", "/v2", "/inference", "/cohere")
"""Where users' keys are asked for, as vLLM does; and beyond that for whatever may be work."""
BODY_SECONDS: Final = 60.0
"""How long a client may take to send a body."""


@dataclass(frozen=True)
class Settings:
    """`patches`: names, paths or hub references with a strength as in formal@0.8, put on the model at the start,
    and off unless asked for with `default_off`. Without `api_keys` anybody may ask; without `admin_key` nobody
    may change patches. `model_id` is the name that patches know the model by, `served_model_name` the one that requests
    use. `max_requests` are in work or waiting at once; more are answered 429.
    """

    patches: Sequence[str] = ()
    default_off: bool = False
    api_keys: Sequence[str] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)
    model_id: str | None = None
    served_model_name: str | None = None
    compatibility_mode: str = "strict"
    max_requests: int = 1024
    max_body_bytes: int = MAX_BODY_BYTES
    body_seconds: float = BODY_SECONDS
    _digests: tuple[bytes, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        if any(not key for key in (*self.api_keys, *([] if self.admin_key is None else [self.admin_key]))):
            raise RequestError("BP404", "a key is empty", "Leave it out, or give a long random one.")
        if self.max_requests < 1:
            raise RequestError("BP404", "max_requests is less than 1")
        object.__setattr__(self, "patches", tuple(self.patches))
        object.__setattr__(self, "_digests", tuple(_digest(key) for key in self.api_keys))

    def check_key(self, method: str, path: str, authorization: str | None) -> None:
        """Whether this request may be made at all; asked before its body is read.

        Text and lists are for users, changes of patches for the admin. Errors: ServerError (BP701; BP709 for a change
        where there is no admin key).
        """
        ours = path == "/brainpatch" or path.startswith("/brainpatch/")
        if ours and method not in ("GET", "HEAD", "OPTIONS"):
            if self.admin_key is None:
                raise ServerError("BP709", "there is no such route")
            if not _matches(authorization, (_digest(self.admin_key),)):
                raise ServerError("BP701", "this route needs the admin key")
        elif (
            self.api_keys
            and method != "OPTIONS"
            and (ours or path.startswith(_GUARDED) or _works(method, path))
        ):
            admin = (_digest(self.admin_key),) if ours and self.admin_key is not None else ()
            if not _matches(authorization, (*self._digests, *admin)):
                raise ServerError("BP701", "the request has no valid API key")

    def client(self, authorization: str | None, address: str) -> str:
        """Who asks, for turns: by key where keys are asked for, else by address."""
        return (authorization or "").partition(" ")[2].strip() if self.api_keys else address

    def to_environment(self) -> dict[str, str]:
        """The variables that `from_environment` reads; keys of users go another way, as vLLM's own."""
        values = {
            "patches": json.dumps(list(self.patches)),
            "default_off": "1" if self.default_off else "",
            "admin_key": self.admin_key or "",
            "model_id": self.model_id or "",
            "compatibility_mode": self.compatibility_mode,
            "max_requests": str(self.max_requests),
        }
        return {ENVIRONMENT[name]: value for name, value in values.items()}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, **more: object) -> Settings:
        """Settings from the variables. RequestError (BP404) for a value that cannot be read."""
        given = {name: environment.get(variable, "") for name, variable in ENVIRONMENT.items()}
        text = given["patches"].strip()
        try:
            patches = json.loads(text) if text.startswith("[") else text.split()
            max_requests = int(given["max_requests"] or cls.max_requests)
        except ValueError as error:
            raise RequestError(
                "BP404", f"an environment variable of BrainPatch cannot be read: {error}"
            ) from None
        return cls(
            patches=[str(one) for one in patches],
            default_off=given["default_off"] not in ("", "0"),
            admin_key=given["admin_key"] or None,
            model_id=given["model_id"] or None,
            compatibility_mode=given["compatibility_mode"] or "strict",
            max_requests=max_requests,
            **more,  # type: ignore[arg-type]
        )


def _works(method: str, path: str) -> bool:
    """Whether a request outside the guarded paths may be work for the engine, too."""
    return method not in ("GET", "HEAD") and path != "/ping"


def _digest(key: str) -> bytes:
    # Digests are of one length, so that a comparison tells nothing about it.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _matches(authorization: str | None, allowed: Sequence[bytes]) -> bool:
    scheme, _, key = (authorization or "").partition(" ")
    given, found = _digest(key.strip()), False
    for one in allowed:
        found |= hmac.compare_digest(given, one)
    return found and scheme.lower() == "bearer"
