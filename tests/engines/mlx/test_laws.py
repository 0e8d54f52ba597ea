"""The laws, on MLX with a real model in float32, and what else this engine has to keep."""

from __future__ import annotations

import threading

import numpy as np
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from brainpatch.backends import mlx_edits
from brainpatch.backends.mlx_edits import Edits, Row
from brainpatch.backends.sampling import log_softmax
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.meaning import ActivePatch, ResolvedSet, resolve
from tests.engines.laws import SHORT, Laws
from tests.engines.material import HIDDEN, LAYERS, PROMPTS, patch, wish_for
from tests.engines.mlx.conftest import library_answer, opened, scored, watched, weights_digest, within

pytestmark = pytest.mark.model

IDS = [[504, 2633, 314]]


class TestMLX(Laws):
    @pytest.fixture
    def backend(self, real):
        return real

    def plain(self, backend, ids, count):
        return library_answer(backend, ids, count)

    def digest(self, backend):
        return weights_digest(backend)


def test_weights_and_blocks_stay_what_they_are_on_the_real_model(real):
    def seen():
        model = real.model
        names = [name for name, _ in model.named_modules()]
        return names, [(type(block), list(block), list(vars(block))) for block in model.layers]

    before = weights_digest(real), seen()
    real.install_patch(patch(layers=(0, 15, 29)), strength=8.0)
    text = "".join(real.stream(IDS[0], GenerationConfig(max_new_tokens=2)))
    assert text == real.generate(IDS[0], GenerationConfig(max_new_tokens=2))
    assert (weights_digest(real), seen()) == before


@pytest.fixture(scope="module")
def quantised(model_folder, tmp_path_factory):
    """The real model with weights of 4 bits, as mlx-lm makes them."""
    import mlx_lm

    folder = tmp_path_factory.mktemp("quantised") / "four"
    mlx_lm.convert(str(model_folder), str(folder), quantize=True, q_bits=4, q_group_size=64)
    backend = opened(folder)
    yield backend
    backend.unload()


def test_the_laws_hold_with_quantised_weights(quantised):
    before = weights_digest(quantised)
    quantised.install_patch(patch(), enabled=False)
    tokens, logits = library_answer(quantised, IDS[0], 2)
    (zero,) = scored(quantised, IDS[:1], [{"p": 0}], 2)
    assert zero.token_ids == tokens
    assert zero.logprobs.tobytes() == np.stack([log_softmax(row) for row in logits]).tobytes()
    rows = quantised.trace(IDS[0], GenerationConfig(max_new_tokens=2, ignore_eos=True), patches={"p": 1})
    assert [(row.layer, row.position) for row in rows] == [(15, position) for position in range(4)]
    for row in rows:
        assert row.norm == pytest.approx(row.expected, rel=1e-3)
    assert weights_digest(quantised) == before


# --- what only this engine has --------------------------------------------------------------


def test_without_edits_no_block_changes_its_class(backend, monkeypatch):
    classes = []
    made = mlx_edits._watched
    monkeypatch.setattr(mlx_edits, "_watched", lambda own: (classes.append(own), made(own))[1])
    backend.install_patch(patch(), strength=0.0)
    backend.generate("Hi", SHORT)
    assert classes == []
    seen = set()
    step = mlx_edits.Edits._pieces

    def look(edits, layer):
        seen.add((layer, tuple(watched(backend.model))))
        return step(edits, layer)

    monkeypatch.setattr(mlx_edits.Edits, "_pieces", look)
    backend.generate("Hi", SHORT, patches={"p": 1})
    assert len(classes) == 1
    assert seen == {(15, (15,))}  # the edited block alone


@pytest.mark.parametrize("chunk", [2, 7])
def test_how_a_prompt_is_cut_changes_nothing(backend, monkeypatch, chunk):
    wish, _ = wish_for(backend, "several")
    prompts = [backend._encode(prompt, use_chat_template=False, system=None) for prompt in PROMPTS]
    wishes = [wish, {}, wish, {"q": 1}]
    whole = scored(backend, prompts, wishes, 4)
    traced = backend.trace(PROMPTS[0], SHORT, patches=wish)
    monkeypatch.setattr(backend, "prefill_chunk", chunk)
    for one, other in zip(scored(backend, prompts, wishes, 4), whole, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)
    rows = backend.trace(PROMPTS[0], SHORT, patches=wish)
    assert [(row.layer, row.position, row.expected) for row in rows] == [
        (row.layer, row.position, row.expected) for row in traced
    ]


