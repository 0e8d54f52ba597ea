"""Starting a server: vLLM's own with patches in it, or ours over another engine."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from brainpatch.errors import CapabilityError, RequestError
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
    from brainpatch.backends.vllm_engine import cache_arguments, descriptor, model_config, runs_on_cpu
    from brainpatch.backends.vllm_plugin import WORKER
    from brainpatch.patch.compatibility import check_compatibility

    for word in more:
        name = word.partition("=")[0]
        if name.replace("_", "-") in _OURS:
            raise CapabilityError("BP502", f"{name} is set by brainpatch serve", "Give it before the --.")
    _log_to_stderr()
    config = model_config({"model": model, "dtype": dtype, "worker_cls": WORKER})
    known = descriptor(config, settings.model_id or model)
    for patch in patches:
        check_compatibility(patch.manifest, known, mode=settings.compatibility_mode).raise_if_failed()
    words = [model, "--host", place.host, "--port", str(place.port), "--dtype", dtype]
    words += ["--worker-cls", WORKER, "--middleware", MIDDLEWARE]
    words += ["--shutdown-timeout", str(place.drain_seconds)]
    if settings.served_model_name:
        words += ["--served-model-name", settings.served_model_name]
    if settings.api_keys:
        words += ["--api-key", *settings.api_keys]
    given = {word.partition("=")[0].replace("_", "-") for word in more}
    if settings.admin_key is not None and "--api-server-count" not in given:
        words += ["--api-server-count", "1"]  # a change must reach whoever serves
    if runs_on_cpu():
        if not given & {"--enforce-eager", "--no-enforce-eager"}:
            words.append("--enforce-eager")  # compiling takes minutes
        for name, value in ({} if "--kv-cache-memory-bytes" in given else cache_arguments({})).items():
            words += [f"--{name.replace('_', '-')}", str(value)]
    os.environ.update({name: value for name, value in settings.to_environment().items() if value})
    _run_vllm([*words, *more])


def _run_vllm(words: Sequence[str]) -> None:
    """What `vllm serve` does, which the distribution's name keeps from being there on every build."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="brainpatch serve ... --")
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    argv, sys.argv = sys.argv, ["vllm", "serve", *words]  # vLLM looks at it in places
    try:
        arguments = parser.parse_args(["serve", *words])
        command.validate(arguments)
        command.cmd(arguments)
    finally:
        sys.argv = argv


def serve_own(model: Any, settings: Settings, place: Place) -> None:
    """Run our own server over a loaded `BrainPatchedModel` until it is told to stop."""
    from brainpatch.server.app import build_app
    from brainpatch.server.run import run

    if not model.capabilities().server:
        raise CapabilityError("BP502", f"{model.backend.name} cannot be served")
    _log_to_stderr()
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


def _log_to_stderr() -> None:
    """Lines of our own logs, the audit's too, where nobody configured logging."""
    log = logging.getLogger("brainpatch")
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
