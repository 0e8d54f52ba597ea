"""The names in /v1/models: each served one, without patches (`M+`), and with each patch (`M+formal`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brainpatch.runtime.meaning import ActivePatch
from brainpatch.server.asked import FIELD, SEPARATOR


def listed(cards: Sequence[Mapping[str, Any]], installed: Mapping[str, ActivePatch]) -> list[dict[str, Any]]:
    """OpenAI's model cards of a server, and those that the patches add."""
    default = {name: active.strength for name, active in installed.items() if active.enabled}
    found: list[dict[str, Any]] = []
    for card in cards:
        found.append({**card, FIELD: {"patches": default}})
        found.append(_named(card, "", {}))
        found += [_named(card, name, {name: active.strength}) for name, active in installed.items()]
    return found


def _named(card: Mapping[str, Any], rest: str, patches: dict[str, float]) -> dict[str, Any]:
    return {**card, "id": f"{card['id']}{SEPARATOR}{rest}", "parent": card["id"], FIELD: {"patches": patches}}
