"""HTTP: the OpenAI API with patches, over any engine."""

from __future__ import annotations

from typing import Any


def build_app(model: Any, served_model_name: str | None = None, **settings: Any) -> Any:
    """See `brainpatch.server.app.build_app`."""
    from brainpatch.server.app import build_app as build

    return build(model, served_model_name, **settings)
