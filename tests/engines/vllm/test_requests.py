"""What a request may say on vLLM, what comes back, and what is refused before it costs anything."""

from __future__ import annotations

import threading
import time

import pytest

from brainpatch.errors import (
    CapabilityError,
    EngineError,
    EngineStateError,
    RequestError,
    UnknownPatchError,
)
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.runtime import GenerationConfig
from tests.engines.vllm.material import steering

pytestmark = [pytest.mark.vllm, pytest.mark.model]

GREEDY = GenerationConfig(max_new_tokens=16, ignore_eos=True)


def drawn(**fields):
    return GenerationConfig(max_new_tokens=12, temperature=1.0, ignore_eos=True, **fields)


def ids(backend, prompt, config, **given):
    return [one.token_ids for one in backend.generate_detailed([prompt], config, **given)]


def test_a_generation_is_filled(backend, chats):
    backend.install_patch(steering("p"))
    config = GenerationConfig(max_new_tokens=5, logprobs=3, ignore_eos=True)
    answer = backend.generate_detailed([chats[0]], config, patches={"p": 2})[0]
    assert len(answer.token_ids) == len(answer.logprobs) == 5
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert token in entry
        assert 3 <= len(entry) <= 4
        assert all(value <= 0 for value in entry.values())
    assert answer.finish_reason == "length"
    assert answer.prompt_tokens == len(chats[0])
    assert answer.patches == {"p": 2.0}
    assert len(answer.digest) == 64
    assert backend.generate_detailed([chats[0]], GREEDY)[0].logprobs is None


def test_text_messages_and_ids_are_one_prompt(backend, chats, tokenizer):
    text = "Tell me about the sea."
    messages = [{"role": "user", "content": text}]
    answers = backend.generate_batch([text, messages, chats[0]], GREEDY)
    assert len(set(answers)) == 1
    assert answers[0] == tokenizer.decode(ids(backend, chats[0], GREEDY)[0], skip_special_tokens=True)
    assert backend.generate(text, GREEDY, system="You are a pirate.") != answers[0]
    assert backend.generate(text, GREEDY, use_chat_template=False) != answers[0]


def test_n_answers_are_drawn_with_n_seeds(backend, chats):
    several = ids(backend, chats[0], drawn(n=3, seed=7))
    assert len({tuple(one) for one in several}) == 3
    assert several[1] == ids(backend, chats[0], drawn(seed=8))[0]
    assert ids(backend, chats[0], drawn(n=3, seed=7)) == several
    assert ids(backend, chats[0], drawn(seed=-1)) == ids(backend, chats[0], drawn(seed=-1))
    assert ids(backend, chats[0], drawn(seed=None)) != ids(backend, chats[0], drawn(seed=None))


def test_stop_ends_an_answer_before_the_string(backend, chats):
    whole = backend.generate_detailed([chats[0]], GREEDY)[0].text
    word = whole.split()[4]
    config = GenerationConfig(max_new_tokens=16, stop=[word])
    answer = backend.generate_detailed([chats[0]], config)[0]
    assert answer.text == whole[: whole.index(word)]
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"extra": {"top_k": 1}},
        {"extra": {"allowed_token_ids": [28]}},
    ],
)
def test_a_parameter_reaches_the_engine(backend, chats, fields):
    if fields.get("extra", {}).get("top_k"):
        with pytest.raises(RequestError, match="BP404"):
            ids(backend, chats[0], drawn(**fields))
    elif "extra" in fields:
        assert ids(backend, chats[0], drawn(**fields)) == [[28] * 12]
    else:
        greedy = GenerationConfig(max_new_tokens=12, ignore_eos=True)
        assert ids(backend, chats[0], drawn(**fields)) == ids(backend, chats[0], greedy)


def test_penalties_reach_the_engine(backend, chats):
    start = ids(backend, chats[0], GenerationConfig(max_new_tokens=60, ignore_eos=True))
    for name, value in (("repetition_penalty", 5.0), ("presence_penalty", 2.0), ("frequency_penalty", 2.0)):
        config = GenerationConfig(max_new_tokens=60, ignore_eos=True, **{name: value})
        assert ids(backend, chats[0], config) != start, name


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"temperature": 3.0}, "BP404"),
        ({"temperature": 0.001}, "BP404"),
        ({"extra": {"colour": 1}}, "BP404"),
        ({"extra": {"n": 2}}, "BP404"),
        ({"extra": {"output_kind": 0}}, "BP404"),
        ({"extra": {"cache_salt": ""}}, "BP404"),
        ({"extra": {"min_tokens": 99}}, "BP404"),
        ({"extra": {"allowed_token_ids": [999999]}}, "BP404"),
        ({"max_new_tokens": 1024}, "BP406"),
        ({"extra": {"min_tokens": 1.5}}, "BP404"),
        ({"extra": {"repetition_detection": 1}}, "BP404"),
        ({"extra": {"skip_special_tokens": "no"}}, "BP404"),
    ],
)
def test_a_parameter_is_refused_by_code(backend, chats, fields, code):
    with pytest.raises(RequestError) as caught:
        backend.generate_detailed([chats[0]], GenerationConfig(**{"max_new_tokens": 8, **fields}))
    assert caught.value.code == code


