"""Loading a model of mlx-lm."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, NamedTuple

from brainpatch.backends import families
from brainpatch.backends.mlx_proof import can_be_padded, prove
from brainpatch.backends.transformers_loading import SNAPSHOT
from brainpatch.errors import BackendNotAvailable, EngineError
from brainpatch.patch.compatibility import ModelDescriptor

SUPPORTED = ((0, 32), (0, 33))
"""Versions of mlx-lm that this release was run with: from the first on, and before the second."""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Loaded(NamedTuple):
    """A model that is ready: `blocks` are its decoder blocks, `tokenizer` that of Hugging Face.

    `device` None is the one that MLX takes by itself.
    """

    model: Any
    tokenizer: Any
    blocks: list[Any]
    descriptor: ModelDescriptor
    context: int | None
    end_ids: frozenset[int]
    can_be_padded: bool
    device: Any


def availability() -> tuple[bool, str]:
    """Whether mlx and a known mlx-lm are installed, and in words why not or which. Imports neither."""
    how = "pip install 'brainpatch[mlx]'"
    if platform.system() == "Linux":
        how += ", which takes mlx[cpu] on Linux"
    for package in ("mlx", "mlx_lm"):
        if importlib.util.find_spec(package) is None:
            return False, f"{package} is not installed: {how}"
    try:
        found = version("mlx-lm")
    except PackageNotFoundError:
        return False, f"mlx_lm is there, but not as an installed package: {how}"
    first, end = (".".join(map(str, bound)) for bound in SUPPORTED)
    parts = re.match(r"(\d+)\.(\d+)", found)
    if parts is None or not SUPPORTED[0] <= (int(parts[1]), int(parts[2])) < SUPPORTED[1]:
        return False, f"mlx-lm {found} was never tried: pip install 'mlx-lm>={first},<{end}'"
    return True, f"mlx-lm {found}"


def compute(model: Any) -> None:
    """Compute what a loaded model still has to: MLX does so only in the thread that asked for it."""
    try:
        import mlx.core as mx
        import mlx.nn as nn
    except ImportError as error:
        raise _cannot_import(error) from None
    if not isinstance(model, nn.Module):
        raise EngineError(
            "BP507", f"a model is a folder, a hub id or an mlx.nn.Module, not {type(model).__name__}"
        )
    mx.eval(model.state)


def load(
    model: Any,
    *,
    revision: str | None,
    device: str,
    dtype: Any,
    trust_remote_code: bool,
    model_id: str | None,
    tokenizer: Any,
    arguments: Mapping[str, Any],
) -> Loaded:
    """A model by hub id, folder or object, checked and proven. See `MLXBackend.load_model`."""
    try:
        import mlx.core as mx
        import mlx_lm  # noqa: F401
    except ImportError as error:
        raise _cannot_import(error) from None
    if device not in ("auto", "cpu", "gpu"):
        raise EngineError("BP507", f"device is one of auto, cpu, gpu here, not {device!r}")
    if device == "gpu" and not mx.is_available(mx.gpu):
        raise EngineError("BP507", "MLX finds no GPU", "Leave device out, or take device='cpu'.")
    place = None if device == "auto" else getattr(mx, device)
    with mx.stream(place or mx.default_device()):
        if isinstance(model, (str, PurePath)):
            name = str(model)
            model, own, config, folder = _read(name, revision, dtype, trust_remote_code, arguments)
            tokenizer = tokenizer or own
            if snapshot := SNAPSHOT.search(str(folder)):
                name, revision = f"{snapshot[1]}/{snapshot[2]}", snapshot[3]
        else:
            _refuse_object(model, tokenizer, dtype, arguments)
            config = {"model_type": type(model).__module__, **vars(getattr(model, "args", SimpleNamespace()))}
            name = str(config["model_type"])
        facts = _facts(config)
        blocks = _blocks(model, facts)
        width = prove(model, blocks)
        return Loaded(
            model,
            getattr(tokenizer, "_tokenizer", tokenizer),  # mlx-lm wraps that of Hugging Face
            blocks,
            _descriptor(model, config, model_id or name, revision, width, len(blocks)),
            families.context_length(facts),
            _end_ids(config, tokenizer),
            can_be_padded(model),
            place,
        )


def _cannot_import(error: ImportError) -> BackendNotAvailable:
    remedy = "On Linux mlx needs one of its builds: pip install 'mlx[cpu]'."
    return BackendNotAvailable("BP501", f"mlx cannot be imported: {error}", remedy)


def _folder(name: str, revision: str | None) -> Path:
    """Where the model's files are, fetched when a hub has them."""
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import snapshot_download
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    return Path(snapshot_download(name, revision=revision, allow_patterns=DEFAULT_ALLOW_PATTERNS))


