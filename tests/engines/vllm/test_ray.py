"""Ray for real, on this machine: a pipeline over two engines."""

from __future__ import annotations

import json

import pytest

from brainpatch.backends.vllm_backend import VLLMBackend
from brainpatch.errors import EngineError
from brainpatch.patch.file import save_patch
from brainpatch.runtime import GenerationConfig
from tests.engines.vllm.material import ARGUMENTS, MODEL_ID, steering

pytestmark = [pytest.mark.vllm, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]

CONFIG = GenerationConfig(max_new_tokens=8, ignore_eos=True)
WISHES = [{}, {"a": 1}, {"b": -1}, {"a": 0.5, "b": {"strength": 1, "schedule": {"0": 1, "2": 0}}}]


@pytest.fixture
def ray():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    yield ray
    ray.shutdown()


@pytest.fixture
def wanted(slot, chats):
    engine = slot.engine()
    for name in ("a", "b"):
        engine.install_patch(steering(name), enabled=False)
    answers = {}
    for number, prompt in enumerate(chats):
        for wish in WISHES:
            (answer,) = engine.generate_detailed([prompt], CONFIG, patches=wish)
            answers[number, json.dumps(wish)] = answer.token_ids
    slot.release()
    return answers


def test_a_dataset_with_a_column_of_patches_over_two_engines(wanted, ray, chats, model_folder, tmp_path):
    import ray.data

    from brainpatch.backends.ray_data import generate

    patches = [steering(name) for name in ("a", "b")]
    files = [save_patch(patch.manifest, patch.vectors, tmp_path / patch.name) for patch in patches]
    rows = [
        {"number": number, "prompt": prompt, "patches": json.dumps(wish)}
        for number, prompt in enumerate(chats)
        for wish in WISHES
    ]
    rows += [
        {"number": 100, "prompt": chats[0], "patches": '{"c": 1}'},
        {"number": 101, "prompt": chats[0], "patches": "{"},
        {"number": 102, "prompt": [1] * 2000, "patches": ""},
    ]
    answers = generate(
        ray.data.from_items(rows, override_num_blocks=6),
        str(model_folder),
        files,
        replicas=2,
        config=CONFIG,
        batch_size=6,
        num_cpus=1,
        load={**ARGUMENTS, "model_id": MODEL_ID},
    ).take_all()
    assert len(answers) == len(rows)
    for answer in answers:
        if answer["number"] < 100:
            right = wanted[answer["number"], answer["patches"]]
            assert list(answer["token_ids"]) == right, answer
            assert (answer["error"], answer["finish_reason"]) == ("", "length")
            assert len(answer["digest"]) == 64
    errors = {answer["number"]: answer["error"][:5] for answer in answers if answer["number"] >= 100}
    assert errors == {100: "BP401", 101: "BP402", 102: "BP406"}
    assert len({answer["digest"] for answer in answers}) == len(WISHES) + 1


def test_workers_under_ray_are_not_for_a_cpu(ray, free_slot, model_folder):
    """vLLM's CPU build has no Ray executor; elsewhere it makes the worker class by its name, like the others."""
    with VLLMBackend() as backend, pytest.raises(EngineError, match="BP507"):
        backend.load_model(model_folder, model_id=MODEL_ID, **ARGUMENTS, distributed_executor_backend="ray")
