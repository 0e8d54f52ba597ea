"""One patch, one meaning: all engines that are installed, on the same weights and the same tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from brainpatch.backends import vllm_backend
from brainpatch.runtime.meaning import ResolvedSet
from brainpatch.verify import parity
from brainpatch.verify.parity_engines import COMPILED, NAMES, contenders
from tests.engines import fast_blas

fast_blas.load()

pytestmark = pytest.mark.model

HERE = ["transformers", "llamacpp", "mlx"]


def compared(model_folder, gguf_f32, names, **arguments):
    chosen, left_out = contenders(str(model_folder), str(gguf_f32), names)
    assert not left_out
    report = parity.compare(chosen, reference="transformers", **arguments)
    assert not report.skipped
    return report


def check(report, engines):
    """Every case on every engine agrees, and every patch acts."""
    assert len(report.rows) == (len(engines) - 1) * len(parity.cases(_Shape))
    for row in report.rows:
        print(
            f"{row.engine:14} {row.case:24} {row.cosine:.9f} {row.difference:.1e} {row.earliest} {row.effect}"
        )
    assert report.agrees
    for row in report.rows:
        if row.effect is not None:
            assert row.effect > 0.9999, row


class _Shape:
    model_id, architecture, hidden_size, num_layers = "parity", "", 576, 30


def test_the_engines_in_this_process_agree(model_folder, gguf_f32):
    report = compared(model_folder, gguf_f32, HERE, prompts=parity.PROMPTS[:2], steps=5)
    assert report.followed == "transformers"
    check(report, HERE)
    assert json.loads(json.dumps(report.to_dict()))["agrees"] is True


def _wrong_blocks(backend):
    blocks = backend._loaded.blocks
    backend._loaded = backend._loaded._replace(blocks=[*blocks[1:], blocks[0]])


def _wrong_llamacpp(backend):
    edits = backend._ready()[0]._edits
    right = edits._layer
    edits._layer = lambda address: None if right(address) is None else right(address) - 1


WRONG = {"transformers": _wrong_blocks, "llamacpp": _wrong_llamacpp, "mlx": _wrong_blocks}


@pytest.mark.parametrize("name", WRONG)
def test_an_engine_that_is_wrong_by_one_block_is_caught(model_folder, gguf_f32, monkeypatch, name):
    chosen, _ = contenders(str(model_folder), str(gguf_f32), HERE)
    load = chosen[name].load

    def spoiled():
        backend = load()
        WRONG[name](backend)
        return backend

    chosen[name] = chosen[name]._replace(load=spoiled)
    right = "llamacpp" if name == "transformers" else "transformers"
    cases = parity.cases(_Shape)
    monkeypatch.setattr(
        parity, "cases", lambda _: [case for case in cases if case.name in ("plain", "middle block")]
    )
    report = parity.compare(
        {one: chosen[one] for one in (name, right)}, reference=right, prompts=parity.PROMPTS[:1], steps=3
    )
    plain, middle = report.rows
    assert plain.cosine >= parity.AGREES
    print(f"{name}, one block off: cosine {middle.cosine:.5f}")
    assert middle.cosine < parity.AGREES
    assert not report.agrees


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(5000)
def test_all_engines_agree_on_twelve_prompts(model_folder, gguf_f32):
    report = compared(model_folder, gguf_f32, NAMES)
    assert (report.prompts, report.steps) == (12, 20)
    check(report, NAMES)


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_that_is_wrong_by_one_block_is_caught(model_folder, gguf_f32, monkeypatch):
    right = vllm_backend.carry

    def off(patches, **arguments):
        moved = ResolvedSet(
            replace(
                one,
                interventions=tuple(item._replace(layer=item.layer + 1) for item in one.interventions),
            )
            for one in patches.patches
        )
        return right(moved, **arguments)

    cases = parity.cases(_Shape)
    monkeypatch.setattr(
        parity, "cases", lambda _: [case for case in cases if case.name in ("plain", "middle block")]
    )
    monkeypatch.setattr(vllm_backend, "carry", off)
    chosen, _ = contenders(str(model_folder), str(gguf_f32), ["transformers", "vllm"])
    report = parity.compare(chosen, reference="transformers", prompts=parity.PROMPTS[:1], steps=3)
    plain, middle = report.rows
    assert plain.cosine >= parity.AGREES > middle.cosine


def test_the_compiled_engine_is_asked_for_by_name():
    assert COMPILED in NAMES
    chosen, _ = contenders("model", "file.gguf")
    assert COMPILED not in chosen
