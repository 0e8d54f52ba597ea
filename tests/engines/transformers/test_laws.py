"""The laws, on Transformers with a real model in float32."""

from __future__ import annotations

import threading

import pytest
import torch

from brainpatch.backends.sampling import log_softmax
from brainpatch.errors import CapabilityError, RequestError, UnknownPatchError
from brainpatch.patch.schedule import StrengthSchedule
from brainpatch.runtime.config import GenerationConfig
from tests.engines.transformers import by_hand
from tests.engines.transformers.conftest import LAYERS, hooks, patch, weights_digest

pytestmark = pytest.mark.model

SHORT = GenerationConfig(max_new_tokens=10, logprobs=5)
PROMPTS = [
    "How was your day?",
    "Tell me about the sea, and about the ships that cross it in winter.",
    "Hi",
    "Write one sentence about bread.",
]


def plain_generate(model, prompt_ids, count):
    """The library's own greedy answer, with nothing of ours near it."""
    ids = torch.tensor([prompt_ids])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return out.sequences[0, len(prompt_ids) :].tolist(), torch.stack(out.logits)[:, 0]


def full_logprobs(backend, prompt, wish, config=SHORT):
    """Token ids, and every log-probability that was recorded."""
    answer = backend.generate_detailed([prompt], config, patches=wish)[0]
    return answer.token_ids, answer.logprobs


def test_zero_is_nothing_on_transformers(backend):
    zero_coefficient = patch("flat", norm=0.0)
    for item in (patch(), patch("other", layers=(0, 29), seed=1), zero_coefficient):
        backend.install_patch(item, strength=1.0, enabled=False)
    reference, logits = plain_generate(
        backend.model, backend._encode(PROMPTS[0], use_chat_template=True, system=None), 10
    )
    raw = [log_softmax(row) for row in logits.float().numpy()]
    assert full_logprobs(backend, PROMPTS[0], {"p": 1})[0] != reference  # the patch is one that acts
    scheduled = {"strength": 1, "schedule": {"0": 0}}
    for wish in (None, {}, {"p": 0}, {"p": 0, "other": 0.0}, {"flat": 3}, {"p": scheduled}, {"p": 1e-13}):
        ids, logprobs = full_logprobs(backend, PROMPTS[0], wish)
        assert ids == reference
        for step, row in enumerate(logprobs):
            for token, value in row.items():
                assert value == float(raw[step][token])  # bit for bit
    assert backend.assert_zero_is_baseline(PROMPTS[0], SHORT)["identical"]


def test_zero_is_nothing_beside_a_patched_row(backend):
    backend.install_patch(patch(), enabled=False)
    prompts = [PROMPTS[0]] * 3
    alone = backend.generate_detailed(prompts, SHORT, patches={})
    beside = backend.generate_detailed(prompts, SHORT, patches=[{"p": 0}, {"p": 2}, {}])
    assert beside[1].token_ids != alone[1].token_ids
    for i in (0, 2):
        assert beside[i].token_ids == alone[i].token_ids
        assert beside[i].logprobs == alone[i].logprobs  # same batch shape: bit for bit


def test_without_edits_there_are_no_hooks(backend):
    backend.install_patch(patch(), strength=0.0)
    seen = []
    block = backend.blocks[3]
    forward = block.forward
    block.forward = lambda *a, **k: (seen.append(hooks(backend.model)), forward(*a, **k))[1]
    try:
        backend.generate("Hi", SHORT)
        assert set(seen) == {0}
        backend.generate("Hi", SHORT, patches={"p": 1})
        assert set(seen) == {0, 1}
    finally:
        del block.forward


def test_weights_never_change_on_transformers(backend):
    before = weights_digest(backend.model)
    backend.install_patch(patch(layers=(0, 15, 29)), strength=8.0)
    backend.generate_batch(PROMPTS, SHORT)
    list(backend.stream(PROMPTS[0], SHORT))
    backend.trace(PROMPTS[0], SHORT)
    assert weights_digest(backend.model) == before


