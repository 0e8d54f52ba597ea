"""One patch, one meaning: vLLM against Transformers with plain hooks, both in float32."""

from __future__ import annotations

import numpy as np
import pytest

from brainpatch.runtime import GenerationConfig
from tests.engines.vllm.conftest import alone
from tests.engines.vllm.material import EDITED, cosine, edits_of, log_softmax, steering

pytestmark = [pytest.mark.vllm, pytest.mark.model]

TIE = 1e-4


@pytest.mark.parametrize("name", EDITED)
def test_the_logits_are_those_of_transformers(backend, chats, reference, name):
    backend.install_patch(steering(name, EDITED[name]))
    config = GenerationConfig(max_new_tokens=1, extra={"logprobs": -1})
    for number, answer in enumerate(backend.generate_detailed(chats[:2], config)):
        theirs = log_softmax(reference[name, number]["logits"])
        ours = np.array([answer.logprobs[0][token] for token in range(len(theirs))])
        assert cosine(ours, theirs) >= 0.99999
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


def line(frames, interpolate=False, default=1.0):
    """A schedule as it is explained to people: keyframes, held or joined by straight lines."""

    def value(n):
        before = [at for at in frames if at <= n]
        after = [at for at in frames if at > n]
        if not before:
            return default
        low = frames[max(before)]
        if not interpolate or not after:
            return low
        share = (n - max(before)) / (min(after) - max(before))
        return low + share * (frames[min(after)] - low)

    return value


SITES = {
    "all": lambda p, length: 1.0,
    "prompt": lambda p, length: float(p < length),
    "continuation": lambda p, length: float(p >= length),
}
STEPS = 12
CASES = {
    "site prompt": [("a", (15,), "prompt", 1.0, None)],
    "site continuation": [("a", (0, 15, 29), "continuation", -0.8, None)],
    "off after three tokens": [("a", (15,), "all", 1.0, ({0: 1.0, 3: 0.0}, False, 1.0))],
    "a ramp": [("a", (12, 20), "all", 1.0, ({0: 0.0, 8: 1.5}, True, 1.0))],
    "nothing until the fourth token": [("a", (15,), "all", 1.0, ({4: 1.0}, False, 0.0))],
    "a ramp on the continuation": [("a", (9,), "continuation", 1.0, ({1: -1.0, 6: 1.0}, True, 0.5))],
    "three at one block": [
        ("a", (15,), "prompt", 1.0, None),
        ("b", (15,), "continuation", 0.7, ({0: 1.0, 5: 0.2}, True, 1.0)),
        ("c", (15, 29), "all", -0.5, ({2: 0.0}, False, 1.0)),
    ],
}


def test_schedules_and_sites_give_the_logits_of_transformers(backend, model_folder, chats, tmp_path):
    """All in one batch; Transformers gets the scales that a person would compute, position by position."""
    wishes, edits = [], []
    for number, parts in enumerate(CASES.values()):
        wish, wanted = {}, []
        for letter, layers, site, strength, schedule in parts:
            patch = steering(f"{letter}{number}", layers, site=site)
            backend.install_patch(patch, enabled=False)
            wish[patch.name] = {"strength": strength}
            value = line({0: 1.0})
            if schedule is not None:
                frames, interpolate, default = schedule
                value = line(frames, interpolate, default)
                wish[patch.name]["schedule"] = {
                    "keyframes": {str(at): y for at, y in frames.items()},
                    "interpolate": interpolate,
                    "default": default,
                }
            wanted += [(layer, vector, site, strength, value) for layer, vector in edits_of(patch).items()]
        wishes.append(wish)
        edits.append(wanted)
    config = GenerationConfig(max_new_tokens=STEPS, ignore_eos=True, extra={"logprobs": -1})
    prompts = [chats[number % len(chats)] for number in range(len(wishes))]
    answers = backend.generate_detailed(prompts, config, patches=wishes)
    plain = backend.generate_detailed(prompts, config, patches={})
    forced = []
    for prompt, answer, wanted in zip(prompts, answers, edits, strict=True):
        ids, length = [*prompt, *answer.token_ids[:-1]], len(prompt)
        forced.append(
            {
                "ids": ids,
                "first": length - 1,
                "edits": [
                    {
                        "layer": layer,
                        "vector": vector,
                        "scales": [
                            strength * value(max(0, p - length)) * SITES[site](p, length)
                            for p in range(len(ids))
                        ],
                    }
                    for layer, vector, site, strength, value in wanted
                ],
            }
        )
    question = {"model": str(model_folder), "blocks": "model.layers", "runs": [], "forced": forced}
    arrays = np.load(alone("plain_transformers.py", question, tmp_path / "forced.npz"))
    worst = 1.0
    for number, (name, answer) in enumerate(zip(CASES, answers, strict=True)):
        theirs = arrays[f"forced_{number}"]
        for step, entry in enumerate(answer.logprobs):
            ours = np.array([entry[token] for token in range(theirs.shape[1])])
            row = log_softmax(theirs[step])
            worst = min(worst, cosine(ours, row))
            assert worst >= 0.99999, (name, step, worst)
            np.testing.assert_allclose(ours, row, atol=5e-3, err_msg=f"{name}, step {step}")
        assert answer.logprobs[-1] != plain[number].logprobs[-1], name
    print(f"the least cosine over {len(CASES)} cases and {STEPS} steps: {worst:.9f}")
