"""The laws of the house, on vLLM with a real model."""

from __future__ import annotations

import numpy as np
import pytest

from brainpatch.runtime import GenerationConfig
from tests.engines.vllm.material import EDITED, RUNNER, assert_close, edits_of, steering

pytestmark = [pytest.mark.vllm, pytest.mark.model]

CONFIG = GenerationConfig(max_new_tokens=24, logprobs=5)
FULL = GenerationConfig(max_new_tokens=1, extra={"logprobs": -1})


def exactly(plain):
    return [
        (one["token_ids"], [{int(token): p for token, p in entry.items()} for entry in one["logprobs"]])
        for one in plain
    ]


def given(answers):
    return [(one.token_ids, one.logprobs) for one in answers]


def one_by_one(backend, prompts, config, patches=None):
    return given(backend.generate_detailed([prompt], config, patches=patches)[0] for prompt in prompts)


def test_zero_is_nothing_on_vllm(backend, chats, plain):
    """Bit for bit: every request is alone in its steps, as it was in the plain engine."""
    wanted, few = exactly(plain["answers"])[:3], chats[:3]
    assert one_by_one(backend, few, CONFIG) == wanted
    backend.install_patch(steering("p", (0, 15, 29)))
    changed = one_by_one(backend, few, CONFIG)
    assert all(a != b for a, b in zip(changed, wanted, strict=True))
    for patches in ({}, {"p": 0.0}, {"p": 1e-13}, {"p": {"strength": 1, "schedule": {"0": 0.0}}}):
        assert one_by_one(backend, few, CONFIG, patches) == wanted, patches
    assert one_by_one(backend, few, CONFIG) == changed
    backend.set_strength("p", 0.0)
    assert one_by_one(backend, few, CONFIG) == wanted
    backend.set_strength("p", 1.0)
    backend.set_enabled("p", False)
    assert one_by_one(backend, few, CONFIG) == wanted
    backend.remove_patch("p")
    assert one_by_one(backend, few, CONFIG) == wanted
    assert backend.worker_state()[0]["live_vectors"] == 0
    backend.install_patch(steering("z", coefficient=0.0))
    assert one_by_one(backend, few, CONFIG) == wanted


def test_zero_beside_patched_requests_is_the_plain_answer(backend, chats, plain):
    backend.install_patch(steering("p", (0, 15, 29)))
    wishes = [{"p": 1}, {"p": 0}] * 4
    answers = backend.generate_detailed(chats, CONFIG, patches=wishes)
    for number, (ids, logprobs) in enumerate(exactly(plain["answers"])):
        if number % 2:
            assert answers[number].token_ids == ids
            for ours, theirs in zip(answers[number].logprobs, logprobs, strict=True):
                assert assert_close(ours, theirs, atol=2e-4) >= 4
        else:
            assert answers[number].token_ids != ids


def test_every_logit_of_a_zero_is_that_of_the_plain_engine(backend, chats, plain):
    backend.install_patch(steering("p"))
    one_by_one(backend, chats[:2], FULL)
    zero = one_by_one(backend, chats[:2], FULL, {"p": 0})
    assert zero == exactly(plain["full"])
    assert len(zero[0][1][0]) == 49152


def test_weights_never_change_on_vllm(backend, chats):
    before = backend.weights_digest()
    backend.install_patch(steering("p", (0, 15, 29)))
    backend.generate_detailed(chats[:2], CONFIG)
    assert backend.weights_digest() == before
    backend.remove_patch("p")
    backend.generate_detailed(chats[:2], CONFIG)
    assert backend.weights_digest() == before


def test_requests_are_isolated_on_vllm(backend, chats):
    backend.install_patch(steering("a"))
    backend.install_patch(steering("b", (10,)), enabled=False)
    wishes = [{"a": 1}, {}, {"b": 1}, None, {"a": 0.5, "b": 1}, {}, {"b": -1}, {"a": 1}]
    together = backend.generate_detailed(chats, CONFIG, patches=wishes)
    assert [one.patches for one in together[:4]] == [{"a": 1.0}, {}, {"b": 1.0}, {"a": 1.0}]
    for prompt, wish, answer in zip(chats, wishes, together, strict=True):
        solo = backend.generate_detailed([prompt], CONFIG, patches=wish)[0]
        assert (solo.token_ids, solo.digest) == (answer.token_ids, answer.digest), wish
        for one, other in zip(solo.logprobs, answer.logprobs, strict=True):
            assert_close(one, other, atol=2e-4)
    assert len({one.digest for one in together}) == 5


def test_measured_equals_expected_on_vllm(backend, chats):
    patch = steering("p", EDITED["three"])
    backend.install_patch(patch)
    config = GenerationConfig(max_new_tokens=6, ignore_eos=True)
    rows = backend.trace(chats[0], config, patches={"p": -0.5})
    seen = {(row.layer, row.position) for row in rows}
    assert seen == {(layer, p) for layer in (0, 15, 29) for p in range(len(chats[0]) + 5)}
    assert len(rows) == len(seen)
    for row in rows:
        norm = 0.5 * float(np.linalg.norm(edits_of(patch)[row.layer]))
        assert row.expected == pytest.approx(norm, rel=1e-6)
        assert row.norm == pytest.approx(norm, rel=2e-5)
        assert row.applied_dtype == "float32"
    assert backend.trace(chats[0], config, patches={}) == []


def test_a_trace_sees_every_position_of_a_prompt_that_is_in_the_cache(backend, long_prompt):
    backend.install_patch(steering("p"))
    config = GenerationConfig(max_new_tokens=3, ignore_eos=True)
    backend.generate_detailed([long_prompt], config)
    assert backend.generate_detailed([long_prompt], config)[0].cached_tokens > 0
    assert [row.position for row in backend.trace(long_prompt, config)] == list(range(302))


def test_the_workers_say_what_they_did(backend, chats):
    backend.install_patch(steering("p", (3, 15)))
    before = backend.worker_state()[0]
    answer = backend.generate_detailed([chats[0]], CONFIG)[0]
    (state,) = backend.worker_state()
    rows = answer.prompt_tokens - answer.cached_tokens + len(answer.token_ids) - 1
    assert state["rows_edited"] - before["rows_edited"] == 2 * rows
    assert state["admitted"] - before["admitted"] == 1
    assert (state["live_requests"], state["live_sets"], state["live_vectors"]) == (0, 0, 0)
    assert state["blocks_missed"] == 0
    assert (state["path"], state["num_layers"], state["hidden_size"]) == ("model.layers", 30, 576)
    assert (state["dtype"], state["runner"], state["compiled"]) == ("float32", RUNNER, False)
    assert set(state["forms"].values()) == {"SUM"}


def test_two_patches_at_one_layer_are_summed(backend, chats):
    one, two = steering("one"), steering("two")
    for patch in (one, two):
        backend.install_patch(patch)
    rows = backend.trace(chats[0], GenerationConfig(max_new_tokens=1))
    total = np.asarray(edits_of(one)[15]) + np.asarray(edits_of(two)[15])
    assert rows[-1].norm == pytest.approx(float(np.linalg.norm(total)), rel=2e-5)