CASES = {
    "constant": [("p", patch(), 1.0, None)],
    "prompt": [("p", patch(site="prompt"), 1.5, None)],
    "continuation": [("p", patch(site="continuation"), 1.5, None)],
    "schedule": [("p", patch(schedule=StrengthSchedule({0: 0.0, 3: 1.5, 6: -1.0})), 1.0, None)],
    "interpolated": [("p", patch(), 1.0, StrengthSchedule({0: 2.0, 8: -2.0}, interpolate=True))],
    "late": [("p", patch(), 1.0, StrengthSchedule({4: 0.0}, default=1.5))],
    "several": [
        ("p", patch(layers=(0, 15, 29)), 0.7, None),
        ("q", patch("q", layers=(3, 15), seed=5, site="continuation"), -0.9, StrengthSchedule({0: 1, 5: 2})),
        ("r", patch("r", layers=(15,), seed=6, site="prompt", max_abs_strength=2.0), 1.9, None),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_an_edit_is_a_function_of_position_on_transformers(backend, case):
    """One batch with padding, cached decoding: each row gets what the formula says, position by position."""
    wish, applied = {}, []
    for name, item, strength, schedule in CASES[case]:
        backend.install_patch(item, enabled=False)
        wish[name] = {"strength": strength, **({"schedule": schedule} if schedule else {})}
        applied.append((item, strength, schedule or item.manifest.schedule))
    answers = backend.generate_detailed(PROMPTS, SHORT, patches=wish)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = backend._encode(prompt, use_chat_template=True, system=None)
        expected = by_hand.logprobs(backend.model, ids, answer.token_ids, applied)
        for step, row in enumerate(answer.logprobs):
            for token, value in row.items():
                assert value == pytest.approx(float(expected[step, token]), abs=2e-3)
    plain = backend.generate_detailed(PROMPTS, SHORT, patches={})
    assert [a.logprobs for a in answers] != [a.logprobs for a in plain]


WISHES = [{"p": 1.2}, {}, {"q": -1}, {"p": {"strength": 1, "schedule": {"0": 1, "3": 0}}}]


def test_requests_are_isolated_on_transformers(backend):
    backend.install_patch(patch(), enabled=False)
    backend.install_patch(patch("q", layers=(2, 20), seed=9, site="continuation"), enabled=False)
    together = backend.generate_detailed(PROMPTS, SHORT, patches=WISHES)
    for prompt, wish, answer in zip(PROMPTS, WISHES, together, strict=True):
        alone = backend.generate_detailed([prompt], SHORT, patches=wish)[0]
        assert alone.token_ids == answer.token_ids
        for one, other in zip(alone.logprobs, answer.logprobs, strict=True):
            for token in one.keys() & other.keys():
                assert one[token] == pytest.approx(other[token], abs=1e-3)
    reordered = backend.generate_detailed(PROMPTS[::-1], SHORT, patches=WISHES[::-1])
    assert [a.token_ids for a in reordered[::-1]] == [a.token_ids for a in together]


def test_threads_are_isolated(backend):
    backend.install_patch(patch(), enabled=False)
    expected = {w: backend.generate(PROMPTS[0], SHORT, patches={"p": w} if w else {}) for w in (0, 1, -1)}
    got = {}

    def work(strength):
        got[strength] = [
            backend.generate(PROMPTS[0], SHORT, patches={"p": strength} if strength else {}) for _ in range(3)
        ]

    threads = [threading.Thread(target=work, args=(w,)) for w in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got == {w: [text] * 3 for w, text in expected.items()}


@pytest.mark.parametrize("case", CASES)
def test_measured_equals_expected_on_transformers(backend, case):
    wish = {}
    for name, item, strength, schedule in CASES[case]:
        backend.install_patch(item, enabled=False)
        wish[name] = {"strength": strength, **({"schedule": schedule} if schedule else {})}
    rows = backend.trace(PROMPTS[0], SHORT, patches=wish)
    prompt_ids = backend._encode(PROMPTS[0], use_chat_template=True, system=None)
    count = len(prompt_ids)
    seen = {(row.layer, row.position): row for row in rows}
    assert len(seen) == len(rows)
    layers = {i.layer for _, item, _, _ in CASES[case] for i in item.manifest.interventions}
    last = count + len(backend.generate_detailed([PROMPTS[0]], SHORT, patches=wish)[0].token_ids) - 1
    for layer in range(LAYERS):
        for position in range(last):
            by_formula = sum(
                by_hand.delta(item, strength, schedule or item.manifest.schedule, layer, position, count)
                for _, item, strength, schedule in CASES[case]
            )
            expected = float(by_formula.norm())
            row = seen.pop((layer, position), None)
            assert (row is not None) == (layer in layers and expected > 1e-9)
            if row is not None:
                assert row.expected == pytest.approx(expected, rel=1e-6)
                assert row.norm == pytest.approx(expected, rel=2e-3)
    assert not seen


def test_a_baseline_has_an_empty_trace(backend):
    backend.install_patch(patch(), strength=0.0)
    assert backend.trace("Hi", SHORT) == []


def test_no_silence_on_transformers(backend):
    backend.install_patch(patch(), enabled=False)
    context = backend._loaded.context
    for arguments, code in (
        ({"patches": {"nobody": 1}}, "BP401"),
        ({"patches": {"p": float("nan")}}, "BP402"),
        ({"patches": {"p": {"site": "prompt"}}}, "BP403"),
        ({"config": GenerationConfig(top_p=2.0)}, "BP404"),
        ({"config": GenerationConfig(extra={"guided": 1})}, "BP404"),
        ({"config": GenerationConfig(extra={"cache_implementation": "quantized"})}, "BP404"),
        ({"config": GenerationConfig(max_new_tokens=context)}, "BP406"),
    ):
        for call in (backend.generate, backend.stream, backend.trace):
            with pytest.raises((RequestError, UnknownPatchError, CapabilityError)) as caught:
                call(PROMPTS[0], **arguments)
            assert caught.value.code == code
    for prompt in ("", [], [-1], [10**6], [True], [{"role": "user"}], [{"content": "x"}]):
        with pytest.raises(RequestError) as caught:
            backend.generate(prompt)
        assert caught.value.code == "BP405"


def test_the_first_answer_token_belongs_to_the_prompt(backend):
    one = GenerationConfig(max_new_tokens=1, logprobs=5)
    for site in ("prompt", "continuation", "all"):
        backend.install_patch(patch(site, site=site), enabled=False)
    base = backend.generate_detailed(["Hi"], one, patches={})[0].logprobs
    assert backend.generate_detailed(["Hi"], one, patches={"continuation": 2})[0].logprobs == base
    assert backend.generate_detailed(["Hi"], one, patches={"prompt": 2})[0].logprobs != base
    both = [
        backend.generate_detailed(["Hi"], one, patches={site: 2})[0].logprobs for site in ("prompt", "all")
    ]
    assert both[0] == both[1]
