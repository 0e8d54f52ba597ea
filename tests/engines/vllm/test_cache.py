"""The KV prefix cache never serves one state's blocks to another, and still serves equals."""

from __future__ import annotations

import pytest

from brainpatch.runtime import GenerationConfig
from tests.engines.vllm.material import steering

pytestmark = [pytest.mark.vllm, pytest.mark.model]

CONFIG = GenerationConfig(max_new_tokens=8, logprobs=5, ignore_eos=True)


def ask(backend, prompt, config=CONFIG, **given):
    return backend.generate_detailed([prompt], config, **given)[0]


def fresh(backend, prompt, **given):
    """What an engine without any cached block answers."""
    backend._driver.reset_cache()
    answer = ask(backend, prompt, **given)
    assert answer.cached_tokens == 0
    return answer


def test_a_patch_that_is_switched_leaves_nothing_in_the_cache(backend, long_prompt):
    backend.install_patch(steering("p"))
    states = [{"p": 1.0}, {}, {"p": 0.5}, {"p": -1.0}]
    wanted = [fresh(backend, long_prompt, patches=state) for state in states]
    assert len({tuple(one.logprobs[0].values()) for one in wanted}) == len(states)
    backend._driver.reset_cache()
    for state, right in zip(states, wanted, strict=True):
        answer = ask(backend, long_prompt, patches=state)
        assert answer.cached_tokens == 0
        assert (answer.token_ids, answer.logprobs) == (right.token_ids, right.logprobs), state


def test_one_state_asked_twice_reads_the_cache(backend, long_prompt):
    backend.install_patch(steering("p"))
    first = fresh(backend, long_prompt)
    ask(backend, long_prompt, patches={})
    again = ask(backend, long_prompt)
    assert again.cached_tokens >= 256
    assert again.token_ids == first.token_ids
    for one, other in zip(again.logprobs, first.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-3)  # attention is summed in another order


def test_another_patch_under_the_same_name_is_another_state(backend, long_prompt):
    backend.install_patch(steering("p", (15,)))
    old = fresh(backend, long_prompt)
    other = steering("p", (14,))
    backend.install_patch(other)
    answer = ask(backend, long_prompt)
    assert answer.cached_tokens == 0
    assert answer.digest != old.digest
    right = fresh(backend, long_prompt)
    assert (answer.token_ids, answer.logprobs) == (right.token_ids, right.logprobs)
    assert answer.logprobs != old.logprobs


def test_equal_meaning_shares_and_a_name_does_not_matter(backend, long_prompt):
    backend.install_patch(steering("p"))
    backend.install_patch(steering("q"), enabled=False)
    fresh(backend, long_prompt, patches={"p": 0.5})
    assert ask(backend, long_prompt, patches={"p": {"strength": 0.5}}).cached_tokens > 0
    assert ask(backend, long_prompt, patches={"q": 0.5}).cached_tokens == 0


def test_a_zero_shares_with_plain(backend, long_prompt):
    backend.install_patch(steering("p"))
    fresh(backend, long_prompt, patches={})
    assert ask(backend, long_prompt, patches={"p": 0}).cached_tokens > 0


def test_the_callers_salt_is_joined(backend, long_prompt):
    backend.install_patch(steering("p"))
    salted = GenerationConfig(max_new_tokens=8, logprobs=5, extra={"cache_salt": "tenant-1"})
    digest = fresh(backend, long_prompt).digest
    assert ask(backend, long_prompt, salted).cached_tokens == 0
    assert ask(backend, long_prompt, salted).cached_tokens > 0
    assert ask(backend, long_prompt, salted, patches={}).cached_tokens == 0
    forged = GenerationConfig(max_new_tokens=8, extra={"cache_salt": f"brainpatch:{digest}:"})
    assert ask(backend, long_prompt, forged, patches={}).cached_tokens == 0


def test_position_dependent_patches_share_only_with_prompts_of_their_length(backend, long_prompt):
    """What is edited at a position follows from the prompt's length, too."""
    backend.install_patch(steering("late", site="continuation"))
    first = fresh(backend, long_prompt[:280])
    assert ask(backend, long_prompt[:280]).cached_tokens >= 256
    # the first prompt and its answer, as a prompt: its blocks hold edited positions
    longer = [*long_prompt[:280], *first.token_ids]
    answer = ask(backend, longer)
    assert answer.cached_tokens == 0
    right = fresh(backend, longer)
    assert (answer.token_ids, answer.logprobs) == (right.token_ids, right.logprobs)


def test_one_batch_of_several_states_shares_among_equals_alone(backend, long_prompt):
    """A, plain, B, A, A' in turn: hits for equal configurations only."""
    backend.install_patch(steering("a"))
    backend.install_patch(steering("b", (10,)), enabled=False)
    backend._driver.reset_cache()
    seen = [
        ask(backend, long_prompt, patches=wish).cached_tokens
        for wish in ({"a": 1}, {}, {"b": 1}, {"a": 1}, {"a": 0.9})
    ]
    assert [count > 0 for count in seen] == [False, False, False, True, False]
