"""Commands about files: install, uninstall, list, inspect, validate, pack. None needs a model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

import typer

from brainpatch.cli.options import BACKEND, JSON, MODE, MODEL_ID, MODEL_OPTIONAL
from brainpatch.cli.output import note, say, say_json, table
from brainpatch.cli.status import exit_status
from brainpatch.errors import BrainPatchError, PatchLoadError
from brainpatch.patch.file import LoadedPatch, load_patch, load_patch_bytes, read_patch_file, save_patch
from brainpatch.patch.limits import MAX_ARCHIVE_BYTES, MAX_MANIFEST_BYTES
from brainpatch.patch.registry import default_registry
from brainpatch.patch.text import visible

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
        try:
            about = entry.load().describe()
        except BrainPatchError as error:
            about = {"name": entry.name, "error": {"code": error.code, "reason": error.reason}}
        rows.append({**about, "installed_bytes": entry.size_bytes})
    if as_json:
        say_json(rows)
    elif not rows:
        say("no patches are installed")
    else:
        say(table(("name", "model", "layers", "evidence", "bytes"), [_row(row) for row in rows]))


def _row(about: dict[str, Any]) -> tuple[Any, ...]:
    if "error" in about:
        return about["name"], f"unusable: {about['error']['code']}", "", "", about["installed_bytes"]
    layers = ",".join(map(str, about["layers"]))
    return (
        about["name"],
        about["base_model"]["model_id"],
        layers,
        about["evidence_level"],
        about["installed_bytes"],
    )


def inspect(
    patch: Annotated[str, typer.Argument(help="An installed name or a path.")],
    digest: Annotated[
        bool, typer.Option("--digest", help="Show the digest of what the patch means.")
    ] = False,
    as_json: JSON = False,
) -> None:
    """Show what a patch says of itself. With --json: its manifest.

    Example: brainpatch inspect formal.brainpatch
    """
    path = default_registry().resolve(patch)
    data = read_patch_file(path, MAX_ARCHIVE_BYTES)
    loaded = load_patch_bytes(data, source=str(path))
    if as_json:
        say_json(loaded.manifest.to_dict())
        return
    say("\n".join(_about(loaded, data)))
    if digest:
        from brainpatch.patch.identity import meaning_digest

        say(f"meaning      {meaning_digest(loaded)}")


def _about(loaded: LoadedPatch, data: bytes) -> list[str]:
    manifest = loaded.manifest
    model = manifest.base_model
    schedule = manifest.schedule
    steps = ", ".join(f"{n}: {value:g}" for n, value in schedule.keyframes.items()) if schedule else ""
    lines = [
        f"{manifest.name}  (format {manifest.format_version}, {len(data)} bytes)",
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
        table(
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
    if loaded.readme:
        lines += ["", "README.md", visible(loaded.readme, _README_EXCERPT).replace("\\n", "\n")]
    return lines


def validate(
    target: Annotated[Path, typer.Argument(help="A file, an installed name, or a folder of patches.")],
    model: MODEL_OPTIONAL = None,
    backend: BACKEND = "auto",
    mode: MODE = "strict",
    model_id: MODEL_ID = None,
    as_json: JSON = False,
) -> None:
    """Check files against the format, and with --model also against a model.

    Example: brainpatch validate formal.brainpatch --model MODEL --mode architecture
    """
    paths = sorted(target.rglob("*.brainpatch")) if target.is_dir() else [target]
    engine = None
    if model is not None:
        from brainpatch.runtime.discovery import select_backend

        engine = select_backend(backend)
        engine.load_model(model, **({"model_id": model_id} if model_id else {}))
    results = []
    status = 0
    for path in paths:
        result: dict[str, Any] = {"file": str(path), "valid": True, "errors": [], "warnings": []}
        try:
            loaded = load_patch(path if path.exists() else default_registry().resolve(str(path)))
            if engine is not None:
                report = engine.validate_patch(loaded, mode=mode)
                result |= {"valid": report.ok, "errors": report.errors, "warnings": report.warnings}
                status = status or (0 if report.ok else 1)
        except BrainPatchError as error:
            result |= {"valid": False, "code": error.code, "errors": [error.reason], "remedy": error.remedy}
            status = status or exit_status(error)
        results.append(result)
    if engine is not None:
        engine.unload()
    if as_json:
        say_json(results)
    else:
        for result in results:
            code = f"{result['code']} " if "code" in result else ""
            say(f"{'valid  ' if result['valid'] else 'INVALID'}  {visible(result['file'])}")
            for line in result["errors"]:
                say(f"         {code}{visible(line, 1000)}")
            for line in result["warnings"]:
                say(f"         warning: {visible(line, 1000)}")
        if not results:
            note(f"no *.brainpatch below {target}")
    raise typer.Exit(status)


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

    parsed = Manifest.from_json(_read(manifest, MAX_MANIFEST_BYTES))
    held, _ = tensors.load(_read(vectors, MAX_ARCHIVE_BYTES))
    text = None
    if readme is not None:
        try:
            text = _read(readme, MAX_MANIFEST_BYTES).decode()
        except UnicodeDecodeError:
            raise PatchLoadError("BP120", f"{readme} is not UTF-8") from None
    path = save_patch(parsed, held, output, readme=text, overwrite=force)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    if as_json:
        say_json({"path": str(path), "sha256": sha256})
    else:
        say(f"wrote {path}\nsha256 {sha256}")


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise PatchLoadError("BP101", f"{path}: {error.strerror or error}") from None
    if len(data) > limit:
        raise PatchLoadError("BP106", f"{path} has more than {limit} bytes")
    return data
