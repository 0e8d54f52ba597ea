"""The routes under /brainpatch: what is on the model, and, with the admin key, changes to it.

A change is checked whole before any of it is made, and reaches requests that are admitted from then on. State
and who owns it: the patches belong to the backend; `_changes` lets one change at a time through. What changes
is written to the log `brainpatch.audit`, a line of JSON each.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Message

from brainpatch.errors import BrainPatchError, PatchCompatibilityError, RequestError, ServerError
from brainpatch.patch.compatibility import MODES
from brainpatch.patch.file import load_patch_bytes
from brainpatch.patch.limits import MAX_ARCHIVE_BYTES, MIB
from brainpatch.patch.names import split_strength
from brainpatch.runtime.backend import BrainPatchBackend
from brainpatch.runtime.meaning import ActivePatch, finite_strength, unknown_patch
from brainpatch.runtime.model import BrainPatchedModel
from brainpatch.server.http import failure, read_body
from brainpatch.server.settings import Settings

MAX_UPLOAD_BYTES = 64 * MIB
"""Less than the format allows; a whole upload is held in memory."""

_audit = logging.getLogger("brainpatch.audit")


def described(active: ActivePatch) -> dict[str, Any]:
    """A patch on the model as plain values."""
    manifest = active.manifest
    return {
        "name": active.name,
        "description": manifest.description,
        "strength": active.strength,
        "max_abs_strength": manifest.max_abs_strength,
        "enabled": active.enabled,
        "schedule": None if active.schedule is None else active.schedule.to_dict(),
        "layers": list(manifest.layers),
        "evidence_level": manifest.evidence_level,
    }


class PatchesApi:
    """The routes on one backend."""

    def __init__(self, backend: BrainPatchBackend, settings: Settings) -> None:
        self._backend = backend
        self._settings = settings
        self._changes = threading.Lock()

    def router(self) -> APIRouter:
        """The routes, to be included without a prefix."""
        router = APIRouter(prefix="/brainpatch", tags=["patches"])
        router.get("/patches", summary="What is on the model")(self.list)
        router.get("/patches/{name}", summary="One patch")(self.get)
        if self._settings.admin_key is not None:
            uploaded: dict[str, Any] = {
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
                    },
                }
            }
            router.post(
                "/patches", summary="Put a file on the model", status_code=201, openapi_extra=uploaded
            )(self.install)
            router.patch("/patches/{name}", summary="Change strength, switch or schedule")(self.change)
            router.delete("/patches/{name}", summary="Take a patch off the model")(self.remove)
        return router

    # --- anybody with a key ----------------------------------------------------------------------

    def list(self) -> dict[str, Any]:
        """What is on the model, in the order in which it was installed."""
        return {
            "object": "list",
            "data": [described(active) for active in self._backend.installed().values()],
        }

    def get(self, name: str) -> dict[str, Any]:
        """One patch. 404 when there is none of this name."""
        return described(self._active(name))

    # --- with the admin key ----------------------------------------------------------------------

    async def install(
        self,
        request: Request,
        strength: Annotated[float | None, Query(description="None: the patch's own default.")] = None,
        enabled: Annotated[bool, Query(description="On for requests that name no patches.")] = False,
        overwrite: Annotated[bool, Query(description="Replace a patch of the same name.")] = False,
        mode: Annotated[str | None, Query(description="strict, architecture or unsafe.")] = None,
    ) -> dict[str, Any]:
        """Put the .brainpatch file that is the body on the model, or the field `file` of a form."""
        if mode is not None and mode not in MODES:
            raise PatchCompatibilityError("BP202", f"{mode!r} is not a mode")
        if strength is not None:
            finite_strength(strength, "strength")
        data = await _uploaded(request, self._settings.body_seconds)

        def work() -> dict[str, Any]:
            patch = load_patch_bytes(data)
            with self._changes:
                if not overwrite and patch.name in self._backend.installed():
                    raise ServerError("BP710", f"a patch called {patch.name} is on the model")
                active = self._backend.install_patch(patch, strength=strength, mode=mode, enabled=enabled)
                self._say(request, "install", patch.name, sha256=hashlib.sha256(data).hexdigest())
                return described(active)

        return await asyncio.to_thread(work)

    def change(
        self,
        request: Request,
        name: str,
        changes: Annotated[
            dict[str, Any], Body(description='{"strength", "enabled", "schedule"}, some of them.')
        ],
    ) -> dict[str, Any]:
        """Change an installed patch; all of what is asked, or nothing."""
        with self._changes:
            before = described(self._active(name))
            after = described(self._backend.change_patch(name, **changes))
            moved = {key: [before[key], after[key]] for key in changes}
            self._say(request, "change", name, changes=moved)
            return after

    def remove(self, request: Request, name: str) -> dict[str, Any]:
        """Take a patch off the model; requests in work keep it to their end."""
        with self._changes:
            self._backend.remove_patch(self._active(name).name)
            self._say(request, "remove", name)
        return {"name": name, "deleted": True}

    # ---------------------------------------------------------------------------------------------

    def _active(self, name: str) -> ActivePatch:
        installed = self._backend.installed()
        if name not in installed:
            raise unknown_patch(name, installed)
        return installed[name]

    def _say(self, request: Request, action: str, patch: str, **more: Any) -> None:
        key = hashlib.sha256(request.headers.get("authorization", "").partition(" ")[2].encode()).hexdigest()[
            :12
        ]
        client = request.client.host if request.client else None
        line = {"action": action, "patch": patch, "by_key": key, "from": client, **more}
        _audit.info("%s", json.dumps(line))


async def _uploaded(request: Request, seconds: float) -> bytes:
    """The file of an upload: the body itself, or the field `file` of a form."""
    limit = min(MAX_UPLOAD_BYTES, MAX_ARCHIVE_BYTES)
    body = await read_body(request.receive, limit, seconds)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        return body

    async def again() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        form = await Request(request.scope, again).form(max_files=1, max_fields=0)
    except HTTPException as error:
        raise ServerError("BP704", f"the form cannot be read: {error.detail}") from None
    file = form.get("file")
    if file is None or isinstance(file, str):
        raise ServerError("BP704", "the form has no file called file")
    try:
        return await file.read()
    finally:
        await form.close()


def answer_errors(app: FastAPI) -> None:
    """Have every error of the app's own routes answered in OpenAI's shape; never 422, never a stack trace."""

    async def ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, BrainPatchError)  # noqa: S101 - what it is registered for
        return failure(error)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
        if first["type"] == "json_invalid":
            return failure(ServerError("BP704", f"the body is not JSON: {first['ctx']['error']}"))
        return failure(RequestError("BP404", f"{where or 'the body'}: {first['msg']}"))

    async def missing(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        if error.status_code in (404, 405):
            return failure(ServerError("BP709", "there is no such route"))
        return JSONResponse({"error": {"message": str(error.detail), "type": "invalid_request_error",
                                       "param": None, "code": None}}, error.status_code)  # fmt: skip

    async def unexpected(_: Request, error: Exception) -> Response:
        logging.getLogger("brainpatch.server").exception("a request failed", exc_info=error)
        message = {"message": "the server failed at the request; its log says more", "type": "server_error"}
        return JSONResponse({"error": {**message, "param": None, "code": "internal"}}, 500)

    app.add_exception_handler(BrainPatchError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, missing)
    app.add_exception_handler(Exception, unexpected)


def install_at_start(backend: BrainPatchBackend, settings: Settings) -> None:
    """Put the operator's patches on the model. Errors: those of finding, reading and installing a patch."""
    backend.warns_of_requests = False
    model = BrainPatchedModel(backend)
    model.compatibility_mode = settings.compatibility_mode
    for text in settings.patches:
        ref, strength = split_strength(text)
        before = set(backend.installed())
        name = model.install(ref, strength=strength, enabled=not settings.default_off).name
        if name in before:
            raise RequestError("BP403", f"two patches are called {name}", "Give one of them.")
