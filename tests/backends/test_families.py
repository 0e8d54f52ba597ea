"""Every family of the table as a tiny random model on Transformers: what the table says is what happens."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import transformers

from brainpatch.backends import families
from brainpatch.backends.sampling import log_softmax
from brainpatch.backends.transformers_backend import TransformersBackend
from brainpatch.errors import EngineError
from brainpatch.patch.manifest import BaseModelSpec
from brainpatch.runtime.config import GenerationConfig
from tests.backends.tiny_models import (
    CONTEXT,
    HIDDEN,
    LAYERS,
    TEXT,
    VARIANTS,
    VOCABULARY,
    WRAPPERS,
    IdTokenizer,
    tiny_model,
)
from tests.engines import by_hand
from tests.factories import make_patch

SHORT = GenerationConfig(max_new_tokens=6, ignore_eos=True, logprobs=20)
PROMPTS = [[5, 6, 7], [9, 41, 13, 22, 8, 30, 11, 5, 50, 4], [33, 12, 40, 17, 29, 6], [8, 15, 33, 4, 21, 60]]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Models this small gain nothing from threads that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[*TEXT, *VARIANTS, *WRAPPERS])
def backend(request):
    """A tiny model of one family, with patches of every kind that none of the defaults applies."""
    model = tiny_model(request.param)
    engine = TransformersBackend()
    engine.load_model(model, tokenizer=IdTokenizer(), model_id="test/tiny")
    for patch in patches(len(engine.blocks)):
        engine.install_patch(patch, enabled=False)
    yield engine
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0


def patches(layers):
    """Patches for a tiny model: one at each block alone, and three that depend on the position."""
    spec = BaseModelSpec("test/tiny", "", HIDDEN, layers)

    def one(name, where, site="all", **fields):
        items = [{"layer": layer, "vector": f"v{layer}", "site": site} for layer in where]
        return make_patch(items, name=name, hidden=HIDDEN, base_model=spec, seed=len(name), **fields)

    return [
        *(one(f"at-{layer}", [layer]) for layer in range(layers)),
        one("everywhere", range(layers), schedule={"0": 1.0, "2": -0.5, "4": 0.0}),
        one("before", range(layers), "prompt"),
        one("after", [0, layers - 1], "continuation"),
    ]


WISHES = [{"everywhere": 1.0}, {}, {"before": -1.0, "after": 1.5}, {"everywhere": -0.5}]


def test_the_blocks_are_where_the_table_says(backend):
    known = families.families_of(backend.model.config)
    assert known, "not in the table"
    path, blocks = families.find_blocks(backend.model, backend.model.config)
    assert path in known[0].paths  # the wrapper's own row, where there is one
    assert len(blocks) == families.block_count(backend.model.config)
    outputs = []
    handles = [block.register_forward_hook(lambda m, a, out: outputs.append(out)) for block in blocks]
    with torch.no_grad():
        backend.model(input_ids=torch.tensor([PROMPTS[0]]))
    for handle in handles:
        handle.remove()
    assert {"tuple" if isinstance(out, tuple) else "tensor" for out in outputs} == {known[-1].form}
    assert backend.describe_model().hidden_size == HIDDEN


def plain(backend, ids):
    """The library's own greedy answer and its logits, with nothing of ours near it."""
    prompt = torch.tensor([ids])
    with torch.no_grad():
        out = backend.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, min_new_tokens=6,
            eos_token_id=None, pad_token_id=0, do_sample=False, use_cache=True, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    return out.sequences[0, len(ids) :].tolist(), [
        log_softmax(row) for row in torch.stack(out.logits)[:, 0].float().numpy()
    ]


def test_zero_is_nothing(backend):
    for ids in PROMPTS:
        reference, raw = plain(backend, ids)
        for wish in ({}, {"everywhere": 0.0, "at-0": 0}):
            answer = backend.generate_detailed([ids], SHORT, patches=wish)[0]
            assert answer.token_ids == reference
            for step, row in enumerate(answer.logprobs):
                assert all(value == float(raw[step][token]) for token, value in row.items())


def test_an_edit_moves_the_stream_by_exactly_itself(backend):
    """What enters the next block is what left this one plus the vector, and nothing else."""
    ids, blocks = PROMPTS[1], backend.blocks

    def entering(layer, wish):
        seen = []
        handle = blocks[layer].register_forward_pre_hook(lambda m, args: seen.append(args[0].clone()))
        backend.generate_detailed([ids], GenerationConfig(max_new_tokens=1), patches=wish)
        handle.remove()
        assert len(seen) == 1
        return seen[0]

    for layer in range(len(blocks) - 1):
        before, after = entering(layer + 1, {}), entering(layer + 1, {f"at-{layer}": 1.5})
        edit = 1.5 * torch.tensor(backend.vector_values(f"at-{layer}", f"v{layer}"))
        assert torch.equal(after, before + edit)


