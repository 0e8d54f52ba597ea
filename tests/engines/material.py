"""What all engines are tested with: patches for the real model, and questions."""

from __future__ import annotations

from brainpatch.patch.schedule import StrengthSchedule
from tests.factories import make_patch

HIDDEN, LAYERS = 576, 30
MODEL_ID = "test/model"

PROMPTS = [
    "How was your day?",
    "Tell me about the sea, and about the ships that cross it in winter.",
    "Hi",
    "Write one sentence about bread.",
]


def patch(name="p", layers=(15,), norm=40.0, seed=0, **fields):
    """A patch for the model: one random vector a layer, of a norm that changes the text."""
    site = fields.pop("site", "all")
    items = [
        {"layer": layer, "vector": f"v{layer}", "coefficient": norm / HIDDEN**0.5, "site": site}
        for layer in layers
    ]
    return make_patch(items, name=name, hidden=HIDDEN, layers=LAYERS, seed=seed, **fields)


CASES = {
    "constant": [("p", patch(), 1.0, None)],
    "prompt": [("p", patch(site="prompt"), 1.5, None)],
    "continuation": [("p", patch(site="continuation"), 1.5, None)],
    "schedule": [("p", patch(schedule=StrengthSchedule({0: 0.0, 3: 1.5, 6: -1.0})), 1.0, None)],
    "interpolated": [("p", patch(), 1.0, StrengthSchedule({0: 2.0, 8: -2.0}, interpolate=True))],
    "late": [("p", patch(), 1.0, StrengthSchedule({4: 0.0}, default=1.5))],
    "several": [
        ("p", patch(layers=(0, 15, 29)), 0.7, None),
        ("q", patch("q", layers=(3, 15), seed=5, site="continuation"), -0.9, StrengthSchedule({0: 1, 5: 2})),
        ("r", patch("r", layers=(15,), seed=6, site="prompt", max_abs_strength=2.0), 1.9, None),
    ],
}
"""Name -> (name, patch, strength, schedule) of each patch of a request."""


def wish_for(backend, case):
    """Install the patches of a case; returns the request's `patches`, and what `by_hand` takes."""
    wish, applied = {}, []
    for name, item, strength, schedule in CASES[case]:
        backend.install_patch(item, enabled=False)
        wish[name] = {"strength": strength, **({"schedule": schedule} if schedule else {})}
        applied.append((item, strength, schedule or item.manifest.schedule))
    return wish, applied
