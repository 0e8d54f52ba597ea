"""How a parity report is made, on engines that are played."""

from __future__ import annotations

import numpy as np
import pytest

from brainpatch.errors import EngineError
from brainpatch.patch.compatibility import ModelDescriptor
from brainpatch.runtime.backend import BrainPatchBackend
from brainpatch.runtime.capabilities import Capabilities
from brainpatch.runtime.requests import Scored
from brainpatch.verify import parity
from brainpatch.verify.parity import Contender, compare
from brainpatch.verify.parity_plot import save

WORDS = 50


class Played(BrainPatchBackend):
    """Gives log-probabilities that depend on the prompt, the step's token and the patches, by a formula."""

    name = "played"

    def __init__(self, wrong_layer=0, noise=0.0, first_choice=None):
        super().__init__()
        self.wrong_layer, self.noise, self.first_choice = wrong_layer, noise, first_choice

    @classmethod
    def is_available(cls):
        return True, "played"

    @classmethod
    def capabilities(cls):
        return Capabilities("played", static_intervention=True, dynamic_schedule=True)

    def load_model(self, model, **_):
        """Nothing to load."""

    def describe_model(self):
        return ModelDescriptor("parity", 8, 4)

    def _encode(self, prompt, **_):
        return [len(prompt), 3]

    def score(self, requests, answers=None):
        scored = []
        for number, request in enumerate(requests):
            tokens, rows = [], []
            for step in range(request.config.max_new_tokens):
                seed = [*request.prompt_ids, *tokens]
                row = np.random.default_rng(seed).standard_normal(WORDS)
                for layer in request.patches.layers:
                    at = np.array([1 + step], dtype=np.int64)
                    coefficients = request.patches.coefficients(layer, at, 2)[0]
                    edit = request.patches.sum(layer, tuple(coefficients.tolist()))
                    row[8 * (layer + self.wrong_layer) :][:8] += edit
                row += self.noise * np.random.default_rng(1).standard_normal(WORDS)
                rows.append(np.float32(row))
                own = int(row.argmax()) if self.first_choice is None else self.first_choice
                tokens.append(own if answers is None else answers[number][step])
            scored.append(Scored(tokens, np.stack(rows)))
        return scored


class Leader(Played):
    """One that follows nobody."""

    follows = False

    def score(self, requests, answers=None):
        assert answers is None
        return super().score(requests)


def contender(kind=Played, **arguments):
    return Contender(kind, lambda: kind(**arguments))


def test_equal_engines_agree_and_follow_the_one_that_cannot():
    report = compare(
        {"a": contender(), "b": contender(), "c": contender(Leader)},
        reference="a",
        prompts=["x", "yy"],
        steps=4,
    )
    assert report.followed == "c"
    assert report.agrees
    assert {row.engine for row in report.rows} == {"b", "c"}
    assert len(report.rows) == 2 * len(parity.cases(ModelDescriptor("m", 8, 4)))
    assert all(row.difference == 0 and row.earliest is None for row in report.rows)
    by_case = {row.case: row.effect for row in report.rows}
    assert by_case["plain"] is None
    assert by_case["site continuation"] is None
    assert by_case["middle block"] == pytest.approx(1.0)


def test_a_wrong_block_is_seen_where_it_acts():
    report = compare({"a": contender(), "b": contender(wrong_layer=1)}, reference="a", prompts=["x"], steps=8)
    assert not report.agrees
    cosines = {row.case: row.cosine for row in report.rows}
    assert cosines["plain"] == pytest.approx(1.0)
    assert cosines["middle block"] < 0.99
    assert cosines["site continuation"] < 0.99
    middle = next(row for row in report.rows if row.case == "middle block")
    assert middle.effect < 0.5
    assert middle.differing == 1


def test_a_common_offset_hides_nothing():
    class Far(Played):
        def score(self, requests, answers=None):
            return [Scored(ids, rows + 1000) for ids, rows in super().score(requests, answers)]

    report = compare(
        {"a": contender(Far), "b": contender(Far, noise=0.1)}, reference="a", prompts=["x"], steps=3
    )
    assert not report.agrees


def test_two_that_cannot_follow_are_compared_while_they_choose_the_same():
    report = compare(
        {"a": contender(Leader), "b": contender(Leader, first_choice=7)},
        reference="a",
        prompts=["x"],
        steps=6,
    )
    assert report.agrees  # the first step has the same tokens before it, and the later ones have not


def test_an_engine_that_fails_is_left_out_with_the_reason():
    def broken():
        raise EngineError("BP507", "no memory")

    report = compare(
        {"a": contender(), "b": contender(), "c": Contender(Played, broken)},
        reference="a",
        prompts=["x"],
        steps=2,
    )
    assert report.skipped == {"c": "BP507 no memory"}
    assert {row.engine for row in report.rows} == {"b"}


def test_without_the_reference_nothing_agrees():
    def broken():
        raise EngineError("BP507", "no memory")

    report = compare(
        {"a": Contender(Played, broken), "b": contender()}, reference="a", prompts=["x"], steps=2
    )
    assert not report.agrees
    assert report.rows == []


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    report = compare({"a": contender(), "b": contender(noise=0.01)}, reference="a", prompts=["x"], steps=2)
    save(report, tmp_path / "p.svg")
    assert b"<svg" in (tmp_path / "p.svg").read_bytes()
