"""Batches, steps, streams and the two ways of editing on llama.cpp, with a real model."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from brainpatch.backends import llamacpp_library
from brainpatch.backends.llamacpp_backend import LlamaCppBackend
from brainpatch.backends.llamacpp_edits import NodeEdits
from brainpatch.errors import BackendNotAvailable, CapabilityError, EngineError
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.discovery import select_backend
from tests.engines.laws import SHORT, ids_of
from tests.engines.llamacpp.conftest import EXACT
from tests.engines.material import HIDDEN, LAYERS, MODEL_ID, PROMPTS, patch, wish_for
from tests.factories import make_patch

pytestmark = pytest.mark.model

LONG = "Tell me about " + ", ".join(f"thing number {n}" for n in range(60)) + "."


def logprobs(answer):
    return [sorted(row.items()) for row in answer.logprobs]


def close(one, other):
    """Two answers with the same tokens and the same log-probabilities, to rounding."""
    assert one.token_ids == other.token_ids
    for row, against in zip(one.logprobs, other.logprobs, strict=True):
        for token in row.keys() & against.keys():
            assert row[token] == pytest.approx(against[token], abs=1e-3)


def test_sixteen_sequences_with_eight_configurations_equal_each_alone(backend):
    for number in range(7):
        backend.install_patch(
            patch(f"p{number}", layers=(number * 4, 29 - number), seed=number, norm=25.0), enabled=False
        )
    wishes = [{}, *({f"p{number}": 1.0 - 0.5 * (number % 2)} for number in range(7))] * 2
    prompts = [f"{PROMPTS[number % 4]} {number}" for number in range(16)]
    short = GenerationConfig(max_new_tokens=6, logprobs=5)
    together = backend.generate_detailed(prompts, short, patches=wishes)
    for prompt, wish, answer in zip(prompts, wishes, together, strict=True):
        close(backend.generate_detailed([prompt], short, patches=wish)[0], answer)
    assert len({tuple(answer.token_ids) for answer in together}) > 8


def test_how_a_prompt_is_cut_changes_nothing(backend, opened):
    small = opened(n_batch=32, n_parallel=4)
    for one in (backend, small):
        one.install_patch(patch(site="prompt", layers=(0, 15, 29)), enabled=False)
        one.install_patch(patch("q", site="continuation", layers=(15, 29), seed=2), enabled=False)
    prompts, wishes = [LONG, "Hi", PROMPTS[0]], [{"p": 1, "q": 1}, {"q": -1}, {}]
    whole = backend.generate_detailed(prompts, SHORT, patches=wishes)
    assert len(ids_of(backend, LONG)) > 64
    for one, other in zip(whole, small.generate_detailed(prompts, SHORT, patches=wishes), strict=True):
        close(one, other)


def test_requests_that_find_no_room_wait(opened):
    narrow = opened(n_ctx=256, n_parallel=3)
    narrow.install_patch(patch(), enabled=False)
    config = GenerationConfig(max_new_tokens=60, ignore_eos=True)
    wishes = [{"p": number % 2} for number in range(5)]
    answers = narrow.generate_detailed(["Hi"] * 5, config, patches=wishes)
    assert all(len(answer.token_ids) == 60 for answer in answers)
    assert len({tuple(answer.token_ids) for answer in answers}) == 2


def test_the_control_vector_says_the_same_where_it_can(backend, controlled):
    for name in ("constant", "prompt", "interpolated"):
        wishes = []
        for one in (backend, controlled):
            one.patches.clear()
            wishes.append(wish_for(one, name)[0])
        first = backend.generate_detailed(PROMPTS, SHORT, patches=wishes[0])
        second = controlled.generate_detailed(PROMPTS, SHORT, patches=wishes[1])
        for one, other in zip(first, second, strict=True):
            close(one, other)
    assert [
        a.token_ids for a in controlled.generate_detailed(PROMPTS, SHORT, patches=[{}, {"p": 1}] * 2)
    ] == [a.token_ids for a in backend.generate_detailed(PROMPTS, SHORT, patches=[{}, {"p": 1}] * 2)]


def test_the_control_vector_refuses_block_0_and_a_trace(controlled):
    controlled.patches.clear()
    with pytest.raises(CapabilityError, match="block 0") as caught:
        controlled.install_patch(patch(layers=(0,)))
    assert caught.value.code == "BP502"
    assert not controlled.installed()
    with pytest.raises(CapabilityError, match="trace"):
        controlled.trace("Hi")


def test_a_stale_address_is_found_out_and_the_step_done_again(backend, monkeypatch):
    backend.install_patch(patch(layers=(3, 15, 29)), enabled=False)
    right = backend.generate_detailed(PROMPTS, SHORT, patches={"p": 1})
    edits = backend._ready()[0]._edits
    assert edits._known
    for known in edits._known.values():
        for address in list(known):  # blocks 3 and 15 change places with nodes that are no streams
            if known[address] in (3, 15):
                known[address + 368] = known.pop(address)
    redone = []
    end = NodeEdits.end
    monkeypatch.setattr(NodeEdits, "end", lambda self: (redone.append(end(self)), redone[-1])[1])
    again = backend.generate_detailed(PROMPTS, SHORT, patches={"p": 1})
    assert False in redone
    assert [logprobs(a) for a in again] == [logprobs(a) for a in right]


def test_streams_that_are_not_named_are_refused_or_edited_by_control_vector(opened, monkeypatch):
    monkeypatch.setattr("brainpatch.backends.llamacpp_edits._STREAM", b"none-")
    with pytest.raises(EngineError) as caught:
        opened(editing="callback")
    assert caught.value.code == "BP503"
    assert opened().editing == "control-vector"


def test_an_edit_that_does_nothing_is_found_at_load(opened, monkeypatch):
    monkeypatch.setattr("brainpatch.backends.llamacpp_model.GgufModel.set_control_vector", lambda *_: None)
    with pytest.raises(EngineError) as caught:
        opened(editing="control-vector")
    assert caught.value.code == "BP506"


def test_nan_ends_its_request_alone(backend):
    item = {"layer": 15, "vector": "v", "coefficient": 1000.0}
    backend.install_patch(
        make_patch([item], hidden=HIDDEN, layers=LAYERS, vectors={"v": [1e37] * HIDDEN}), enabled=False
    )
    prompts = [PROMPTS[0]] * 3
    usual = backend.generate_detailed(prompts, SHORT, patches={})
    with pytest.raises(EngineError) as caught:
        backend.generate_detailed(prompts, SHORT, patches=[{}, {"p": 8}, {}])
    assert caught.value.code == "BP509"
    assert [a and a.token_ids for a in caught.value.answers] == [usual[0].token_ids, None, usual[2].token_ids]
    assert backend.generate_detailed(prompts, SHORT, patches={})[1].token_ids == usual[1].token_ids


def test_an_error_in_the_callback_is_an_error_of_the_call(backend, monkeypatch):
    backend.install_patch(patch(), enabled=False)
    usual = backend.generate("Hi", SHORT, patches={})

    def broken(*_):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(NodeEdits, "_edit", broken)
    with pytest.raises(EngineError, match="broken on purpose"):
        backend.generate("Hi", SHORT, patches={"p": 1})
    monkeypatch.undo()
    assert backend.generate("Hi", SHORT, patches={}) == usual


def test_rows_have_their_own_parameters_and_draws(backend):
    configs = [
        GenerationConfig(max_new_tokens=8),
        GenerationConfig(max_new_tokens=3),
        GenerationConfig(max_new_tokens=8, temperature=0.8, seed=1, top_p=0.9),
        GenerationConfig(max_new_tokens=8, temperature=1.0, seed=2, top_k=40, min_p=0.01),
        GenerationConfig(
            max_new_tokens=8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5
        ),
        GenerationConfig(max_new_tokens=8, stop=[" I"]),
    ]
    together = backend.generate_detailed([PROMPTS[0]] * len(configs), configs)
    for one, answer in zip(configs, together, strict=True):
        alone = backend.generate_detailed([PROMPTS[0]], one)[0]
        assert (alone.token_ids, alone.text, alone.finish_reason) == (
            answer.token_ids,
            answer.text,
            answer.finish_reason,
        )
    assert len(together[1].token_ids) == 3
    assert together[5].finish_reason == "stop"
    assert " I" not in together[5].text


def test_a_stream_is_the_text_in_pieces_and_closing_it_ends_the_work(backend):
    config = GenerationConfig(max_new_tokens=24)
    question = "Repeat exactly: 🧠🌍 你好 é"
    pieces = list(backend.stream(question, config))
    assert len(pieces) > 5
    assert "".join(pieces) == backend.generate(question, config)
    endless = backend.stream("Hi", GenerationConfig(max_new_tokens=1900, ignore_eos=True))
    next(endless)
    endless.close()
    assert [thread.name for thread in threading.enumerate() if thread.name == "brainpatch-stream"] == []
    assert backend.generate("Hi", SHORT)


def test_the_tokens_are_those_of_transformers(backend, model_folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(model_folder))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Héllo 🧠  <|im_end|> two  spaces\n\nand 1234567"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "你好"},
    ]
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert backend._encode(messages, use_chat_template=True, system=None) == wanted
    text = "Plain text, with <|im_start|> in it 🌍"
    assert backend._encode(text, use_chat_template=False, system=None) == theirs(text)["input_ids"]
    ids = wanted[:40]
    ours = backend._ready()[0].model.tokenizer
    assert ours.decode(ids) == theirs.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert backend.token_texts(ids) == [theirs.decode([token]) for token in ids]


@pytest.mark.parametrize("kind", ["gguf_q8", "gguf_q4"])
def test_quantised_weights_keep_the_laws_and_the_effect(opened, kind, request, backend):
    """Zero is nothing, measured equals expected; and the effect is that of float32, nearly."""
    small = opened(request.getfixturevalue(kind))
    for one in (small, backend):
        one.install_patch(patch(layers=(0, 15, 29), norm=20.0), enabled=False)
    # Not side by side: how llama.cpp rounds a quantised row depends on its place in the batch.
    plain, zero = (small.generate_detailed([PROMPTS[0]], SHORT, patches=wish)[0] for wish in ({}, {"p": 0}))
    assert logprobs(plain) == logprobs(zero)
    rows = small.trace(PROMPTS[0], SHORT, patches={"p": 1})
    assert {row.layer for row in rows} == {0, 15, 29}
    assert all(row.norm == pytest.approx(row.expected, rel=2e-3) for row in rows)
    tokens = backend.generate_detailed([PROMPTS[0]], SHORT, patches={"p": 1})[0].token_ids
    effects = []
    for one in (small, backend):
        requests = one.requests([ids_of(backend, PROMPTS[0])] * 2, SHORT, patches=[{}, {"p": 1}])
        still, moved = one.score(requests, [tokens] * 2)
        effects.append((moved.logprobs - still.logprobs).ravel())
    cosine = float(effects[0] @ effects[1] / np.linalg.norm(effects[0]) / np.linalg.norm(effects[1]))
    print(f"{kind}: cosine of the effect with that of float32 {cosine:.4f}")
    assert cosine >= 0.95


def test_what_is_not_understood_is_refused_by_name(opened, tmp_path, gguf_f32):
    for arguments, text in (
        ({"n_gpu_layer": 3}, "n_gpu_layer"),
        ({"cache_type_k": "f64"}, "cache_type_k"),
        ({"editing": "magic"}, "editing"),
        ({"n_ctx": 0}, "n_ctx"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"device": "cuda"}, "device"),
    ):
        with pytest.raises(EngineError, match=text) as caught:
            LlamaCppBackend().load_model(gguf_f32, **arguments)
        assert caught.value.code == "BP507"
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"GGUF" + bytes(100))
    for path in (junk, tmp_path / "missing.gguf", tmp_path, "owner/repo"):
        with pytest.raises(EngineError) as caught:
            LlamaCppBackend().load_model(path)
        assert caught.value.code == "BP507"


def test_a_build_that_is_not_known_is_refused_with_the_one_to_install(monkeypatch):
    monkeypatch.setattr(llamacpp_library, "version", lambda _: "2099.1.1")
    there, detail = LlamaCppBackend.is_available()
    assert not there
    assert f"pip install xllamacpp=={llamacpp_library.KNOWN[-1]}" in detail
    with pytest.raises(BackendNotAvailable, match=r"2099\.1\.1"):
        select_backend("llama.cpp")


def test_structs_of_another_layout_are_refused():
    with pytest.raises(OSError, match="n_batch is 1"):
        llamacpp_library._compare(type("P", (), {"n_batch": 1})(), {"n_batch": 2048})


def test_nothing_is_left_to_use_after_unload(gguf_q4):
    backend = LlamaCppBackend()
    backend.load_model(gguf_q4, model_id=MODEL_ID, n_ctx=256, **EXACT)
    backend.unload()
    backend.unload()
    with pytest.raises(Exception, match="no model") as caught:
        backend.generate("Hi")
    assert caught.value.code == "BP407"