def test_measured_equals_expected(backend):
    ids = PROMPTS[1]
    rows = backend.trace(ids, SHORT, patches=WISHES[2])
    steps = len(ids) + 5
    assert {(row.layer, row.position) for row in rows} == {
        (layer, position)
        for layer in range(len(backend.blocks))
        for position in range(steps)
        if position < len(ids) or layer in (0, len(backend.blocks) - 1)
    }
    for row in rows:
        assert row.expected > 0
        assert row.norm == pytest.approx(row.expected, rel=1e-4)


ONE_PASS_IS_ANOTHER_MODEL = {"paligemma"}
"""Attention looks both ways within the prompt: prompt and answer in one pass would be one long prompt."""


def test_a_batch_equals_each_row_alone_and_the_formula(backend):
    together = backend.generate_detailed(PROMPTS, SHORT, patches=WISHES)
    for ids, wish, answer in zip(PROMPTS, WISHES, together, strict=True):
        alone = backend.generate_detailed([ids], SHORT, patches=wish)[0]
        assert answer.token_ids == alone.token_ids
        same(answer.logprobs, alone.logprobs)
        if backend.model.config.model_type not in ONE_PASS_IS_ANOTHER_MODEL:
            applied = [
                (backend.patches[name].patch, strength, backend.patches[name].schedule)
                for name, strength in wish.items()
            ]
            expected = by_hand.logprobs(backend.model, ids, answer.token_ids, applied, blocks=backend.blocks)
            same(answer.logprobs, expected)
    unpatched = backend.generate_detailed(PROMPTS, SHORT, patches={})
    same(unpatched[1].logprobs, together[1].logprobs)
    for i in (0, 2, 3):
        assert unpatched[i].logprobs != together[i].logprobs


def test_a_cache_changes_nothing(backend):
    if backend.model.config.model_type in ONE_PASS_IS_ANOTHER_MODEL:
        pytest.skip("without a cache the library itself takes the answer for a part of the prompt")
    usual = backend.generate_detailed(PROMPTS, SHORT, patches=WISHES)
    without = dataclasses.replace(SHORT, extra={"use_cache": False})
    for one, other in zip(usual, backend.generate_detailed(PROMPTS, without, patches=WISHES), strict=True):
        assert one.token_ids == other.token_ids
        same(one.logprobs, other.logprobs)


def same(ours, others):
    """Log-probabilities agree to rounding, wherever both have them: a row may end with another of two equals."""
    for row, other in zip(ours, others, strict=True):
        for token, value in row.items():
            if not isinstance(other, dict) or token in other:
                assert value == pytest.approx(float(other[token]), abs=1e-4)


def test_every_family_that_is_not_refused_is_run_here():
    reached = set()
    for model_type, shape in {**TEXT, **WRAPPERS}.items():
        config = transformers.AutoConfig.for_model(model_type, **shape)
        reached |= {family.model_type for family in families.families_of(config)}
    assert reached == {name for name, family in families.FAMILIES.items() if not family.refused}


def refused(config, code, said):
    with pytest.raises(EngineError, match=said) as caught:
        families.refuse_unfit(config)
    assert caught.value.code == code


def test_what_cannot_be_patched_is_refused_by_name():
    for model_type in ("t5", "bart", "mbart", "marian"):
        refused(transformers.AutoConfig.for_model(model_type), "BP504", f"{model_type} has an encoder")
    for model_type in ("gemma3n_text", "gemma3n", "deepseek_v4"):
        refused(transformers.AutoConfig.for_model(model_type), "BP504", "several residual streams")


def test_a_loaded_model_that_cannot_be_patched_is_refused_by_name():
    shape = {"vocab_size": VOCABULARY, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 16, "d_kv": 8}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape)).eval()
    gemma3n = tiny_model("llama")
    gemma3n.config.model_type = "gemma3n_text"
    for model, said in ((t5, "t5 has an encoder"), (gemma3n, "gemma3n_text: its blocks carry several")):
        with pytest.raises(EngineError, match=said) as caught:
            TransformersBackend().load_model(model, tokenizer=IdTokenizer())
        assert caught.value.code == "BP504"


