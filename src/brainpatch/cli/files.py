"""Commands about files: install, uninstall, list, inspect, validate, pack. None needs a model."""

from __future__ import annotations

import hashlib
import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brainpatch.cli.options import BACKEND, JSON, MODE, MODEL_ID, MODEL_OPTIONAL
from brainpatch.cli.output import engine_prints_to_stderr, note, say, say_json, say_text, table
from brainpatch.cli.status import NO, exit_status
from brainpatch.errors import ERRORS, BrainPatchError, PatchLoadError
from brainpatch.patch.file import (
    SUFFIX,
    LoadedPatch,
    load_patch,
    load_patch_bytes,
    patch_size_report,
    read_patch_file,
    save_patch,
)
from brainpatch.patch.limits import MAX_ARCHIVE_BYTES, MAX_MANIFEST_BYTES, MAX_README_BYTES
from brainpatch.patch.registry import default_registry
from brainpatch.patch.text import visible

if TYPE_CHECKING:
    from brainpatch.runtime.backend import BrainPatchBackend

_README_EXCERPT = 400


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    app.command()(install)
    app.command()(uninstall)
    app.command("list")(list_installed)
    app.command()(inspect)
    app.command()(validate)
    app.command()(pack)


def install(
    ref: Annotated[str, typer.Argument(help="A file, or owner/repo[:file] of a hub.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an installed patch of this name.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Take hub files from the cache only.")] = False,
    as_json: JSON = False,
) -> None:
    """Check a patch and copy it into the registry.

    Example: brainpatch install formal.brainpatch
    """
    installed = default_registry().install(ref, overwrite=force, offline=offline)
    if as_json:
        say_json({"name": installed.name, "path": str(installed.path), "source": installed.source})
    else:
        say(f"installed {installed.name} at {installed.path}")


def uninstall(
    name: Annotated[str, typer.Argument(help="The name of an installed patch.")], as_json: JSON = False
) -> None:
    """Remove a patch from the registry.

    Example: brainpatch uninstall formal
    """
    default_registry().uninstall(name)
    if as_json:
        say_json({"uninstalled": name})
    else:
        say(f"uninstalled {name}")


def list_installed(as_json: JSON = False) -> None:
    """List the installed patches.

    Example: brainpatch list --json
    """
    rows: list[dict[str, Any]] = []
    for entry in default_registry().list_patches():
        row: dict[str, Any] = {"installed_name": entry.name}
        try:
            row |= {**entry.load().describe(), "installed_bytes": entry.size_bytes}
        except BrainPatchError as error:
            row |= {"name": entry.name, "error": {"code": error.code, "reason": error.reason}}
        rows.append(row)
    if as_json:
        say_json(rows)
    elif not rows:
        say("no patches are installed")
    else:
        say(*table(("name", "model", "layers", "evidence", "bytes"), map(_row, rows)))


def _row(about: dict[str, Any]) -> tuple[Any, ...]:
    name = about["installed_name"]
    if "error" in about:
        return name, f"unusable: {about['error']['code']}", "", "", ""
    layers = ",".join(map(str, about["layers"]))
    model = about["base_model"]["model_id"]
    return name, model, layers, about["evidence_level"], about["installed_bytes"]


def inspect(
    patch: Annotated[str, typer.Argument(help="An installed name or a path.")],
    digest: Annotated[
        bool, typer.Option("--digest", help="Show the digest of what the patch means; not with --json.")
    ] = False,
    as_json: JSON = False,
) -> None:
    """Show what a patch says of itself. With --json: its manifest.

    Example: brainpatch inspect formal.brainpatch
    """
    if digest and as_json:
        raise typer.BadParameter("--json prints the manifest alone; leave out --digest")
    path = default_registry().resolve(patch)
    data = read_patch_file(path, MAX_ARCHIVE_BYTES)
    loaded = load_patch_bytes(data, source=str(path))
    if as_json:
        say_json(loaded.manifest.to_dict())
        return
    say(*_about(loaded, data))
    if digest:
        from brainpatch.patch.identity import meaning_digest

        say(f"meaning      {meaning_digest(loaded)}")
    if loaded.readme:
        more = len(loaded.readme) - _README_EXCERPT
        say("", "README.md")
        say_text(loaded.readme[:_README_EXCERPT] + (f"… (+{more} characters)" if more > 0 else ""))


