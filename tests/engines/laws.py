"""The laws, one suite for every engine that runs in this process: each engine's tests inherit `Laws`.

What an engine gives is compared with the formula of docs/semantics.md, written out position by position in
`by_hand` and applied to the same weights in plain PyTorch: so the suite also holds the engines together.
"""

from __future__ import annotations

import threading

import pytest

from brainpatch.backends.sampling import log_softmax
from brainpatch.errors import CapabilityError, RequestError, UnknownPatchError
from brainpatch.runtime.config import GenerationConfig
from tests.engines import by_hand
from tests.engines.material import CASES, LAYERS, PROMPTS, patch, wish_for

SHORT = GenerationConfig(max_new_tokens=10, logprobs=5)
WISHES = [{"p": 1.2}, {}, {"q": -1}, {"p": {"strength": 1, "schedule": {"0": 1, "3": 0}}}]


def detailed(backend, prompt, wish, config=SHORT):
    """Token ids, and every log-probability that was recorded."""
    answer = backend.generate_detailed([prompt], config, patches=wish)[0]
    return answer.token_ids, answer.logprobs


def ids_of(backend, prompt):
    """The prompt's token ids."""
    return backend._encode(prompt, use_chat_template=True, system=None)


_by_formula = {}
"""What the formula gives, for the engines that come later: they choose the same tokens, and it takes seconds."""


def by_formula(hf, case, ids, tokens, applied):
    """Log-probabilities of each generated token, by hand: float [tokens, vocabulary]."""
    key = (case, tuple(ids), tuple(tokens))
    if key not in _by_formula:
        _by_formula[key] = by_hand.logprobs(hf, ids, tokens, applied).numpy()
    return _by_formula[key]