def _read(
    name: str, revision: str | None, dtype: Any, trust_remote_code: bool, arguments: Mapping[str, Any]
) -> tuple[Any, Any, dict[str, Any], Path]:
    """Model, tokenizer and config, and the folder that they are from."""
    try:
        folder = _folder(name, revision)
        model, tokenizer, config = _by_library(folder, trust_remote_code, arguments)
        _cast(model, dtype)
    except EngineError:
        raise
    except SystemExit:  # what a family of mlx-lm does where a package that it needs is missing
        raise EngineError("BP507", f"{name}: mlx-lm needs another package for this family") from None
    except Exception as error:  # the library raises whatever a damaged or unknown model makes it raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise EngineError("BP507", f"{name}: {reason[0]}") from error
    return model, tokenizer, config, folder


def _by_library(
    folder: Path, trust_remote_code: bool, arguments: Mapping[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Model, tokenizer and config of a folder, by mlx-lm."""
    import mlx_lm

    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for facts in (SimpleNamespace(**written), _facts(written)):
        families.refuse_unfit(facts)
    given = dict(arguments)
    model, tokenizer, config = mlx_lm.load(
        str(folder),
        tokenizer_config={"trust_remote_code": trust_remote_code, **given.pop("tokenizer_config", {})},
        model_config={**rope_settings(written), **given.pop("model_config", {})},
        return_config=True,
        trust_remote_code=trust_remote_code,
        **given,
    )
    _check_rope(model, config)
    return model, tokenizer, config


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of rotary positions that transformers 5 writes under `rope_parameters`, where mlx-lm looks for them.

    Most of its families read the top level only, and take a default of their own without a word.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        moved = rope_settings(text)
        return {"text_config": {**text, **moved}} if moved else {}
    rope = config.get("rope_parameters") or {}
    if "rope_theta" not in rope:  # there are none, or one set for each kind of block
        return {}
    moved = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if rope.get("rope_type", "default") != "default":
        moved["rope_scaling"] = rope
    return {key: value for key, value in moved.items() if config.get(key) is None}


def _check_rope(model: Any, config: Mapping[str, Any]) -> None:
    """Refuse a model whose positions rotate by another base than its config says."""
    import mlx.nn as nn

    text = config.get("text_config")
    rope = (text if isinstance(text, Mapping) else config).get("rope_parameters") or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, Mapping) and "rope_theta" in one]
    stated = {float(kind["rope_theta"]) for kind in kinds}
    for path, module in model.named_modules():
        if stated and isinstance(module, nn.RoPE) and float(module.base) not in stated:
            raise EngineError(
                "BP507",
                f"the config's rope_theta is {sorted(stated)}, and mlx-lm gave {path} {module.base}",
                "Give the settings where mlx-lm looks for them: model_config={'rope_theta': ...}.",
            )


def _cast(model: Any, dtype: Any) -> None:
    import mlx.core as mx

    if dtype == "auto":
        return
    name = _DTYPES.get(str(dtype), str(dtype).removeprefix("mlx.core."))
    if name not in _DTYPES.values():
        raise EngineError("BP507", f"dtype is one of auto, {', '.join(_DTYPES.values())}, not {dtype}")
    model.set_dtype(getattr(mx, name))  # floating parameters alone: quantised weights are integers
    mx.eval(model.parameters())


def _refuse_object(model: Any, tokenizer: Any, dtype: Any, arguments: Mapping[str, Any]) -> None:
    if arguments or dtype != "auto":
        what = ", ".join([*arguments, *(["dtype"] if dtype != "auto" else [])])
        raise EngineError("BP507", f"a loaded model takes no {what}", "Pass these when you load the model.")
    if tokenizer is None:
        raise EngineError("BP507", "a loaded model needs its tokenizer", "Pass tokenizer=.")
    if model.training:
        raise EngineError("BP507", "the model is in training mode", "Call model.eval() first.")


def _facts(config: Mapping[str, Any]) -> SimpleNamespace:
    """A config's entries, those of the text model where it is nested in a wrapper's."""
    text = config.get("text_config")
    return SimpleNamespace(**{"model_type": "?", **config, **(text if isinstance(text, Mapping) else {})})


def _blocks(model: Any, facts: SimpleNamespace) -> list[Any]:
    """The decoder blocks: every model of mlx-lm has them under `layers`."""
    import mlx.nn as nn

    count = families.block_count(facts)
    found = list(getattr(model, "layers", None) or [])
    if len(found) != count or not all(isinstance(block, nn.Module) for block in found):
        raise EngineError(
            "BP503",
            f"{facts.model_type}: {count} blocks are configured, and the model has {len(found)} layers",
            "This engine patches models whose `layers` are their decoder blocks.",
        )
    return found


def _descriptor(
    model: Any, config: Mapping[str, Any], name: str, revision: str | None, width: int, count: int
) -> ModelDescriptor:
    architectures = config.get("architectures") or [type(model).__name__]
    return ModelDescriptor(name, width, count, architectures[0], revision)


def _end_ids(config: Mapping[str, Any], tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer, as the model's author set them; mlx-lm's config has those of generation."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    own = config.get("eos_token_id")
    known: Iterable[Any] = tokenizer.eos_token_ids if isinstance(tokenizer, TokenizerWrapper) else ()
    listed = (*(own if isinstance(own, list) else [own]), *known, tokenizer.eos_token_id)
    return frozenset(int(token) for token in listed if token is not None)
