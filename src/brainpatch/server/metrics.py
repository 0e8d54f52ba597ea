"""Prometheus metrics by patch, in the default registry, which vLLM's /metrics shows as well.

Labels are names of patches that were on the model, so that a client cannot make up new ones; a request
with several counts once for each, and one with none as "none".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import Counter, Gauge

from brainpatch.runtime.meaning import ResolvedSet

NONE: Final = "none"

REQUESTS: Final = Counter("brainpatch_requests", "Requests that were let in, by patch.", ["patch"])
TOKENS: Final = Counter(
    "brainpatch_tokens", "Tokens of requests that ended, by patch and kind.", ["patch", "kind"]
)
REFUSED: Final = Counter("brainpatch_refused", "Requests that were refused, by error code.", ["code"])
IN_WORK: Final = Gauge(
    "brainpatch_requests_in_work", "Requests in work or waiting.", multiprocess_mode="livesum"
)


def labels(patches: ResolvedSet) -> Iterable[str]:
    """The label values of a request."""
    return [patch.name for patch in patches.patches] or [NONE]


def count_tokens(patches: ResolvedSet, usage: dict[str, int]) -> None:
    """Count the tokens of a request that ended."""
    for name in labels(patches):
        for kind, count in usage.items():
            TOKENS.labels(name, kind).inc(count)
