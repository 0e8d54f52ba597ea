"""The manifest's rules, one by one. Files that break them are in tests/attacks."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from brainpatch.errors import PatchFormatError
from brainpatch.patch import (
    BaseModelSpec,
    Intervention,
    Manifest,
    PatchWarning,
    StrengthSchedule,
    manifest_schema,
)
from brainpatch.patch.manifest import BACKEND_STATUSES, EVIDENCE_LEVELS
from brainpatch.patch.names import check_patch_name


def _refused(code: str, data: Any) -> str:
    with pytest.raises(PatchFormatError) as caught:
        Manifest.from_dict(data)
    assert caught.value.code == code
    return caught.value.reason


def test_round_trip(manifest: Manifest, data: dict[str, Any]) -> None:
    assert Manifest.from_dict(data) == manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert Manifest.from_json(manifest.to_json().encode()) == manifest
    assert manifest.to_json().endswith("}\n")
    assert json.loads(manifest.to_json(indent=None)) == data
    assert len(data) == 14


def test_defaults_of_a_minimal_manifest() -> None:
    manifest = Manifest.from_dict(
        {
            "name": "m",
            "base_model": {"model_id": "x", "hidden_size": 8, "num_layers": 2},
            "interventions": [{"layer": 0, "vector": "v"}],
        }
    )
    assert manifest == Manifest(
        "m",
        BaseModelSpec("x", "", 8, 2, None, None),
        [Intervention(0, "v", 1.0, "residual_post", None, "all")],
    )
    assert (manifest.max_abs_strength, manifest.default_strength) == (8.0, 1.0)
    assert (manifest.license, manifest.authors, manifest.schedule) == ("Apache-2.0", [], None)


def test_derived_values(manifest: Manifest) -> None:
    manifest.interventions.append(Intervention(1, "a"))
    manifest.compatibility = {"vllm": {"status": "verified"}, "mlx": {"status": "experimental"}}
    assert manifest.layers == [1, 3]
    assert manifest.vector_keys == ["a", "v", "w"]
    assert manifest.backend_status("mlx") == "experimental"
    assert manifest.backend_status("other") == "unsupported"
    assert manifest.is_verified_on("vllm")
    assert not manifest.is_verified_on("mlx")
    assert [manifest.clamp_strength(x) for x in (-9, -8.0, 0.5, 100)] == [-8.0, -8.0, 0.5, 8.0]
    assert manifest.summary() == "tiny [none] 3 intervention(s) @ L1,3 -> example-org/tiny-4"


def test_integers_where_numbers_are_meant_become_floats(data: dict[str, Any]) -> None:
    data["interventions"][0]["coefficient"] = 3
    data["max_abs_strength"], data["default_strength"] = 4, -2
    manifest = Manifest.from_dict(data)
    written = manifest.to_dict()
    assert repr(written["interventions"][0]["coefficient"]) == "3.0"
    assert (repr(written["max_abs_strength"]), repr(written["default_strength"])) == ("4.0", "-2.0")
    manifest.interventions[0].coefficient = 5
    manifest.validate()
    assert repr(manifest.to_dict()["interventions"][0]["coefficient"]) == "5.0"


def test_id_and_site_are_left_out_when_they_say_nothing() -> None:
    assert Intervention(0, "v", id="").to_dict().keys() == {"layer", "vector", "coefficient", "hook"}
    full = Intervention(0, "v", 1.0, "residual_post", "a", "prompt")
    assert full.to_dict() == {
        "layer": 0,
        "vector": "v",
        "coefficient": 1.0,
        "hook": "residual_post",
        "id": "a",
        "site": "prompt",
    }
    assert Intervention.from_dict(full.to_dict()) == full


def test_empty_ids_do_not_collide(data: dict[str, Any]) -> None:
    data["interventions"][0]["id"] = data["interventions"][1]["id"] = ""
    Manifest.from_dict(data)


@pytest.mark.parametrize(
    "wrong",
    [
        Intervention(-1, "v"),
        Intervention(4096, "v"),
        Intervention(True, "v"),
        Intervention(0, ""),
        Intervention(0, "v", math.nan),
        Intervention(0, "v", math.inf),
        Intervention(0, "v", -1024.5),
        Intervention(0, "v", 10**400),
        Intervention(0, "v", "1.0"),  # type: ignore[arg-type]
        Intervention(0, "v", np.float32(1)),  # type: ignore[arg-type]
        Intervention(0, "v", hook="residual_pre"),  # type: ignore[arg-type]
        Intervention(0, "v", site="last"),  # type: ignore[arg-type]
        Intervention(0, "v", id=3),  # type: ignore[arg-type]
    ],
)
def test_an_intervention_is_refused(wrong: Intervention, manifest: Manifest) -> None:
    with pytest.raises(PatchFormatError) as caught:
        wrong.validate()
    assert caught.value.code == "BP110"
    manifest.interventions.append(wrong)
    with pytest.raises(PatchFormatError):
        manifest.validate()


def test_an_intervention_beyond_the_model_is_refused() -> None:
    Intervention(3, "v", np.float64(2)).validate(num_layers=4)
    with pytest.raises(PatchFormatError) as caught:
        Intervention(4, "v").validate(num_layers=4)
    assert caught.value.code == "BP111"


@pytest.mark.parametrize("data", [None, [], "x", {"layer": 0}, {"layer": 0, "vector": "v", "mode": 1}])
def test_intervention_from_wrong_data(data: Any) -> None:
    with pytest.raises(PatchFormatError) as caught:
        Intervention.from_dict(data)
    assert caught.value.code == "BP110"


def test_base_model_from_dict() -> None:
    with pytest.warns(PatchWarning, match="unknown key in the base_model.*: extra"):
        spec = BaseModelSpec.from_dict({"model_id": "m", "hidden_size": 2, "num_layers": 1, "extra": 1})
    assert spec == BaseModelSpec("m", "", 2, 1)
    assert spec.to_dict().keys() == {
        "model_id",
        "architecture",
        "hidden_size",
        "num_layers",
        "revision",
        "torch_dtype",
    }
    with pytest.raises(PatchFormatError, match="BP110"):
        BaseModelSpec.from_dict({"model_id": ""})


def test_unknown_keys_are_warned_about_and_not_kept(data: dict[str, Any], manifest: Manifest) -> None:
    data["zz\x1b"] = data["aa"] = 1
    data["base_model"]["size"] = 1
    with pytest.warns(PatchWarning) as caught:
        loaded = Manifest.from_dict(data)
    assert [str(item.message) for item in caught] == [
        "unknown key in the manifest, ignored and not kept: aa, zz\\x1b",
        "unknown key in the base_model, ignored and not kept: size",
    ]
    assert loaded == manifest


def test_unknown_keys_that_could_change_the_meaning_are_refused(data: dict[str, Any]) -> None:
    data["interventions"][1]["mode"] = "replace"
    assert _refused("BP110", data) == "interventions[1] has an unknown key: mode"


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("name", None, "BP113"),
        ("name", "x\n", "BP113"),
        ("name", "a" * 65, "BP113"),
        ("name", "con", "BP113"),
        ("name", "lpt9.txt", "BP113"),
        ("format_version", None, "BP112"),
        ("format_version", 1.0, "BP112"),
        ("description", None, "BP110"),
        ("base_model", None, "BP110"),
        ("interventions", [], "BP110"),
        ("interventions", None, "BP110"),
        ("evidence_level", "proven", "BP110"),
        ("evaluation", [], "BP110"),
        ("compatibility", {"vllm": {}}, "BP110"),
        ("compatibility", {"vllm": {"status": ["verified"]}}, "BP110"),
        ("compatibility", {"vllm": "verified"}, "BP110"),
        ("provenance", None, "BP115"),
        ("provenance", {"x": math.nan}, "BP115"),
        ("provenance", {"x": object()}, "BP115"),
        ("provenance", {" Examples ": None}, "BP115"),
        ("provenance", {"discovery_layer": True}, "BP115"),
        ("provenance", {"discovery_method": ["caa"]}, "BP115"),
        ("provenance", {"training_dataset_hash": "0" * 64 + "\n"}, "BP115"),
        ("max_abs_strength", 0, "BP110"),
        ("max_abs_strength", math.nan, "BP110"),
        ("max_abs_strength", 0.5, "BP111"),
        ("default_strength", math.nan, "BP110"),
        ("default_strength", -8.5, "BP111"),
        ("license", None, "BP110"),
        ("authors", "abc", "BP110"),
        ("authors", ["a", 1], "BP110"),
        ("schedule", {}, "BP114"),
        ("schedule", {"keyframes": {"0": 1.0}}, "BP114"),
        ("schedule", [], "BP114"),
    ],
)
def test_a_field_is_refused(key: str, value: Any, code: str, data: dict[str, Any]) -> None:
    data[key] = value
    _refused(code, data)


def test_layers_and_ids_are_checked_against_each_other(data: dict[str, Any]) -> None:
    data["interventions"][0]["layer"] = 4
    assert "layer 4" in _refused("BP111", data)
    data["interventions"][0]["layer"] = 1
    data["interventions"][0]["id"] = data["interventions"][1]["id"] = "a"
    assert '"a" is there twice' in _refused("BP111", data)


def test_provenance_is_bounded_in_bytes(data: dict[str, Any]) -> None:
    data["provenance"] = {"x": "é" * 8187}
    assert len(json.dumps(data["provenance"], ensure_ascii=False).encode()) == 16383
    Manifest.from_dict(data)
    data["provenance"]["x"] += "é"
    assert _refused("BP115", data).startswith("16385 bytes")


@pytest.mark.parametrize("key", ["hidden_size", "num_layers"])
def test_the_geometry_is_required(key: str, data: dict[str, Any]) -> None:
    del data["base_model"][key]
    assert key in _refused("BP110", data)


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_a_manifest_is_an_object(value: Any) -> None:
    assert _refused("BP110", value) == "manifest is not an object"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("base_model", {"model_id": "m"}),
        ("interventions", [{"layer": 0, "vector": "v"}]),
        ("interventions", None),
        ("schedule", {"0": 1.0}),
    ],
)
def test_an_object_with_the_wrong_parts_is_refused(key: str, value: Any, manifest: Manifest) -> None:
    setattr(manifest, key, value)
    with pytest.raises(PatchFormatError):
        manifest.validate()


def test_from_json_is_strict(manifest: Manifest) -> None:
    text = manifest.to_json()
    for wrong in (
        text.replace('"name"', '"license"'),
        text.replace("8.0", "NaN"),
        "\ufeff" + text,
        '"\ud800"',
    ):
        with pytest.raises(PatchFormatError, match="BP109"):
            Manifest.from_json(wrong)


def test_a_schedule_may_be_given_as_a_mapping(manifest: Manifest) -> None:
    given = Manifest("x", manifest.base_model, manifest.interventions, schedule={"0": 1, "5": 0.5})  # type: ignore[arg-type]
    assert given.schedule == StrengthSchedule({0: 1.0, 5: 0.5})
    assert repr(given.to_dict()["schedule"]) == "{'0': 1, '5': 0.5}"
    given.schedule = StrengthSchedule({0: 1.0}, interpolate=True)
    with pytest.raises(PatchFormatError, match="BP114"):
        given.validate()


@pytest.mark.parametrize(
    "name", ["a", "0a.b-c_d..v1.0-", "abc.", "abc.brainpatch", "con1", "x" * 64, "console"]
)
def test_legal_names(name: str) -> None:
    assert check_patch_name(name) == name


@pytest.mark.parametrize("name", ["con", "nul.x.y", "aux", "prn", "com0", "com9.a", "lpt1"])
def test_device_names_are_refused(name: str) -> None:
    with pytest.raises(PatchFormatError, match="device"):
        check_patch_name(name)


def test_the_literals_are_the_published_lists() -> None:
    properties = manifest_schema()["$defs"]["Manifest"]["properties"]
    assert sorted(properties["evidence_level"]["enum"]) == sorted(EVIDENCE_LEVELS)
    assert properties["compatibility"]["additionalProperties"]["properties"]["status"]["enum"] == list(
        BACKEND_STATUSES
    )


def _validator() -> jsonschema.Draft202012Validator:
    schema = manifest_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_schema_accepts_every_valid_fixture() -> None:
    facts = json.loads((Path(__file__).parents[1] / "fixtures" / "valid.json").read_text())["files"]
    validator = _validator()
    for name, entry in facts.items():
        assert validator.is_valid(entry["manifest"]), name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "Upper"),
        ("format_version", "1.1"),
        ("schedule", {}),
        ("schedule", {"a": 1.0}),
        ("schedule", {"0": 2000.0}),
        ("compatibility", {"vllm": {}}),
        ("interventions", [{"layer": 0, "vector": "v", "mode": 1}]),
        ("base_model", {"model_id": "m"}),
        ("max_abs_strength", 0),
    ],
)
def test_the_schema_refuses(key: str, value: Any, data: dict[str, Any]) -> None:
    validator = _validator()
    assert validator.is_valid(data)
    data[key] = value
    assert not validator.is_valid(data)


def test_no_warning_without_a_reason(data: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Manifest.from_dict(data)
