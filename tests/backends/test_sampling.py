"""The sampler against Transformers' own logits processors, which engines of its kind are compared with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as library

from brainpatch.backends.answers import Answer
from brainpatch.backends.sampling import advance, log_softmax
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.meaning import ResolvedSet
from brainpatch.runtime.requests import Request

WORDS = 200
PROMPT = (5, 6, 7, 7)


def logits(seed=0):
    return np.random.default_rng(seed).standard_normal(WORDS).astype(np.float32) * 3


def answer(config, **fields):
    return Answer(
        Request(PROMPT, config, ResolvedSet(), **fields), lambda ids: "x" * len(ids), frozenset([0])
    )


def drawn(config, row, count=400):
    """What is drawn from one row of logits, over many seeds."""
    tokens = []
    for seed in range(count):
        one = answer(replace(config, seed=seed))
        advance(one, row)
        tokens.append(one.token_ids[0])
    return tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 999},
    ],
)
def test_what_can_be_drawn_is_what_the_library_leaves(fields):
    config = GenerationConfig(temperature=1.7, max_new_tokens=4, **fields)
    scores = torch.from_numpy(logits())[None]
    warpers = [library.TemperatureLogitsWarper(1.7)]
    if "top_k" in fields:
        warpers.append(library.TopKLogitsWarper(fields["top_k"]))
    if "top_p" in fields:
        warpers.append(library.TopPLogitsWarper(fields["top_p"]))
    if "min_p" in fields:
        warpers.append(library.MinPLogitsWarper(fields["min_p"]))
    for warper in warpers:
        scores = warper(None, scores)
    wanted = torch.softmax(scores[0], -1).numpy()
    tokens = drawn(config, logits())
    assert set(tokens) <= set(np.flatnonzero(wanted).tolist())
    likeliest = int(wanted.argmax())
    assert tokens.count(likeliest) / len(tokens) == pytest.approx(float(wanted[likeliest]), abs=0.08)


def test_the_repetition_penalty_is_the_librarys():
    one = answer(GenerationConfig(repetition_penalty=1.8, max_new_tokens=8))
    for seed in range(6):
        row = logits(seed)
        seen = torch.tensor([[*PROMPT, *one.token_ids]])
        theirs = library.RepetitionPenaltyLogitsProcessor(1.8)(seen, torch.from_numpy(row.copy())[None])
        before = row.copy()
        advance(one, row)
        assert one.token_ids[-1] == int(theirs.argmax())
        assert (row == before).all()


def test_penalties_count_generated_tokens():
    one = answer(GenerationConfig(presence_penalty=2.0, frequency_penalty=1.0, max_new_tokens=4))
    row = np.zeros(WORDS, dtype=np.float32)
    row[[5, 9, 11]] = 8.0, 6.0, 2.5  # 5 is in the prompt, which does not count
    for _ in range(4):
        advance(one, row)
    # 5: 8, then 8 - 3 = 5; 9: 6, then 3; 5 again: 8 - 4 = 4
    assert one.token_ids == [5, 9, 5, 5]


def test_logprobs_are_the_models_own_and_hold_the_chosen_token():
    config = GenerationConfig(logprobs=3, temperature=5.0, seed=4, max_new_tokens=2, presence_penalty=1.0)
    one = answer(config)
    advance(one, logits())
    theirs = torch.log_softmax(torch.from_numpy(logits()), -1).numpy()
    best = np.argsort(-theirs)[:3].tolist()
    assert list(one.logprobs[0])[:3] == best
    assert one.token_ids[0] in one.logprobs[0]
    for token, value in one.logprobs[0].items():
        assert value == pytest.approx(float(theirs[token]), abs=1e-6)
    zero = answer(replace(config, logprobs=0))
    advance(zero, logits())
    assert list(zero.logprobs[0]) == zero.token_ids


def test_nan_and_infinity_end_the_answer_with_its_code():
    for value in (np.nan, np.inf):
        row = logits()
        row[17] = value
        one = answer(GenerationConfig())
        advance(one, row)
        assert one.error is not None
        assert one.error.code == "BP509"
        assert one.done
        advance(one, logits())
        assert one.token_ids == []


def test_forced_tokens_are_taken_and_rows_kept():
    rows = []
    one = answer(GenerationConfig(max_new_tokens=3), forced=(11, 12, 13), rows=rows)
    for seed in range(3):
        advance(one, logits(seed))
    assert one.token_ids == [11, 12, 13]
    assert one.finish_reason == "length"
    for seed in range(3):
        np.testing.assert_array_equal(rows[seed], log_softmax(logits(seed)))


def test_a_seed_is_a_draw_and_no_seed_is_another_each_time():
    config = GenerationConfig(temperature=1.0, max_new_tokens=3, seed=-3)
    first, second = answer(config), answer(config)
    fresh = [answer(replace(config, seed=None, temperature=50.0)) for _ in range(4)]
    for seed in range(3):
        for one in (first, second, *fresh):
            advance(one, logits(seed))
    assert first.token_ids == second.token_ids
    assert len({tuple(one.token_ids) for one in fresh}) > 1
