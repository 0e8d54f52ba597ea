"""What is loaded, what is refused, and by which code."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import transformers

from brainpatch.backends.transformers_backend import TransformersBackend
from brainpatch.errors import EngineError, EngineStateError
from brainpatch.patch.manifest import BaseModelSpec
from brainpatch.runtime.config import GenerationConfig
from tests.backends.tiny_models import IdTokenizer
from tests.engines.material import patch
from tests.engines.transformers.conftest import hooks
from tests.factories import make_patch


def tiny(**changes):
    """A random Llama of two blocks."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            **changes,
        }
    )
    return transformers.LlamaForCausalLM(config).eval()


def load(model, **arguments):
    backend = TransformersBackend()
    backend.load_model(model, tokenizer=IdTokenizer(), **arguments)
    return backend


def refused(model, code, said, **arguments):
    with pytest.raises(EngineError, match=said) as caught:
        load(model, **arguments)
    assert caught.value.code == code


def test_nothing_loaded_is_said_by_code():
    backend = TransformersBackend()
    for call in (backend.describe_model, lambda: backend.generate("x"), lambda: backend.blocks):
        with pytest.raises(EngineStateError) as caught:
            call()
        assert caught.value.code == "BP407"
    backend.unload()
    backend.unload()


def test_a_loaded_model_is_taken_as_it_is():
    model = tiny()
    before = dict(vars(model))
    backend = load(model)
    assert backend.model is model
    assert dict(vars(model)) == before
    assert hooks(model) == 0
    assert backend.describe_model().hidden_size == 32
    assert backend.describe_model().num_layers == 2
    answer = backend.generate_detailed([[5, 6, 7]], GenerationConfig(max_new_tokens=3, ignore_eos=True))[0]
    assert len(answer.token_ids) == 3


def test_a_model_in_training_mode_is_refused():
    model = tiny(attention_dropout=0.5)
    model.train()
    refused(model, "BP507", "training mode")
    assert model.training


def test_arguments_beside_a_loaded_model_are_refused():
    refused(tiny(), "BP507", "device_map", device_map="cpu")


def test_a_compiled_model_is_refused():
    model = tiny()
    refused(torch.compile(model), "BP505", "torch.compile")
    model.model.layers[1].compile()
    refused(model, "BP505", r"model\.layers\.1")


def test_a_model_compiled_after_loading_is_refused_when_patched():
    model = tiny()
    backend = load(model)
    model.compile()
    small = GenerationConfig(max_new_tokens=1)
    backend.install_patch(make_patch([{"layer": 0}], hidden=32, layers=2), mode="unsafe", enabled=False)
    with pytest.raises(EngineError) as caught:
        backend.generate([3, 4], small, patches={"p": 1})
    assert caught.value.code == "BP505"


def test_an_encoder_decoder_is_refused_before_weights_are_read(tmp_path):
    config = transformers.T5Config(vocab_size=64, d_model=32, num_layers=2, num_heads=4, d_ff=32, d_kv=8)
    config.save_pretrained(tmp_path)  # no weights: they must not be asked for
    with pytest.raises(EngineError, match="encoder and a decoder") as caught:
        TransformersBackend().load_model(str(tmp_path))
    assert caught.value.code == "BP504"


def test_a_missing_or_damaged_model_is_an_error_with_a_reason(tmp_path):
    for folder, content in (
        ("nowhere", None),
        ("broken", "{"),
        ("unknown", '{"model_type": "no-such-family"}'),
    ):
        path = tmp_path / folder
        if content is not None:
            path.mkdir()
            (path / "config.json").write_text(content)
        with pytest.raises(EngineError) as caught:
            TransformersBackend().load_model(str(path))
        assert caught.value.code == "BP507"
        assert "Traceback" not in str(caught.value)


def test_blocks_at_an_unknown_place_are_refused_naming_what_was_found():
    class Odd(torch.nn.Module):
        """A model of one block where two are configured, at a place that nobody knows."""

        def __init__(self, inner):
            super().__init__()
            self.strange = torch.nn.ModuleList(inner.model.layers[:1])
            self.config = inner.config

    odd = Odd(tiny()).eval()
    odd.config.model_type = "new-family"
    odd.config._name_or_path = "odd"
    refused(odd, "BP503", "strange")


def test_a_block_that_ignores_its_edit_is_found_out():
    model = tiny()
    forward = model.model.forward

    def deaf(*arguments, **keywords):
        out = forward(*arguments, **keywords)
        out.last_hidden_state = torch.ones_like(out.last_hidden_state)
        return out

    model.model.forward = deaf
    refused(model, "BP506", "changes no logit")


def test_a_block_whose_first_element_is_not_the_stream_is_refused():
    """A pair (stale, stream), of which the next block reads the second."""
    model = tiny()
    for block in model.model.layers:
        block.register_forward_hook(lambda module, args, out: (args[0], out))
    reads = [*model.model.layers[1:], model.model.norm]
    for module in reads:
        module.register_forward_pre_hook(lambda module, args: (args[0][1], *args[1:]))
    refused(model, "BP504", "what block 0 returns is not what block 1 gets")