class Laws:
    """Fixtures: `backend`, the engine without patches; `hf`, the model in plain PyTorch, float32."""

    def plain(self, backend, ids, count):
        """The untouched library's own greedy answer: token ids, and the logits of each, float32."""
        raise NotImplementedError

    def digest(self, backend):
        """A digest of the weights as the engine holds them."""
        raise NotImplementedError

    def test_zero_is_nothing(self, backend):
        for item in (patch(), patch("other", layers=(0, 29), seed=1), patch("flat", norm=0.0)):
            backend.install_patch(item, strength=1.0, enabled=False)
        reference, logits = self.plain(backend, ids_of(backend, PROMPTS[0]), 10)
        raw = [log_softmax(row) for row in logits]
        assert detailed(backend, PROMPTS[0], {"p": 1})[0] != reference  # the patch is one that acts
        scheduled = {"strength": 1, "schedule": {"0": 0}}
        for wish in (None, {}, {"p": 0}, {"p": 0, "other": 0.0}, {"flat": 3}, {"p": scheduled}, {"p": 1e-13}):
            ids, logprobs = detailed(backend, PROMPTS[0], wish)
            assert ids == reference
            for step, row in enumerate(logprobs):
                for token, value in row.items():
                    assert value == float(raw[step][token])  # bit for bit

    def test_zero_is_nothing_beside_a_patched_row(self, backend):
        backend.install_patch(patch(), enabled=False)
        prompts = [PROMPTS[0]] * 3
        alone = backend.generate_detailed(prompts, SHORT, patches={})
        beside = backend.generate_detailed(prompts, SHORT, patches=[{"p": 0}, {"p": 2}, {}])
        assert beside[1].token_ids != alone[1].token_ids
        for i in (0, 2):
            assert beside[i].token_ids == alone[i].token_ids
            assert beside[i].logprobs == alone[i].logprobs  # same batch shape: bit for bit

    def test_weights_never_change(self, backend):
        before = self.digest(backend)
        backend.install_patch(patch(layers=(0, 15, 29)), strength=8.0)
        backend.generate_batch(PROMPTS, SHORT)
        list(backend.stream(PROMPTS[0], SHORT))
        backend.trace(PROMPTS[0], SHORT)
        assert self.digest(backend) == before

    @pytest.mark.parametrize("case", CASES)
    def test_an_edit_is_a_function_of_position(self, backend, hf, case):
        """A batch of four prompts of different lengths: each gets what the formula says, position by position."""
        wish, applied = wish_for(backend, case)
        answers = backend.generate_detailed(PROMPTS, SHORT, patches=wish)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            expected = by_formula(hf, case, ids_of(backend, prompt), answer.token_ids, applied)
            for step, row in enumerate(answer.logprobs):
                for token, value in row.items():
                    assert value == pytest.approx(float(expected[step, token]), abs=2e-3)
        plain = backend.generate_detailed(PROMPTS, SHORT, patches={})
        assert [a.logprobs for a in answers] != [a.logprobs for a in plain]

    def test_requests_are_isolated(self, backend):
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

    def test_threads_are_isolated(self, backend):
        backend.install_patch(patch(), enabled=False)
        expected = {w: backend.generate(PROMPTS[0], SHORT, patches={"p": w} if w else {}) for w in (0, 1, -1)}
        got = {}

        def work(strength):
            got[strength] = [
                backend.generate(PROMPTS[0], SHORT, patches={"p": strength} if strength else {})
                for _ in range(3)
            ]

        threads = [threading.Thread(target=work, args=(w,)) for w in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert got == {w: [text] * 3 for w, text in expected.items()}

    @pytest.mark.parametrize("case", CASES)
    def test_measured_equals_expected(self, backend, case):
        wish, applied = wish_for(backend, case)
        rows = backend.trace(PROMPTS[0], SHORT, patches=wish)
        count = len(ids_of(backend, PROMPTS[0]))
        seen = {(row.layer, row.position): row for row in rows}
        assert len(seen) == len(rows)
        layers = {i.layer for item, _, _ in applied for i in item.manifest.interventions}
        answer = backend.generate_detailed([PROMPTS[0]], SHORT, patches=wish)[0]
        for layer in range(LAYERS):
            for position in range(count + len(answer.token_ids) - 1):
                by_formula = sum(
                    by_hand.delta(item, strength, schedule, layer, position, count)
                    for item, strength, schedule in applied
                )
                expected = float(by_formula.norm())
                row = seen.pop((layer, position), None)
                assert (row is not None) == (layer in layers and expected > 1e-9)
                if row is not None:
                    assert row.expected == pytest.approx(expected, rel=1e-6)
                    assert row.norm == pytest.approx(expected, rel=2e-3)
        assert not seen

    def test_a_baseline_has_an_empty_trace(self, backend):
        backend.install_patch(patch(), strength=0.0)
        assert backend.trace("Hi", SHORT) == []

    def test_no_silence(self, backend):
        backend.install_patch(patch(), enabled=False)
        for arguments, code in (
            ({"patches": {"nobody": 1}}, "BP401"),
            ({"patches": {"p": float("nan")}}, "BP402"),
            ({"patches": {"p": {"site": "prompt"}}}, "BP403"),
            ({"config": GenerationConfig(top_p=2.0)}, "BP404"),
            ({"config": GenerationConfig(extra={"guided": 1})}, "BP404"),
            ({"config": GenerationConfig(max_new_tokens=backend._context_length())}, "BP406"),
        ):
            for call in (backend.generate, backend.stream, backend.trace):
                with pytest.raises((RequestError, UnknownPatchError, CapabilityError)) as caught:
                    call(PROMPTS[0], **arguments)
                assert caught.value.code == code
        for prompt in ("", [], [-1], [10**6], [True], [{"role": "user"}], [{"content": "x"}]):
            with pytest.raises(RequestError) as caught:
                backend.generate(prompt)
            assert caught.value.code == "BP405"

    def test_the_first_answer_token_belongs_to_the_prompt(self, backend):
        one = GenerationConfig(max_new_tokens=1, logprobs=5)
        for site in ("prompt", "continuation", "all"):
            backend.install_patch(patch(site, site=site), enabled=False)
        base = detailed(backend, "Hi", {}, one)
        assert detailed(backend, "Hi", {"continuation": 2}, one) == base
        assert detailed(backend, "Hi", {"prompt": 2}, one) != base
        assert detailed(backend, "Hi", {"prompt": 2}, one) == detailed(backend, "Hi", {"all": 2}, one)
