"""What MLX loads, what it refuses, and by which code."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, mamba
from mlx_lm.models.llama import TransformerBlock
from mlx_lm.tokenizer_utils import TokenizerWrapper

from brainpatch.backends import mlx_loading
from brainpatch.backends.mlx_backend import MLXBackend
from brainpatch.errors import BackendNotAvailable, EngineError, EngineStateError
from brainpatch.runtime.config import GenerationConfig
from tests.backends.tiny_models import IdTokenizer
from tests.engines.mlx.conftest import opened, scored, watched, within
from tests.factories import make_patch


def tiny(**changes):
    """A random Llama of three blocks, in eval mode; what it holds is still to be computed."""
    mx.random.seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64, "num_attention_heads": 4}
    model = llama.Model(
        llama.ModelArgs(model_type="llama", vocab_size=64, rms_norm_eps=1e-5, **{**shape, **changes})
    )
    return model.eval()


def load(model, **arguments):
    backend = MLXBackend()
    backend.load_model(model, **{"tokenizer": IdTokenizer(), **arguments})
    return backend


def refused(model, code, said, **arguments):
    with pytest.raises((EngineError, BackendNotAvailable), match=said) as caught:
        load(model, **arguments)
    assert caught.value.code == code


def test_nothing_loaded_is_said_by_code():
    backend = MLXBackend()
    for call in (backend.describe_model, lambda: backend.generate("x"), lambda: backend.blocks):
        with pytest.raises(EngineStateError) as caught:
            call()
        assert caught.value.code == "BP407"
    backend.unload()
    backend.unload()


@pytest.mark.parametrize("scaled", [None, {"rope_type": "llama3", "factor": 8.0}])
def test_a_loaded_model_is_taken_as_it_is(scaled):
    """Made in this thread and not computed yet, its rotary frequencies included; computed with in the engine's."""
    model = tiny(rope_scaling=scaled)
    before = [name for name, _ in model.named_modules()]
    backend = load(model)
    assert backend.model is model
    assert [name for name, _ in model.named_modules()] == before
    assert watched(model) == []
    described = backend.describe_model()
    assert (described.hidden_size, described.num_layers, described.architecture) == (32, 3, "Model")
    answer = backend.generate_detailed([[5, 6, 7]], GenerationConfig(max_new_tokens=3, ignore_eos=True))[0]
    assert len(answer.token_ids) == 3
    backend.unload()
    mx.eval(model(mx.array([[5, 6, 7]])))  # it is still its owner's


def test_a_new_model_takes_the_place_of_the_old_one_with_its_patches():
    backend = load(tiny())
    backend.install_patch(make_patch([{"layer": 0}], hidden=32, layers=3), mode="unsafe")
    thread = backend._ready()[1]
    backend.load_model(tiny(num_hidden_layers=2), tokenizer=IdTokenizer())
    assert backend.list_patches() == []
    assert backend.describe_model().num_layers == 2
    with pytest.raises(RuntimeError):
        thread.call(lambda _: None)  # the old one's thread has ended
    backend.unload()


def test_what_a_loaded_model_cannot_have_is_refused():
    refused(tiny().train(), "BP507", "training mode")
    refused(tiny(), "BP507", "adapter_path", adapter_path="x")
    refused(tiny(), "BP507", "dtype", dtype="bfloat16")
    refused(tiny(), "BP507", "tokenizer", tokenizer=None)
    refused(object(), "BP507", "not object")


def test_a_device_or_dtype_that_is_not_there_is_refused(narrow_folder):
    refused(tiny(), "BP507", "cuda", device="cuda")
    refused(str(narrow_folder), "BP507", "int8", dtype="int8")
    if not mx.is_available(mx.gpu):
        refused(tiny(), "BP507", "no GPU", device="gpu")
    backend = load(tiny(), device="cpu")
    assert backend.generate([5, 6], GenerationConfig(max_new_tokens=1, ignore_eos=True))
    backend.unload()


