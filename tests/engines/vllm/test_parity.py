"""One patch, one meaning: vLLM against Transformers with plain hooks, both in float32."""

from __future__ import annotations

import numpy as np
import pytest

from brainpatch.runtime import GenerationConfig
from tests.engines.vllm.material import EDITED, steering

pytestmark = [pytest.mark.vllm, pytest.mark.model]

TIE = 1e-4


@pytest.mark.parametrize("name", EDITED)
def test_the_logits_are_those_of_transformers(backend, chats, reference, name):
    backend.install_patch(steering(name, EDITED[name]))
    config = GenerationConfig(max_new_tokens=1, extra={"logprobs": -1})
    for number, answer in enumerate(backend.generate_detailed(chats[:2], config)):
        theirs = reference[name, number]["logits"].astype(np.float64)
        theirs -= np.log(np.exp(theirs - theirs.max()).sum()) + theirs.max()
        ours = np.array([answer.logprobs[0][token] for token in range(len(theirs))])
        assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) >= 0.99999
        best = np.argsort(theirs)[::-1][:5]
        np.testing.assert_allclose(ours[best], theirs[best], atol=1e-3)


def test_greedy_text_is_that_of_transformers(backend, chats, reference):
    backend.install_patch(steering("three", EDITED["three"]))
    config = GenerationConfig(max_new_tokens=24, ignore_eos=True)
    for number, answer in enumerate(backend.generate_detailed(chats, config)):
        theirs = reference["three", number]
        differ = np.flatnonzero(theirs["tokens"] != np.array(answer.token_ids))
        if differ.size:
            assert theirs["gap"][differ[0]] < TIE, f"question {number} differs at token {differ[0]}"


def test_the_effect_is_there(reference, plain):
    theirs = [reference["three", number]["tokens"].tolist() for number in range(8)]
    assert all(a != b["token_ids"] for a, b in zip(theirs, plain["answers"], strict=True))
