"""Random resolved sets for property tests. Small pools, so that vectors, schedules and whole sets recur."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import strategies as st

from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.runtime.meaning import ActivePatch, ResolvedSet, resolve
from tests.factories import make_patch

HIDDEN, LAYERS = 3, 4
LATEST = 2**31 - 1
"""The largest index that a keyframe can have."""

_random = np.random.default_rng(7)
VECTORS = {f"v{i}": _random.standard_normal(HIDDEN).astype(np.float32).tolist() for i in range(20)}
VECTORS["v18"] = [0.0, -0.0, 0.0]
VECTORS["v19"] = [-0.0, 0.0, 0.0]

_NUMBERS = [-2.0, -1.0, -0.3, 0.0, 1e-13, 1e-7, 0.1, 1.0, 3.0]
_SITES = ["all", "all", "prompt", "continuation"]
_DEFAULTS = [1.0, 0.0, -2.0]
_LATE = [50, LATEST]

numbers = st.sampled_from(_NUMBERS)
schedules = st.builds(
    StrengthSchedule,
    st.dictionaries(st.integers(0, 9) | st.sampled_from(_LATE), numbers, min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from(_DEFAULTS),
)
interventions = st.lists(
    st.fixed_dictionaries(
        {
            "layer": st.integers(0, LAYERS - 1),
            "vector": st.sampled_from(sorted(VECTORS)),
            "coefficient": numbers,
            "site": st.sampled_from(_SITES),
        }
    ),
    min_size=1,
    max_size=4,
)


def resolved(*patches: tuple[list[dict], float, StrengthSchedule | None], prefix: str = "p") -> ResolvedSet:
    """The set of these patches, each (interventions, strength, schedule), through `resolve`."""
    installed, wish = {}, {}
    for number, (items, strength, schedule) in enumerate(patches):
        name = f"{prefix}{number}"
        used = {item["vector"]: VECTORS[item["vector"]] for item in items}
        patch = make_patch(
            items, name=name, hidden=HIDDEN, layers=LAYERS, vectors=used, max_abs_strength=1024.0
        )
        installed[name] = ActivePatch(patch)
        wish[name] = {"strength": strength, "schedule": schedule}
    return resolve(wish, installed)


sets = st.lists(st.tuples(interventions, numbers, st.none() | schedules), min_size=1, max_size=3).map(
    lambda patches: resolved(*patches)
)
"""Any set, without effect included."""

effective_sets = sets.filter(lambda patches: not patches.is_empty)


def _pool(seed: int) -> list[ResolvedSet]:
    random = Random(seed)

    def patch(fixed):
        items = [
            {
                "layer": random.randrange(LAYERS),
                "vector": random.choice(sorted(VECTORS)),
                "coefficient": random.choice(_NUMBERS),
                "site": "all" if fixed else random.choice(_SITES),
            }
            for _ in range(random.randint(1, 4))
        ]
        steps = {
            random.choice([*range(10), *_LATE]): random.choice(_NUMBERS) for _ in range(random.randint(1, 4))
        }
        schedule = StrengthSchedule(steps, random.random() < 0.5, random.choice(_DEFAULTS))
        return items, random.choice(_NUMBERS), None if fixed else random.choice([None, schedule])

    return [resolved(*(patch(number % 2) for _ in range(random.randint(1, 3)))) for number in range(60)]


POOL = _pool(1)
"""The like of `sets`, made once, since to draw one of these is cheap. Every other one is the same at all positions."""