def test_bfloat16_stays_bfloat16_after_every_block(narrow_folder, monkeypatch):
    import mlx.core as mx

    backend = opened(narrow_folder, dtype="bfloat16")
    seen = []
    edited = Edits._edited

    def watch(edits, layer, given, stream):
        result = edited(edits, layer, given, stream)
        seen.append((layer, stream.dtype, result.dtype))
        return result

    monkeypatch.setattr(Edits, "_edited", watch)
    backend.install_patch(patch(layers=tuple(range(LAYERS))), enabled=False)
    rows = backend.trace("Hi", GenerationConfig(max_new_tokens=3, ignore_eos=True), patches={"p": 1})
    assert {layer for layer, *_ in seen} == set(range(LAYERS))
    assert {(before, after) for _, before, after in seen} == {(mx.bfloat16, mx.bfloat16)}
    assert {row.applied_dtype for row in rows} == {"bfloat16"}
    for row in rows:
        assert row.norm == pytest.approx(row.expected, rel=0.05)
    backend.unload()


def test_columns_that_are_not_edited_keep_their_bits():
    """Among them -0.0, to which even 0.0 cannot be added."""
    import mlx.core as mx

    class Block:
        pass

    patches = _resolved(patch(layers=(0,), site="continuation"))
    edits = Edits([Block()], [Row(ResolvedSet(), 2), Row(patches, 2)])
    numbers = np.zeros((2, 3, HIDDEN), dtype=np.float32)
    numbers[:] = -0.0
    numbers[:, :, 1], numbers[:, :, 2], numbers[:, :, 3] = np.nan, np.inf, 1e-40
    edits.spans = [(0, 3), (0, 2)]
    stream = mx.array(numbers)
    assert edits._edited(0, (), stream) is stream  # nothing to add: the very object
    edits.spans = [(1, 3), (1, 3)]
    out = np.array(edits._edited(0, (), stream))
    assert out[0].tobytes() == numbers[0].tobytes()
    assert out[1, 0].tobytes() == numbers[1, 0].tobytes()
    assert (out[1, 1:, 4:] != numbers[1, 1:, 4:]).all()


def _resolved(item):
    return resolve({item.name: 1.0}, {item.name: ActivePatch(item)})


def test_a_block_that_returns_more_than_the_stream_keeps_the_rest():
    class Block:
        def __call__(self, stream):
            return stream, "more"

    block = Block()
    with mlx_edits.hooked([block], {0: lambda given, stream: stream + 1}):
        assert type(block).__name__ == "Block"
        assert block(1) == (2, "more")
    assert type(block) is Block
    assert block(1) == (1, "more")


def test_what_other_threads_compute_is_not_edited():
    class Block:
        def __call__(self, stream):
            return stream

    block, got = Block(), []
    with mlx_edits.hooked([block], {0: lambda given, stream: stream + 1}):
        other = threading.Thread(target=lambda: got.append(block(1)))
        other.start()
        other.join()
        assert (block(1), got) == (2, [1])


def test_two_backends_may_hold_one_model(backend):
    """Which blocks have the other class is counted, so that the first to end leaves the other's edits."""
    model, blocks = backend.model, backend.blocks
    with mlx_edits.hooked(blocks, {3: lambda given, stream: stream}):
        assert watched(model) == [3]
        backend.install_patch(patch(layers=(3,)), strength=1.0)
        patched = backend.generate("Hi", SHORT)  # in another thread: its own hook acts there
        assert watched(model) == [3]
    assert watched(model) == []
    assert backend.generate("Hi", SHORT) == patched != backend.generate("Hi", SHORT, patches={})


def test_the_engine_has_one_thread(backend):
    names = {within(backend, lambda: threading.current_thread().name) for _ in range(3)}
    assert len(names) == 1
    assert "brainpatch-mlx" in names.pop()