def test_several_streams_are_found_out_even_in_a_family_that_is_not_known_for_them(monkeypatch):
    monkeypatch.delitem(families.FAMILIES, "gemma3n_text")
    shape = {
        **TEXT["gemma3_text"], "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4, "altup_num_inputs": 2, "num_kv_shared_layers": 0, "activation_sparsity_pattern": None,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }  # fmt: skip
    config = transformers.AutoConfig.for_model("gemma3n_text", **shape)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(EngineError, match=r"block 0 returns \[2, 1, 3, 32\], not one stream") as caught:
        TransformersBackend().load_model(model, tokenizer=IdTokenizer())
    assert caught.value.code == "BP504"


def batch_widths(engine):
    """How many rows each forward pass of a batch of three lengths has."""
    widths = []
    handle = engine.blocks[0].register_forward_hook(lambda m, args, out: widths.append(args[0].shape[0]))
    engine.generate_detailed(PROMPTS[:3], GenerationConfig(max_new_tokens=1))
    handle.remove()
    return widths


def test_an_unlisted_family_is_found_at_a_usual_place_and_not_padded(monkeypatch):
    model = tiny_model("llama")
    engine = TransformersBackend()
    engine.load_model(model, tokenizer=IdTokenizer())
    assert batch_widths(engine) == [3]
    monkeypatch.delitem(families.FAMILIES, "llama")
    engine.load_model(model, tokenizer=IdTokenizer())
    assert batch_widths(engine) == [1, 1, 1]


def test_a_place_that_nobody_knows_can_be_registered(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    model = tiny_model("llama")
    model.config.model_type = "new"
    model.model.stack = model.model.layers
    del model.model.layers
    with pytest.raises(EngineError, match=r"looked for 3 blocks at .*model\.stack \(3 entries\)") as caught:
        families.find_blocks(model, model.config)
    assert caught.value.code == "BP503"
    families.register(families.Family("new", paths=("model.stack",)))
    assert families.find_blocks(model, model.config) == ("model.stack", model.model.stack)


def test_a_list_of_another_length_than_the_config_states_is_not_taken():
    model = tiny_model("llama")
    model.config.num_hidden_layers = 4
    with pytest.raises(EngineError, match=r"looked for 4 blocks at .*model\.layers \(3 entries\)") as caught:
        families.find_blocks(model, model.config)
    assert caught.value.code == "BP503"


def test_a_picture_tower_of_as_many_blocks_is_not_taken_for_the_text(monkeypatch):
    shape = WRAPPERS["llava"]
    vision = {**shape["vision_config"], "num_hidden_layers": 3}
    config = transformers.AutoConfig.for_model("llava", **{**shape, "vision_config": vision})
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for name in ("llava", "llama"):
        monkeypatch.delitem(families.FAMILIES, name)
    assert families.find_blocks(model, config)[0] == "model.language_model.layers"


def test_a_text_class_of_a_wrapper_keeps_its_blocks_where_the_wrapper_says():
    for model_type, path in (
        ("llama4", "model.layers"),
        ("qwen3_5", "model.layers"),
        ("gemma3", "model.language_model.layers"),
    ):
        config = transformers.AutoConfig.for_model(model_type, **WRAPPERS[model_type])
        assert families.find_blocks(transformers.AutoModelForCausalLM.from_config(config), config)[0] == path


def test_vllm_keeps_the_blocks_at_a_place_of_its_own(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    families.register(families.Family("new", paths=("ours",), vllm_path="theirs"))
    model = torch.nn.Module()
    model.ours = torch.nn.ModuleList(torch.nn.Identity() for _ in range(2))
    model.theirs = torch.nn.ModuleList(torch.nn.Identity() for _ in range(2))
    config = SimpleNamespace(model_type="new", num_hidden_layers=2)
    assert families.find_blocks(model, config) == ("ours", model.ours)
    assert families.find_blocks(model, config, vllm=True) == ("theirs", model.theirs)


def test_a_model_without_any_list_is_refused_and_told_so():
    config = SimpleNamespace(model_type="new", num_hidden_layers=2)
    with pytest.raises(EngineError, match="lists found: none") as caught:
        families.find_blocks(torch.nn.Module(), config)
    assert caught.value.code == "BP503"
    assert 'Family("new"' in caught.value.remedy


def test_a_config_states_its_blocks_under_any_of_the_usual_names():
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        assert families.block_count(SimpleNamespace(model_type="new", **{name: 7})) == 7
    kinds = SimpleNamespace(model_type="new", num_layers=None, layers_block_type=["mamba", "mlp"])
    assert families.block_count(kinds) == 2
    with pytest.raises(EngineError, match="the config of new states no number of blocks") as caught:
        families.block_count(SimpleNamespace(model_type="new", layers_block_type=[]))
    assert caught.value.code == "BP503"


def test_a_config_states_its_context_or_has_no_bound():
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        assert families.context_length(SimpleNamespace(model_type="new", **{name: 9})) == 9
    assert families.context_length(SimpleNamespace(model_type="new", n_ctx=None)) is None


def test_a_wrapper_speaks_for_its_text_model():
    config = transformers.AutoConfig.for_model("llava", **WRAPPERS["llava"])
    assert families.text_config(config) is config.text_config
    assert families.text_config(config.text_config) is config.text_config
    assert [family.model_type for family in families.families_of(config)] == ["llava", "llama"]
    assert (families.block_count(config), families.context_length(config)) == (LAYERS, CONTEXT)


def test_the_page_has_a_row_for_each_family_and_says_what_it_cannot_do():
    rows = {line.split("`")[1]: line for line in families.markdown_table().splitlines() if line[:3] == "| `"}
    assert set(rows) == set(families.FAMILIES)
    assert rows["llama"] == "| `llama` | `model.layers` | tensor | SUM | yes | yes |"
    assert rows["mpt"] == "| `mpt` | `transformer.blocks` | tuple | not there | yes | yes |"
    assert "| equal lengths only |" in rows["mamba"]
    assert "| no: its blocks carry several residual streams" in rows["gemma3n"]
    assert "`model.layers` or `model.language_model.layers`" in rows["qwen2"]
