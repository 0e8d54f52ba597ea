"""What holds for any patch, any damage and any data."""

from __future__ import annotations

import warnings
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brainpatch.errors import PatchFormatError
from brainpatch.patch import (
    BaseModelSpec,
    Intervention,
    Manifest,
    PatchWarning,
    StrengthSchedule,
    Tensor,
    load_patch_bytes,
    patch_bytes,
)
from brainpatch.patch.tensors import supported_dtypes, vector

_names = st.from_regex("[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True).filter(
    lambda name: name.partition(".")[0].isdigit()
)
_texts = st.text(st.characters(codec="utf-8"), max_size=20)
_numbers = st.floats(-1024, 1024, allow_nan=False)


@st.composite
def _patches(draw: st.DrawFn) -> tuple[Manifest, dict[str, Tensor], str | None]:
    hidden_size = draw(st.integers(1, 9))
    num_layers = draw(st.integers(1, 5))
    keys = draw(
        st.lists(
            _texts.filter(lambda key: key not in ("", "__metadata__")), min_size=1, max_size=3, unique=True
        )
    )
    values = st.lists(st.floats(-6e4, 6e4), min_size=hidden_size, max_size=hidden_size)
    interventions = [Intervention(draw(st.integers(0, num_layers - 1)), key) for key in keys]
    for item in interventions:
        item.coefficient = draw(_numbers)
        item.site = draw(st.sampled_from(["all", "prompt", "continuation"]))
    maximum = draw(st.floats(1, 1024))
    manifest = Manifest(
        draw(_names),
        BaseModelSpec(draw(_texts) or "m", draw(_texts), hidden_size, num_layers, draw(st.none() | _texts)),
        interventions,
        description=draw(_texts),
        evaluation=draw(st.dictionaries(_texts, _texts | _numbers | st.booleans(), max_size=2)),
        provenance={"note": draw(_texts)},
        max_abs_strength=maximum,
        default_strength=draw(st.floats(-maximum, maximum)),
        authors=draw(st.lists(_texts, max_size=2)),
        schedule=draw(
            st.none() | st.dictionaries(st.integers(0, 2**31 - 1), _numbers, min_size=1).map(StrengthSchedule)
        ),
    )
    dtypes = st.sampled_from(supported_dtypes())
    return manifest, {key: vector(draw(values), draw(dtypes)) for key in keys}, draw(st.none() | _texts)


@given(_patches())
@settings(max_examples=100, deadline=None)
def test_any_patch_survives_the_round_trip(parts: tuple[Manifest, dict[str, Tensor], str | None]) -> None:
    manifest, vectors, readme = parts
    data = patch_bytes(manifest, vectors, readme=readme)
    patch = load_patch_bytes(data)
    assert (patch.manifest, patch.vectors, patch.readme) == (manifest, vectors, readme or None)
    assert patch_bytes(patch.manifest, patch.vectors, readme=patch.readme) == data


def test_every_single_flipped_bit_is_refused_or_harmless(
    manifest: Manifest, vectors: dict[str, Tensor]
) -> None:
    whole = patch_bytes(manifest, vectors)
    expected = load_patch_bytes(whole)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        try:
            found = load_patch_bytes(bytes(damaged))
        except PatchFormatError:
            continue
        assert found == expected


@given(
    st.dictionaries(
        st.sampled_from(sorted(Manifest.__dataclass_fields__)),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
            ),
            max_leaves=6,
        ),
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_data_is_a_manifest_or_refused(manifest: Manifest, change: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PatchWarning)
        try:
            read = Manifest.from_dict({**manifest.to_dict(), **change})
        except PatchFormatError:
            return
        read.validate()