def _about(loaded: LoadedPatch, data: bytes) -> list[str]:
    manifest = loaded.manifest
    model = manifest.base_model
    sizes = patch_size_report(loaded)
    schedule = manifest.schedule
    steps = ", ".join(f"{n}: {value:g}" for n, value in schedule.keyframes.items()) if schedule else ""
    lines = [
        f"{manifest.name}  (format {manifest.format_version}, {sizes['archive_bytes']} bytes, "
        f"{sizes['num_vectors']} vectors of {sizes['vector_payload_bytes']} bytes)",
        *([visible(manifest.description, 400)] if manifest.description else []),
        "",
        f"model        {visible(model.model_id)}"
        + (f" at {visible(model.revision)}" if model.revision else "")
        + f"; {visible(model.architecture) or 'architecture not said'}, hidden size {model.hidden_size}, "
        f"{model.num_layers} blocks",
        f"strength     {manifest.default_strength:g} by default, at most {manifest.max_abs_strength:g} either way",
        f"schedule     {steps or 'none: the same at every token'}",
        f"evidence     {manifest.evidence_level} (stated by the author, not checked here)",
        f"license      {visible(manifest.license)}"
        + (f", by {visible(', '.join(manifest.authors))}" if manifest.authors else ""),
        f"sha256       {hashlib.sha256(data).hexdigest()}",
        "",
        *table(
            ("layer", "vector", "dtype", "coefficient", "site"),
            [
                (i.layer, i.vector, loaded.vector_for(i.vector).dtype, f"{i.coefficient:g}", i.site)
                for i in manifest.interventions
            ],
        ),
    ]
    for key, value in manifest.provenance.items():
        lines.append(f"provenance   {visible(str(key), 60)}: {visible(str(value))}")
    for engine, status in manifest.compatibility.items():
        lines.append(f"engine       {visible(engine, 40)}: {status['status']} (stated by the author)")
    return lines


def validate(
    target: Annotated[str, typer.Argument(help="A file, an installed name, or a folder of patches.")],
    model: MODEL_OPTIONAL = None,
    backend: BACKEND = "auto",
    mode: MODE = "strict",
    model_id: MODEL_ID = None,
    as_json: JSON = False,
) -> None:
    """Check files against the format, and with --model also against a model.

    Example: brainpatch validate formal.brainpatch --model MODEL --mode architecture
    """
    is_folder = os.path.isdir(target)  # noqa: PTH112 - unlike Path.is_dir, it never raises
    paths = sorted(Path(target).rglob(f"*{SUFFIX}")) if is_folder else [default_registry().resolve(target)]
    results: list[dict[str, Any]] = []
    status = 0
    with ExitStack() as stack:
        engine = None
        for path in paths:
            result, loaded, found = _checked(path)
            if loaded is not None and model is not None:
                if engine is None:
                    engine = stack.enter_context(_engine(model, backend, model_id))
                report = engine.validate_patch(loaded, mode=mode)
                result["warnings"] += report.warnings
                if not report.ok:
                    result |= _refusal("BP201", report.errors, ERRORS["BP201"].remedy)
                    found = NO
            status = status or found
            results.append(result)
    if as_json:
        say_json(results)
    elif results:
        for result in results:
            say(*_verdict(result))
    else:
        note(f"no *{SUFFIX} below {target}")
    raise typer.Exit(status)


def _checked(path: Path) -> tuple[dict[str, Any], LoadedPatch | None, int]:
    """What is to be said of a file, the patch if it is one, and the exit status."""
    result: dict[str, Any] = {"file": str(path), "valid": True, "errors": []}
    loaded, status = None, 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loaded = load_patch(path)
        except BrainPatchError as error:
            result |= _refusal(error.code, [error.reason], error.remedy)
            status = exit_status(error)
    result["warnings"] = [str(one.message) for one in caught]
    return result, loaded, status


def _refusal(code: str, errors: list[str], remedy: str) -> dict[str, Any]:
    return {"valid": False, "code": code, "errors": errors, "remedy": remedy}


def _verdict(result: dict[str, Any]) -> list[str]:
    lines = [f"{'valid  ' if result['valid'] else 'INVALID'}  {visible(result['file'], 1000)}"]
    lines += [f"         {result['code']} {visible(line, 1000)}" for line in result["errors"]]
    if not result["valid"]:
        lines.append(f"         what to do: {result['remedy']}")
    return lines + [f"         warning: {visible(line, 1000)}" for line in result["warnings"]]


def _engine(model: str, backend: str, model_id: str | None) -> BrainPatchBackend:
    from brainpatch.runtime.discovery import engine_of, select_backend

    engine = select_backend(engine_of(model, backend))
    note(f"loading {model}")
    with engine_prints_to_stderr():
        engine.load_model(model, **({"model_id": model_id} if model_id else {}))
    return engine


def pack(
    manifest: Annotated[Path, typer.Option("--manifest", help="The manifest, JSON.")],
    vectors: Annotated[Path, typer.Option("--vectors", help="The vectors, safetensors.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The patch to write.")],
    readme: Annotated[Path | None, typer.Option("--readme", help="A README.md to put in.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")] = False,
    as_json: JSON = False,
) -> None:
    """Make a patch from its parts. Equal parts give equal bytes.

    Example: brainpatch pack --manifest m.json --vectors v.safetensors -o formal.brainpatch
    """
    from brainpatch.patch import tensors
    from brainpatch.patch.manifest import Manifest

    parsed = Manifest.from_json(read_patch_file(manifest, MAX_MANIFEST_BYTES))
    held, _ = tensors.load(read_patch_file(vectors, MAX_ARCHIVE_BYTES))
    text = None
    if readme is not None:
        try:
            text = read_patch_file(readme, MAX_README_BYTES).decode()
        except UnicodeDecodeError:
            raise PatchLoadError("BP120", f"{readme} is not UTF-8") from None
    path = save_patch(parsed, held, output, readme=text, overwrite=force)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    if as_json:
        say_json({"path": str(path), "sha256": sha256})
    else:
        say(f"wrote {path}", f"sha256 {sha256}")