def test_a_missing_or_damaged_model_is_an_error_with_a_reason(tmp_path):
    for folder, content in (
        ("nowhere", None),
        ("broken", "{"),
        ("unknown", '{"model_type": "no-such-family"}'),
        ("needs-more", '{"model_type": "olmo"}'),  # mlx-lm ends the program here when a package is missing
        ("code", '{"model_type": "llama", "model_file": "own.py"}'),
    ):
        path = tmp_path / folder
        if content is not None:
            path.mkdir()
            (path / "config.json").write_text(content)
            (path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
        with pytest.raises(EngineError) as caught:
            MLXBackend().load_model(str(path))
        assert caught.value.code == "BP507"
        assert "Traceback" not in str(caught.value)
    assert "trust_remote_code" in str(caught.value)


def test_families_that_cannot_be_patched_are_refused_before_weights_are_read(tmp_path):
    for config in ({"model_type": "t5", "is_encoder_decoder": True}, {"model_type": "gemma3n"}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        refused(str(tmp_path), "BP504", config["model_type"])


def test_blocks_that_are_not_all_of_them_are_refused():
    model = tiny()
    model.args.num_hidden_layers = 4
    refused(model, "BP503", "4 blocks are configured, and the model has 3 layers")


class _Wide(TransformerBlock):
    def __call__(self, *arguments, **keywords):
        return super().__call__(*arguments, **keywords)[None]


class _Changed(llama.LlamaModel):
    """Another number between the blocks than what a block returned, or none of what they say after them."""

    how = ""

    def __call__(self, inputs, cache=None, input_embeddings=None):
        h = self.embed_tokens(inputs)
        for layer, one in zip(self.layers, cache, strict=True):
            if self.how == "doubled" and one is cache[1]:
                h = h + h
            h = layer(h, None, cache=one)
            if self.how == "again" and one is cache[2]:
                self.layers[0](h, None)
        return mx.ones_like(h) if self.how == "deaf" else self.norm(h)


def changed(how):
    model = tiny()
    model.model.__class__ = _Changed
    model.model.how = how
    return model


def test_what_an_edit_would_not_reach_is_found_out():
    wide = tiny()
    wide.layers[2].__class__ = _Wide
    refused(wide, "BP504", r"block 2 returns \[1, 1, 3, 32\]")
    refused(changed("doubled"), "BP504", "what block 0 returns is not what block 1 gets")
    refused(changed("again"), "BP504", "block 0 ran 2 times")
    refused(changed("deaf"), "BP506", "changes no logit")
    load(changed("")).unload()  # the model that these are made of is none to be refused
    broken = tiny()
    broken.layers[1].mlp = None
    refused(broken, "BP507", "three tokens give")


def test_rows_are_padded_only_where_that_was_seen_to_change_nothing(monkeypatch):
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "conv_kernel": 4,
        "time_step_rank": 4,
    }
    flags = {"use_bias": False, "use_conv_bias": True, "num_hidden_layers": 2, "vocab_size": 64}
    recurrent = mamba.Model(mamba.ModelArgs(model_type="mamba", **shape, **flags)).eval()
    for model, expected in ((tiny(), True), (recurrent, False), (changed(""), False)):
        backend = load(model)  # the last one has no mask, so that its rows would see the padding
        assert backend._loaded.can_be_padded is expected
        answers = backend.generate_batch([[5, 6, 7], [9]], GenerationConfig(max_new_tokens=3))
        alone = [backend.generate(ids, GenerationConfig(max_new_tokens=3)) for ids in ([5, 6, 7], [9])]
        assert answers == alone
        backend.unload()


@pytest.mark.parametrize("windows", [["sliding_attention", "full_attention", "sliding_attention"]])
def test_windows_keep_a_batch_right(windows):
    """Prompts longer than the window, cut into chunks of every kind, and answers that turn the cache around."""
    backend = load(tiny(layer_types=windows, sliding_window=4))
    backend.install_patch(
        make_patch([{"layer": layer} for layer in range(3)], hidden=32, layers=3),
        mode="unsafe",
        enabled=False,
    )
    assert backend._loaded.can_be_padded
    prompts = [[5, 6], [9], list(range(10, 24)), list(range(30, 36))]
    wishes = [{"p": 1}, {"p": {"schedule": {"0": 1, "2": -1}}}, {"p": -1}, {}]
    alone = [scored(backend, [ids], [wish], 6)[0] for ids, wish in zip(prompts, wishes, strict=True)]
    for chunk in (2, 3, 4, 5, 2048):
        backend.prefill_chunk = chunk
        for one, other in zip(alone, scored(backend, prompts, wishes, 6), strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    backend.unload()


# --- rotary positions -----------------------------------------------------------------------


@pytest.mark.model
def test_positions_rotate_by_the_base_that_transformers_5_writes(
    narrow_folder, narrow_hf, loaded, monkeypatch
):
    import torch

    written = json.loads((narrow_folder / "config.json").read_text())
    assert written["rope_parameters"]["rope_theta"] == 100000.0
    assert "rope_theta" not in written
    ids = [5, 6, 7, 8, 9, 10]
    (ours,) = scored(loaded, [ids], [{}], 1)
    with torch.no_grad():
        theirs = torch.log_softmax(narrow_hf(torch.tensor([ids])).logits[0, -1], dim=-1).numpy()
    np.testing.assert_allclose(ours.logprobs[0], theirs, atol=1e-3)
    monkeypatch.setattr(mlx_loading, "rope_settings", lambda config: {})
    refused(str(narrow_folder), "BP507", "mlx-lm gave model.layers.*10000")


@pytest.mark.model
def test_the_real_model_without_the_key_at_the_top_is_the_same_model(model_folder, tmp_path, real):
    for file in model_folder.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((model_folder / "config.json").read_text())
    assert config.pop("rope_theta") == 100000.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    backend = opened(tmp_path)
    ids = [504, 2633, 314]
    (ours,), (theirs,) = scored(backend, [ids], [{}], 1), scored(real, [ids], [{}], 1)
    assert ours.logprobs.tobytes() == theirs.logprobs.tobytes()
    backend.unload()


ROPE = {"rope_theta": 5.0, "rope_type": "default"}


def test_settings_of_rotary_positions_go_where_mlx_lm_looks():
    settings = mlx_loading.rope_settings
    assert settings({}) == {}
    assert settings({"rope_parameters": None}) == {}
    assert settings({"rope_parameters": ROPE}) == {"rope_theta": 5.0}
    assert settings({"rope_parameters": ROPE, "rope_theta": 5.0}) == {}
    scaled = {**ROPE, "rope_type": "llama3", "partial_rotary_factor": 0.5}
    assert settings({"rope_parameters": scaled, "rope_scaling": None}) == {
        "rope_theta": 5.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": scaled,
    }
    assert settings({"rope_parameters": {"full_attention": ROPE}}) == {}
    assert settings({"text_config": {"a": 1, "rope_parameters": ROPE}}) == {
        "text_config": {"a": 1, "rope_parameters": ROPE, "rope_theta": 5.0}
    }


def test_bases_of_several_kinds_of_blocks_must_be_the_config_s():
    kinds = {"full_attention": {**ROPE, "rope_theta": 10000.0}, "sliding_attention": ROPE}
    mlx_loading._check_rope(tiny(), {"rope_parameters": kinds})
    with pytest.raises(EngineError, match=r"\[5\.0\]"):
        mlx_loading._check_rope(tiny(), {"rope_parameters": {"sliding_attention": ROPE}})
    mlx_loading._check_rope(nn.Linear(2, 2), {"rope_parameters": ROPE})


# --- what is installed ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "fits"),
    [("0.31.9", False), ("0.32.0", True), ("0.32.7", True), ("0.33.0", False), ("1.0", False)],
)
def test_a_version_that_was_never_tried_is_refused_by_name(monkeypatch, found, fits):
    monkeypatch.setattr(mlx_loading, "version", lambda _: found)
    available, detail = MLXBackend.is_available()
    assert available is fits
    assert found in detail
    if not fits:
        assert "pip install 'mlx-lm>=0.32,<0.33'" in detail
        refused(tiny(), "BP501", found)


def test_a_package_that_is_missing_is_named_with_its_cure(monkeypatch):
    for missing in ("mlx", "mlx_lm"):
        monkeypatch.setattr(
            mlx_loading.importlib.util, "find_spec", lambda name, gone=missing: name != gone or None
        )
        available, detail = MLXBackend.is_available()
        assert not available
        assert detail.startswith(f"{missing} is not installed: pip install 'brainpatch[mlx]'")
    monkeypatch.setattr(mlx_loading.platform, "system", lambda: "Linux")
    assert "mlx[cpu]" in MLXBackend.is_available()[1]


def test_end_tokens_are_those_of_the_config_and_of_the_tokenizer():
    assert mlx_loading._end_ids({"eos_token_id": [7, 8]}, IdTokenizer()) == {2, 7, 8}
    assert mlx_loading._end_ids({"eos_token_id": 7}, IdTokenizer()) == {2, 7}
    assert mlx_loading._end_ids({}, IdTokenizer()) == {2}


@pytest.mark.model
def test_the_tokenizer_is_hugging_face_s_own(loaded, narrow_folder):
    assert not isinstance(loaded.tokenizer, TokenizerWrapper)
    assert loaded._loaded.end_ids == {2}
    assert loaded._context_length() == 4096
    assert within(loaded, lambda: loaded.model.layers[0].mlp.up_proj.weight.dtype) == mx.float32
