"""Batches, sampling, streams and prompts on MLX, with a narrow model of random weights and the real tokenizer."""

from __future__ import annotations

import math
import signal
import threading
import time

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from brainpatch.errors import EngineError, EngineStateError, RequestError
from brainpatch.runtime.config import GenerationConfig
from tests.engines.material import patch
from tests.engines.mlx.conftest import opened, watched

pytestmark = pytest.mark.model

PROMPT = [504, 2633, 314]
LONG = GenerationConfig(max_new_tokens=4000, ignore_eos=True)  # which would take minutes


def config(**fields):
    return GenerationConfig(**{"max_new_tokens": 8, "ignore_eos": True, **fields})


def texts(backend, ids):
    return backend.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_rows_have_their_own_parameters(backend):
    backend.install_patch(patch(), enabled=False)
    stop = backend.token_texts(backend.generate_detailed([PROMPT], config())[0].token_ids)[3]
    configs = [
        config(),
        config(max_new_tokens=3),
        config(temperature=0.8, seed=1, top_p=0.9),
        config(stop=[stop]),
        config(temperature=1.0, seed=2, top_k=40, min_p=0.01),
        config(logprobs=2),
        config(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    ]
    prompts = [PROMPT, [5], PROMPT, PROMPT, [*PROMPT, 7, 8], PROMPT, PROMPT]
    wishes = [{}, {"p": 1}, {}, {}, {"p": -1}, {}, {}]
    together = backend.generate_detailed(prompts, configs, patches=wishes)
    for prompt, one, wish, answer in zip(prompts, configs, wishes, together, strict=True):
        alone = backend.generate_detailed([prompt], one, patches=wish)[0]
        assert (alone.token_ids, alone.text, alone.finish_reason) == (
            answer.token_ids,
            answer.text,
            answer.finish_reason,
        )
    assert len(together[1].token_ids) == 3
    assert together[1].finish_reason == "length"
    assert together[3].finish_reason == "stop"
    assert together[0].logprobs is None
    assert all(len(row) == 2 for row in together[5].logprobs)


def test_a_seed_gives_the_same_draw_and_another_seed_another(backend):
    warm = config(temperature=1.0, seed=7)
    first = backend.generate(PROMPT, warm)
    assert backend.generate_batch([[9], PROMPT], warm)[1] == first
    assert backend.generate(PROMPT, config(temperature=1.0, seed=8)) != first
    answers = backend.generate_detailed([PROMPT], config(temperature=1.0, seed=6, n=3))
    assert answers[1].text == first
    assert len({answer.text for answer in answers}) == 3
    fresh = {backend.generate(PROMPT, config(temperature=2.0, seed=None)) for _ in range(3)}
    assert len(fresh) > 1


def test_a_stop_string_ends_the_text_before_it(backend):
    tokens = backend.generate_detailed([PROMPT], config(max_new_tokens=12))[0].token_ids
    whole, boundary = texts(backend, tokens), len(texts(backend, tokens[:6]))
    stop = whole[boundary - 2 : boundary + 2]  # across tokens: its beginning must not leak into a stream
    answer = backend.generate_detailed([PROMPT], config(max_new_tokens=12, stop=["never said", stop]))[0]
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
    pieces = list(backend.stream(PROMPT, config(max_new_tokens=12, stop=[stop])))
    assert "".join(pieces) == answer.text


def test_the_end_token_ends_an_answer_unless_ignored(backend, monkeypatch):
    long = backend.generate_detailed([PROMPT], config())[0]
    end = next(token for token in long.token_ids[2:])
    monkeypatch.setattr(backend, "_loaded", backend._loaded._replace(end_ids=frozenset({end})))
    ended = backend.generate_detailed([PROMPT], config(ignore_eos=False))[0]
    assert ended.finish_reason == "stop"
    assert ended.token_ids == long.token_ids[: long.token_ids.index(end) + 1]
    assert ended.text == texts(backend, ended.token_ids[:-1])
    assert backend.generate_detailed([PROMPT], config())[0].token_ids == long.token_ids


def test_a_stream_is_the_text_in_pieces(backend):
    backend.install_patch(patch(), enabled=False)
    for wish in ({}, {"p": 1}):
        pieces = list(backend.stream(PROMPT, config(), patches=wish))
        assert len(pieces) > 3
        assert "".join(pieces) == backend.generate(PROMPT, config(), patches=wish)
    assert all("\ufffd" not in piece for piece in pieces[:-1])


def threads():
    return [t for t in threading.enumerate() if t.name == "brainpatch-stream"]


def test_closing_a_stream_stops_the_work(backend):
    backend.install_patch(patch())
    stream = backend.stream(PROMPT, LONG)
    next(stream)
    assert watched(backend.model) == [15]
    stream.close()
    assert threads() == []
    assert watched(backend.model) == []
    forgotten = backend.stream(PROMPT, LONG)
    next(forgotten)
    del forgotten
    assert threads() == []
    assert backend.stream(PROMPT, config()) is not None  # never started
    assert threads() == []


@pytest.mark.timeout(60)
def test_an_interruption_ends_the_work(backend):
    backend.install_patch(patch())
    reference = backend.generate(PROMPT, config(), patches={})
    here = threading.get_ident()  # a real signal: only that wakes a thread that waits
    timer = threading.Timer(0.5, lambda: signal.pthread_kill(here, signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        backend.generate(PROMPT, LONG)
    assert time.monotonic() - started < 10
    assert watched(backend.model) == []
    assert backend.generate(PROMPT, config(), patches={}) == reference


def test_a_long_prompt_ends_when_nobody_waits_for_it(backend, monkeypatch):
    class Gone:
        cancelled = True

        def piece(self, text):
            raise AssertionError("nothing is said to somebody who has gone")

    monkeypatch.setattr(backend, "prefill_chunk", 2)
    request = backend.requests([[5] * 3000], config())
    started = time.monotonic()
    (answer,) = backend.run_batch(request, [Gone()])
    assert answer.finish_reason == "cancelled"
    assert time.monotonic() - started < 2


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
    assert watched(backend.model) == []
    monkeypatch.undo()
    assert backend.generate(PROMPT, config(), patches={}) == reference


def test_a_model_may_be_unloaded_while_it_answers(narrow_folder):
    backend = opened(narrow_folder)
    stream = backend.stream(PROMPT, config(max_new_tokens=30))
    first = next(stream)
    backend.unload()  # waits
    rest = list(stream)
    assert first
    assert len(rest) > 10
    with pytest.raises(EngineStateError) as caught:
        backend.generate(PROMPT)
    assert caught.value.code == "BP407"


def test_prompts_of_every_kind_give_the_same_ids(backend):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    ids = backend._encode(messages, use_chat_template=True, system=None)
    assert backend._encode("Hello", use_chat_template=True, system="Be brief.") == ids
    assert backend._encode(ids, use_chat_template=True, system=None) == ids
    raw = backend._encode("Hello", use_chat_template=False, system=None)
    assert raw == backend.tokenizer("Hello")["input_ids"]
    with pytest.raises(RequestError, match="beside messages"):
        backend.generate(messages, system="Be brief.")


def test_a_long_batch_is_cut_and_keeps_its_order(backend, monkeypatch):
    monkeypatch.setattr(backend, "max_batch_size", 3)
    widths = []
    batch = backend._batch
    monkeypatch.setattr(
        backend, "_batch", lambda requests, heard: (widths.append(len(requests)), batch(requests, heard))[1]
    )
    prompts = [[11 + i, 5, 6, *[7] * (i % 3)] for i in range(8)]
    answers = backend.generate_batch(prompts, config(max_new_tokens=3))
    assert widths == [3, 3, 2]
    monkeypatch.undo()
    assert answers == [backend.generate(prompt, config(max_new_tokens=3)) for prompt in prompts]


def test_only_equal_lengths_share_a_batch_where_rows_cannot_be_padded(backend, monkeypatch):
    widths = []
    batch = backend._batch
    monkeypatch.setattr(
        backend, "_batch", lambda requests, heard: (widths.append(len(requests)), batch(requests, heard))[1]
    )
    prompts = [[5, 6], [7, 8, 9], [10, 11], [3]]
    usual = backend.generate_batch(prompts, config(max_new_tokens=3))
    monkeypatch.setattr(backend, "_loaded", backend._loaded._replace(can_be_padded=False))
    assert backend.generate_batch(prompts, config(max_new_tokens=3)) == usual
    assert widths == [4, 1, 2, 1]


def test_logits_that_are_not_finite_are_an_error_of_their_row_alone(backend):
    backend.install_patch(patch("huge", norm=1024.0 * 24, vectors={"v15": [1e37] * 576}), enabled=False)
    with pytest.raises(EngineError, match="huge@8") as caught:
        backend.generate_batch([PROMPT, [9, 4], PROMPT], config(), patches=[{}, {"huge": 8}, {}])
    first, broken, last = caught.value.answers
    assert (caught.value.code, broken) == ("BP509", None)
    assert first.text == last.text == backend.generate(PROMPT, config(), patches={})
    assert math.isfinite(backend.generate_detailed([PROMPT], config(logprobs=0))[0].logprobs[0].popitem()[1])


def test_a_prompt_of_one_token_among_others(backend):
    prompts = [[9], [9, 5]]
    together = backend.generate_detailed(prompts, config())
    assert [one.token_ids for one in together] == [
        backend.generate_detailed([prompt], config())[0].token_ids for prompt in prompts
    ]
