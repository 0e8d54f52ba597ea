"""Batches, sampling, streams and prompts on Transformers with a real model."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from brainpatch.errors import EngineError, RequestError
from brainpatch.runtime.config import GenerationConfig
from tests.engines.material import patch
from tests.engines.transformers.conftest import hooks

pytestmark = pytest.mark.model

PROMPT = "How was your day?"


def config(**fields):
    return GenerationConfig(**{"max_new_tokens": 12, **fields})


@pytest.mark.parametrize("extra", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_the_kind_of_cache_changes_nothing(backend, extra):
    backend.install_patch(patch(schedule={"0": 1.0, "40": 2.0}, site="all"))
    backend.install_patch(patch("q", seed=3, site="prompt", schedule={"0": 1.0, "4": 9.0}))
    prompts = [PROMPT, "Hi"]
    usual = backend.generate_detailed(prompts, config(max_new_tokens=20))
    other = backend.generate_detailed(prompts, config(max_new_tokens=20, extra=extra))
    assert [a.token_ids for a in usual] == [a.token_ids for a in other]


def test_rows_have_their_own_parameters(backend):
    configs = [
        config(),
        config(max_new_tokens=3),
        config(temperature=0.8, seed=1, top_p=0.9),
        config(stop=["day"]),
        config(temperature=1.0, seed=2, top_k=40, min_p=0.01),
        config(logprobs=2),
        config(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    ]
    together = backend.generate_detailed([PROMPT] * len(configs), configs)
    for one, answer in zip(configs, together, strict=True):
        alone = backend.generate_detailed([PROMPT], one)[0]
        assert (alone.token_ids, alone.text, alone.finish_reason) == (
            answer.token_ids,
            answer.text,
            answer.finish_reason,
        )
    assert len(together[1].token_ids) == 3
    assert together[1].finish_reason == "length"
    assert together[0].logprobs is None
    assert all(len(row) == 2 for row in together[5].logprobs)
    assert len({tuple(a.token_ids) for a in together}) >= 5


def test_a_seed_gives_the_same_draw_and_another_seed_another(backend):
    warm = config(temperature=1.0, seed=7)
    first = backend.generate(PROMPT, warm)
    assert backend.generate_batch(["Hi", PROMPT], warm)[1] == first
    assert backend.generate(PROMPT, config(temperature=1.0, seed=8)) != first
    answers = backend.generate_detailed([PROMPT], config(temperature=1.0, seed=6, n=3))
    assert answers[1].text == first
    fresh = {backend.generate(PROMPT, config(temperature=2.0, seed=None)) for _ in range(3)}
    assert len(fresh) > 1


def test_whole_numbers_are_numbers(backend):
    whole = backend.generate(PROMPT, config(temperature=1, repetition_penalty=2, seed=3, max_new_tokens=4))
    assert whole == backend.generate(
        PROMPT, config(temperature=1.0, repetition_penalty=2.0, seed=3, max_new_tokens=4)
    )


def test_greedy_penalties_are_those_of_the_library(backend):
    ids = backend._encode("Say la la la la la", use_chat_template=True, system=None)
    ours = backend.generate_detailed([ids], config(repetition_penalty=1.5))[0].token_ids
    tensor = torch.tensor([ids])
    with torch.no_grad():
        theirs = backend.model.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=12,
            do_sample=False,
            repetition_penalty=1.5,
        )
    assert theirs[0, len(ids) :].tolist() == ours


def test_presence_and_frequency_penalties_count_generated_tokens_only(backend):
    base = backend.generate_detailed([PROMPT], config(max_new_tokens=2, logprobs=0))[0]
    for field in ("presence_penalty", "frequency_penalty"):
        pushed = backend.generate_detailed([PROMPT], config(max_new_tokens=24, **{field: 2.0}))[0]
        assert pushed.token_ids[0] == base.token_ids[0]  # nothing was generated yet
        assert len(set(pushed.token_ids)) > 20


def test_a_stop_string_ends_the_text_before_it(backend):
    whole = backend.generate(PROMPT, config(max_new_tokens=24))
    word = whole.split()[5]
    answer = backend.generate_detailed([PROMPT], config(max_new_tokens=24, stop=["never said", word]))[0]
    assert answer.text == whole[: whole.index(word)]
    assert answer.finish_reason == "stop"
    assert "".join(backend.stream(PROMPT, config(max_new_tokens=24, stop=[word]))) == answer.text


def test_a_stop_string_across_tokens_never_leaks_into_a_stream(backend):
    whole = backend.generate(PROMPT, config(max_new_tokens=24))
    stop = whole[12:19]
    pieces = list(backend.stream(PROMPT, config(max_new_tokens=24, stop=[stop])))
    assert "".join(pieces) == whole[: whole.index(stop)]


def test_the_end_token_ends_an_answer_unless_ignored(backend):
    ended = backend.generate_detailed(["Hi"], config(max_new_tokens=40))[0]
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] == backend.tokenizer.eos_token_id
    assert "<|im_end|>" not in ended.text
    longer = backend.generate_detailed(["Hi"], config(max_new_tokens=40, ignore_eos=True))[0]
    assert len(longer.token_ids) == 40
    assert longer.token_ids[: len(ended.token_ids)] == ended.token_ids
    assert longer.finish_reason == "length"


def test_a_stream_is_the_text_in_pieces(backend):
    backend.install_patch(patch(), enabled=False)
    for wish in ({}, {"p": 1}):
        pieces = list(backend.stream(PROMPT, config(), patches=wish))
        assert len(pieces) > 5
        assert "".join(pieces) == backend.generate(PROMPT, config(), patches=wish)


def test_characters_of_several_tokens_come_whole(backend):
    prompt = "Repeat exactly: 🧠🌍 你好 é"
    pieces = list(backend.stream(prompt, config(max_new_tokens=24, repetition_penalty=1.0)))
    text = backend.generate(prompt, config(max_new_tokens=24))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces[:-1])


def threads():
    return [t for t in threading.enumerate() if t.name == "brainpatch-stream"]


def test_closing_a_stream_stops_the_work(backend):
    backend.install_patch(patch())
    stream = backend.stream(PROMPT, config(max_new_tokens=2000, ignore_eos=True))
    next(stream)
    assert hooks(backend.model) == 1
    stream.close()
    assert threads() == []
    assert hooks(backend.model) == 0
    forgotten = backend.stream(PROMPT, config(max_new_tokens=2000, ignore_eos=True))
    next(forgotten)
    del forgotten
    assert threads() == []
    never_started = backend.stream(PROMPT, config())
    assert threads() == []
    never_started.close()


def test_an_error_in_a_stream_reaches_its_reader_and_leaves_nothing(backend, monkeypatch):
    backend.install_patch(patch())
    reference = backend.generate(PROMPT, config(), patches={})

    def broken(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("brainpatch.backends.answers.Answer.add", broken)
    with pytest.raises(KeyboardInterrupt):
        next(backend.stream(PROMPT, config()))
    with pytest.raises(KeyboardInterrupt):
        backend.generate(PROMPT, config())
    assert threads() == []
    assert hooks(backend.model) == 0
    monkeypatch.undo()
    assert backend.generate(PROMPT, config(), patches={}) == reference


def test_nothing_stays_on_the_users_model(backend):
    model = backend.model
    before = dict(vars(model)), model.generation_config.to_dict(), backend.tokenizer.padding_side
    backend.install_patch(patch())
    backend.generate_batch([PROMPT, "Hi"], config(extra={"cache_implementation": "static"}))
    after = dict(vars(model)), model.generation_config.to_dict(), backend.tokenizer.padding_side
    assert after == before
    assert not model.training


def test_prompts_of_every_kind_give_the_same_ids(backend):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    ids = backend._encode(messages, use_chat_template=True, system=None)
    assert backend._encode(PROMPT, use_chat_template=True, system="Be brief.") == ids
    assert backend._encode(ids, use_chat_template=True, system=None) == ids
    assert ids.count(backend.tokenizer.bos_token_id) == 3  # one for each turn: the template's own
    raw = backend._encode(PROMPT, use_chat_template=False, system=None)
    assert raw == backend.tokenizer(PROMPT)["input_ids"]
    with pytest.raises(RequestError, match="without a chat template"):
        backend.generate(PROMPT, use_chat_template=False, system="Be brief.")
    with pytest.raises(RequestError, match="beside messages"):
        backend.generate(messages, system="Be brief.")


def test_a_long_batch_is_cut_and_keeps_its_order(backend, monkeypatch):
    monkeypatch.setattr(backend, "max_batch_size", 3)
    widths = []
    batch = backend._batch
    monkeypatch.setattr(
        backend, "_batch", lambda requests, heard: (widths.append(len(requests)), batch(requests, heard))[1]
    )
    prompts = [f"Say the number {i}, {'please ' * (i % 3)}now." for i in range(8)]
    answers = backend.generate_batch(prompts, config(max_new_tokens=4))
    assert widths == [3, 3, 2]
    assert answers == [backend.generate(prompt, config(max_new_tokens=4)) for prompt in prompts]


def test_a_batch_leaves_room_for_its_longest_prompt_and_its_longest_answer(backend):
    context = backend._context_length()
    install = backend.requests(["Hi"], config(max_new_tokens=context - 40))
    long = backend.requests(["please " * 200], config(max_new_tokens=4))
    assert len(backend._batches([*install, *install])) == 1
    assert len(backend._batches([*install, *long])) == 2


def test_logits_that_are_not_finite_are_an_error_that_names_the_strength(backend):
    huge = patch("huge", norm=1024.0 * 24, vectors={"v15": [1e37] * 576})
    backend.install_patch(huge, enabled=False)
    with pytest.raises(EngineError, match="huge@8") as caught:
        backend.generate(PROMPT, config(), patches={"huge": 8})
    assert caught.value.code == "BP509"
    assert math.isfinite(backend.generate_detailed([PROMPT], config(logprobs=0))[0].logprobs[0].popitem()[1])


def test_a_row_that_breaks_leaves_the_others_of_its_batch(backend):
    backend.install_patch(patch("huge", norm=1024.0 * 24, vectors={"v15": [1e37] * 576}), enabled=False)
    prompts = [PROMPT, "Hi", PROMPT]
    with pytest.raises(EngineError) as caught:
        backend.generate_batch(prompts, config(), patches=[{}, {"huge": 8}, {}])
    first, broken, last = caught.value.answers
    assert (caught.value.code, broken) == ("BP509", None)
    assert first.text == last.text == backend.generate(PROMPT, config(), patches={})


def test_apply_to_prompt_false_edits_the_continuation_alone(backend):
    backend.install_patch(patch(), strength=1.5)
    backend.install_patch(patch("q", seed=2, site="prompt"), strength=4.0)
    backend.install_patch(patch("c", site="continuation"), strength=1.5, enabled=False)
    expected = backend.generate(PROMPT, config(), patches={"c": 1.5})
    assert backend.generate(PROMPT, config(), apply_to_prompt=False) == expected
    assert backend.generate(PROMPT, config()) != expected


def test_last_trace_is_that_of_the_first_row(backend):
    backend.install_patch(patch(norm=10.0, layers=(20, 7), schedule={"0": 1.0, "2": 0.0}))
    backend.generate(PROMPT, config(max_new_tokens=4))
    assert [index for index, _ in backend.last_trace] == [0, 0, 1, 2]
    assert [norm > 9 for _, norm in backend.last_trace] == [True, True, True, False]
