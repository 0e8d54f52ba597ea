"""Starting a server: vLLM's own with patches in it, or ours over another engine."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from brainpatch.errors import CapabilityError, RequestError
from brainpatch.server.logs import log_to_stderr
from brainpatch.server.settings import Settings

if TYPE_CHECKING:
    from brainpatch.patch.file import LoadedPatch

MIDDLEWARE: Final = "brainpatch.server.vllm_front.BrainPatchMiddleware"
_OURS: Final = (
    "--worker-cls",
    "--model",
    "--host",
    "--port",
    "--api-key",
    "--served-model-name",
    "--shutdown-timeout",
)
"""Options of vLLM's that `brainpatch serve` sets itself."""
_AROUND: Final = ("--grpc", "--headless")
_LOCAL: Final = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Place:
    """Where a server listens, and how long it may finish its work when it is told to stop."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_seconds: int = 30

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in _LOCAL


def serve_vllm(
    model: str,
    settings: Settings,
    place: Place,
    *,
    dtype: str = "auto",
    patches: Sequence[LoadedPatch] = (),
    more: Sequence[str] = (),
) -> None:
    """Run vLLM's server until it is told to stop. `more` are words for vLLM's own command line.

    `patches` are those of `settings` that are at hand, and are checked against the model's config before the engine
    is loaded. Errors: CapabilityError (BP502), BackendNotAvailable, EngineError, PatchCompatibilityError.
    """
    from brainpatch.backends.vllm_engine import descriptor, served_model_config
    from brainpatch.patch.compatibility import check_compatibility

    _refuse_words(more)
    log_to_stderr()
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    words = _vllm_words(model, settings, place, dtype, more)
    with _as_vllm(words):
        command, arguments = _parsed(words)
        known = descriptor(served_model_config(arguments), settings.model_id or model, arguments.revision)
        for patch in patches:
            check_compatibility(patch.manifest, known, mode=settings.compatibility_mode).raise_if_failed()
        for name, value in settings.to_environment().items():
            if value:
                os.environ[name] = value
            else:  # what is left over from elsewhere says nothing here
                os.environ.pop(name, None)
        command.cmd(arguments)


def _refuse_words(more: Sequence[str]) -> None:
    for word in more:
        name = word.partition("=")[0].replace("_", "-")
        if name in _OURS:
            raise CapabilityError("BP502", f"{name} is set by brainpatch serve", "Give it before the --.")
        if name in _AROUND:
            raise CapabilityError("BP502", f"{name}: no HTTP server of vLLM's would see the patches")
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise CapabilityError(
            "BP502", "VLLM_USE_RUST_FRONTEND: that front knows no middleware, so no patches"
        )


def _vllm_words(model: str, settings: Settings, place: Place, dtype: str, more: Sequence[str]) -> list[str]:
    """vLLM's command line."""
    from brainpatch.backends.vllm_engine import cache_arguments, runs_on_cpu
    from brainpatch.backends.vllm_plugin import WORKER

    words = [model, "--host", place.host, "--port", str(place.port), "--dtype", dtype]
    words += ["--worker-cls", WORKER, "--middleware", MIDDLEWARE]
    words += ["--shutdown-timeout", str(place.drain_seconds)]
    if settings.served_model_name:
        words += ["--served-model-name", settings.served_model_name]
    if len(settings.api_keys) == 1:
        os.environ["VLLM_API_KEY"] = settings.api_keys[0]  # some versions print their arguments
    elif settings.api_keys:
        words += ["--api-key", *settings.api_keys]
    given = {word.partition("=")[0].replace("_", "-") for word in more}
    if settings.admin_key is not None and "--api-server-count" not in given:
        words += ["--api-server-count", "1"]  # a change must reach whoever serves
    if runs_on_cpu():
        if not given & {"--enforce-eager", "--no-enforce-eager"}:
            words.append("--enforce-eager")  # compiling takes minutes
        for name, value in ({} if "--kv-cache-memory-bytes" in given else cache_arguments({})).items():
            words += [f"--{name.replace('_', '-')}", str(value)]
    return [*words, *more]


@contextlib.contextmanager
def _as_vllm(words: Sequence[str]) -> Iterator[None]:
    """vLLM looks at the command line in places."""
    argv, sys.argv = sys.argv, ["vllm", "serve", *words]
    try:
        yield
    finally:
        sys.argv = argv


def _parsed(words: Sequence[str]) -> tuple[Any, Any]:
    """vLLM's command `serve` and its arguments. The program `vllm` itself is not there on every build."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="brainpatch serve ... --")
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments = parser.parse_args(["serve", *words])
    command.validate(arguments)
    arguments.model = arguments.model_tag
    return command, arguments


def serve_own(model: Any, settings: Settings, place: Place) -> None:
    """Run our own server over a loaded `BrainPatchedModel` until it is told to stop."""
    from brainpatch.server.app import build_app
    from brainpatch.server.run import run

    if not model.capabilities().server:
        raise CapabilityError("BP502", f"{model.backend.name} cannot be served")
    log_to_stderr()
    run(
        build_app(model, settings.served_model_name, settings=settings),
        place.host,
        place.port,
        place.drain_seconds,
    )


def check_place(settings: Settings, place: Place) -> str | None:
    """A warning where strangers may reach the server. RequestError (BP404) for a port that is none."""
    if not 0 <= place.port <= 65535 or place.drain_seconds < 0:
        raise RequestError("BP404", "the port is 0 to 65535, and the seconds to drain are not negative")
    if place.is_local or settings.api_keys:
        return None
    return f"{place.host} can be reached from elsewhere and no --api-key is set: anybody may use the model"
