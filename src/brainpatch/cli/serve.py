"""`brainpatch serve`: one frozen model, and every request its own patches."""

from __future__ import annotations

from typing import Annotated

import typer

from brainpatch.cli.generate import find_patches, loaded_model
from brainpatch.cli.options import DEVICE, DTYPE, MODE, MODEL, MODEL_ID, PATCHES
from brainpatch.cli.output import note
from brainpatch.errors import RequestError
from brainpatch.patch.file import LoadedPatch


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(context_settings={"allow_extra_args": True})(serve)


def serve(
    context: typer.Context,
    model: MODEL,
    patch: PATCHES = [],  # noqa: B006 - read by typer only
    backend: Annotated[
        str, typer.Option("--backend", "-b", help="auto (vllm where it is there), vllm, transformers, ...")
    ] = "auto",
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen at.")] = 8000,
    api_key: Annotated[
        list[str],
        typer.Option("--api-key", envvar="BRAINPATCH_API_KEY", help="A key for users; may be repeated."),
    ] = [],  # noqa: B006
    admin_key: Annotated[
        str | None,
        typer.Option(
            "--admin-key", envvar="BRAINPATCH_ADMIN_KEY", help="The key that may change patches over HTTP."
        ),
    ] = None,
    default_off: Annotated[
        bool, typer.Option("--default-off", help="Patches act only for requests that name them.")
    ] = False,
    served_model_name: Annotated[
        str | None,
        typer.Option("--served-model-name", help="The name that requests use; else the model's own."),
    ] = None,
    max_requests: Annotated[
        int, typer.Option("--max-requests", help="In work or waiting at once; more are answered 429.")
    ] = 1024,
    drain_seconds: Annotated[
        int, typer.Option("--drain-seconds", help="How long running requests may take after SIGTERM.")
    ] = 30,
    device: DEVICE = "auto",
    dtype: DTYPE = "auto",
    compatibility: MODE = "strict",
    model_id: MODEL_ID = None,
) -> None:
    """Serve a model with OpenAI's API; each request chooses its patches, by field or by model name.

    On vLLM it is vLLM's own server, and words after -- go to it.

    Example: brainpatch serve -m MODEL -p formal -p terse@0.5 --admin-key KEY -- --max-model-len 4096
    """
    from brainpatch.runtime.discovery import ALIASES, available_backends, engine_of
    from brainpatch.server import launch
    from brainpatch.server.settings import Settings

    settings = Settings(
        patches=patch,
        default_off=default_off,
        api_keys=api_key,
        admin_key=admin_key,
        model_id=model_id,
        compatibility_mode=compatibility,
        served_model_name=served_model_name,
        max_requests=max_requests,
    )
    place = launch.Place(host, port, drain_seconds)
    if warning := launch.check_place(settings, place):
        note(f"warning: {warning}")
    wanted = find_patches(patch, [])
    engine = ALIASES.get(backend.lower(), backend.lower())
    engine = engine_of(model, engine)
    if engine == "auto":
        there = {state.name for state in available_backends() if state.available}
        engine = "vllm" if "vllm" in there else "auto"
    if engine == "vllm":
        if device != "auto":
            raise RequestError(
                "BP404", "--device: a vLLM build runs on the one kind of device that it was made for"
            )
        at_hand = [one for one, _ in wanted if isinstance(one, LoadedPatch)]
        launch.serve_vllm(model, settings, place, dtype=dtype, patches=at_hand, more=context.args)
        return
    if context.args:
        raise RequestError("BP404", f"{context.args[0]!r}: words after -- are for vLLM")
    with loaded_model(model, engine, device, dtype, compatibility, model_id) as ready:
        launch.serve_own(ready, settings, place)