def test_the_longest_prompt_that_fits_is_answered(backend, chats):
    backend.install_patch(steering("p"))
    longest = (chats[0] * 30)[:1020]
    answer = backend.generate_detailed([longest], GenerationConfig(max_new_tokens=4, ignore_eos=True))[0]
    assert len(answer.token_ids) == 4
    with pytest.raises(RequestError, match="BP406"):
        backend.generate_detailed([longest], GenerationConfig(max_new_tokens=5))


def test_what_depends_on_position_is_refused(backend, chats):
    for site in ("prompt", "continuation"):
        with pytest.raises(CapabilityError, match=r"BP502.*site"):
            backend.install_patch(steering("s", site=site))
    with pytest.raises(CapabilityError, match=r"BP502.*schedule"):
        backend.install_patch(steering("s", schedule=StrengthSchedule({0: 1.0, 5: 0.0})))
    assert backend.list_patches() == []
    backend.install_patch(steering("p"))
    with pytest.raises(CapabilityError, match=r"BP502.*schedule"):
        ids(backend, chats[0], GREEDY, patches={"p": {"schedule": {"0": 1, "5": 0}}})
    constant = ids(backend, chats[0], GREEDY, patches={"p": {"strength": 2, "schedule": {"0": 0.5}}})
    assert constant == ids(backend, chats[0], GREEDY, patches={"p": 1})
    with pytest.raises(CapabilityError, match="BP502"):
        backend.set_schedule("p", {0: 1.0})
    with pytest.raises(CapabilityError, match="BP502"):
        backend.stream(chats[0], GREEDY)
    with pytest.raises(UnknownPatchError, match="BP401"):
        ids(backend, chats[0], GREEDY, patches={"q": 1})


def test_patches_are_frozen_while_serving(backend, chats):
    backend.install_patch(steering("p"))
    backend.install_patch(steering("q"), enabled=False)
    wanted = ids(backend, chats[0], GREEDY)
    backend.begin_serving()
    for change in (
        lambda: backend.set_strength("p", 0.5),
        lambda: backend.set_enabled("p", False),
        lambda: backend.remove_patch("p"),
        lambda: backend.install_patch(steering("r")),
        lambda: ids(backend, chats[0], GREEDY, patches={}),
        lambda: ids(backend, chats[0], GREEDY, patches={"q": 1}),
        lambda: backend.trace(chats[0], GREEDY, patches={"q": 1}),
    ):
        with pytest.raises(EngineStateError, match="BP408"):
            change()
    assert ids(backend, chats[0], GREEDY) == wanted
    assert ids(backend, chats[0], GREEDY, patches={"p": 1.0}) == wanted
    backend.end_serving()
    assert backend.set_strength("p", 0.5) == 0.5
    assert ids(backend, chats[0], GREEDY, patches={}) != wanted


def test_a_second_thread_is_refused_and_the_first_is_not_disturbed(backend, chats):
    wanted = ids(backend, chats[0], GenerationConfig(max_new_tokens=200, ignore_eos=True))
    answers = []
    config = GenerationConfig(max_new_tokens=200, ignore_eos=True)
    first = threading.Thread(target=lambda: answers.append(ids(backend, chats[0], config)))
    first.start()
    while not backend._in_call.locked():
        time.sleep(0.001)
    for call in (
        lambda: backend.generate(chats[1], GREEDY),
        backend.worker_state,
        backend.begin_serving,
        backend.unload,
    ):
        with pytest.raises(EngineStateError, match="BP409"):
            call()
    first.join()
    assert answers == [wanted]
    assert backend.generate(chats[1], GREEDY)


def test_a_failure_in_the_worker_does_not_end_the_engine(backend, chats):
    engine = backend._engine
    for deltas, words in (
        ({30: [0.0] * 576}, "block 30"),
        ({3: [0.0] * 575}, "575 numbers"),
        ({"x": []}, "ValueError"),
    ):
        with pytest.raises(EngineError, match=words):
            engine.rpc("bp_apply_deltas", deltas)
    with pytest.raises(EngineError, match="BP118"):
        engine.rpc("bp_apply_deltas", {3: [1e39] * 576})
    assert engine.rpc("bp_apply_deltas", {"3": [1.0] * 576})[0]["norms"] == {"3": 24.0}
    assert engine.rpc("bp_apply_deltas", {})[0]["layers"] == []
    assert backend.generate(chats[0], GREEDY)


def test_logits_that_are_not_numbers_are_an_error_with_a_code(backend, chats):
    plain = ids(backend, chats[0], GREEDY)
    backend.install_patch(steering("huge", (10, 12, 14), norm=3e38, coefficient=7.0))  # their sum overflows
    with pytest.raises(EngineError, match=r"BP509.*huge"):
        ids(backend, chats[0], GREEDY)
    assert ids(backend, chats[0], GREEDY, patches={}) == plain


def test_an_interrupted_call_leaves_no_request_behind(backend, chats, monkeypatch):
    engine = backend._engine.llm.llm_engine
    step, steps = engine.step, []

    def interrupted():
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step()

    wanted = ids(backend, chats[1], GREEDY)
    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ids(backend, chats[0], GREEDY)
    monkeypatch.undo()
    assert not engine.has_unfinished_requests()
    assert ids(backend, chats[1], GREEDY) == wanted