def test_a_block_whose_edit_is_lost_on_the_way_is_refused():
    model = tiny()
    kept = []
    first, second = model.model.layers
    first.register_forward_hook(lambda module, args, out: kept.append(out))
    second.register_forward_pre_hook(lambda module, args: (kept.pop(), *args[1:]))
    refused(model, "BP506", "does not reach block 1")


def test_two_engines_on_one_model_add_once():
    model = tiny()
    engines = [load(model, model_id="test/model") for _ in range(3)]
    two_vectors = [{"layer": 1, "vector": "a"}, {"layer": 1, "vector": "b", "coefficient": -2.0}]
    item = make_patch(two_vectors, hidden=32, base_model=BaseModelSpec("test/model", "", 32, 2))
    for engine in engines:
        engine.install_patch(item)
        engine.remove_patch("p")
        engine.install_patch(item, strength=0.5)
    expected = 0.5 * np.linalg.norm(item.vector_for("a").float32() - 2 * item.vector_for("b").float32())
    rows = engines[1].trace([5, 6, 7], GenerationConfig(max_new_tokens=3, ignore_eos=True))
    assert [(row.layer, row.position) for row in rows] == [(1, position) for position in range(5)]
    assert all(row.norm == pytest.approx(expected, rel=1e-4) for row in rows)
    assert hooks(model) == 0


def test_a_block_with_several_streams_is_refused():
    model = tiny()
    handle = model.model.layers[1].register_forward_hook(lambda module, args, out: out[None])
    rest = model.model.norm.register_forward_pre_hook(lambda module, args: (args[0][0],))
    refused(model, "BP504", "not one stream")
    handle.remove()
    rest.remove()


@pytest.mark.model
def test_a_hub_snapshot_knows_its_name_and_revision(model_folder, tmp_path):
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--HuggingFaceTB--SmolLM2-135M-Instruct" / "snapshots" / revision
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(model_folder)
    backend = TransformersBackend()
    backend.load_model(str(snapshot), dtype="float32")
    about = backend.describe_model()
    assert (about.model_id, about.revision) == ("HuggingFaceTB/SmolLM2-135M-Instruct", revision)
    assert about.architecture == "LlamaForCausalLM"
    backend.unload()


@pytest.mark.model
def test_a_device_map_is_passed_on_and_patches_act(backend, model_folder):
    mapped = TransformersBackend()
    mapped.load_model(str(model_folder), dtype="float32", device_map="cpu", model_id="test/model")
    short = GenerationConfig(max_new_tokens=6)
    for engine in (backend, mapped):
        engine.install_patch(patch(), mode="unsafe", enabled=False)
    for wish in ({}, {"p": 1}):
        assert mapped.generate("Hi", short, patches=wish) == backend.generate("Hi", short, patches=wish)
    mapped.unload()


@pytest.mark.model
def test_bfloat16_keeps_its_dtype_and_measures_what_it_can(model_folder):
    backend = TransformersBackend()
    backend.load_model(str(model_folder), dtype="bfloat16", model_id="test/model")
    backend.install_patch(patch(norm=40.0), mode="unsafe")
    rows = backend.trace("Hi", GenerationConfig(max_new_tokens=2))
    assert {row.applied_dtype for row in rows} == {"bfloat16"}
    assert all(row.norm == pytest.approx(row.expected, rel=0.1) for row in rows if row.position > 0)
    backend.unload()


@pytest.mark.model
def test_quantised_weights_stay_quantised_and_patches_act(model_folder):
    from torchao.quantization import Int8WeightOnlyConfig

    quantised = TransformersBackend()
    quantised.load_model(
        str(model_folder),
        dtype="float32",
        model_id="test/model",
        quantization_config=transformers.TorchAoConfig(Int8WeightOnlyConfig()),
    )
    weight = quantised.model.model.layers[0].mlp.up_proj.weight
    assert type(weight).__name__ == "Int8Tensor"
    short = GenerationConfig(max_new_tokens=8)
    quantised.install_patch(patch(), mode="unsafe", enabled=False)
    prompt = "How was your day?"
    plain = quantised.generate(prompt, short, patches={})
    assert quantised.generate(prompt, short, patches={"p": 0}) == plain
    assert quantised.generate(prompt, short, patches={"p": 2}) != plain
    rows = quantised.trace(prompt, short, patches={"p": 1})
    assert all(row.norm == pytest.approx(row.expected, rel=2e-3) for row in rows)
    assert type(quantised.model.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    quantised.unload()


def test_a_folder_made_by_hand_needs_no_name(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama"
    backend = TransformersBackend()
    backend.load_model(str(tmp_path), tokenizer=IdTokenizer())
    assert backend.describe_model().model_id == str(tmp_path)
    shutil.rmtree(tmp_path)
