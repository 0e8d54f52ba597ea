"""Every family of the table as a tiny random model on Transformers: what the table says is what happens."""

from __future__ import annotations

import pytest
import torch

from brainpatch.backends import families
from brainpatch.backends.transformers_backend import TransformersBackend
from brainpatch.runtime.config import GenerationConfig
from tests.backends.tiny_models import HIDDEN, TEXT, WRAPPERS, IdTokenizer, tiny_model
from tests.engines.transformers import by_hand
from tests.factories import make_patch

SHORT = GenerationConfig(max_new_tokens=6, ignore_eos=True, logprobs=20)
PROMPTS = [[5, 6, 7], [9, 41, 13, 22, 8, 30, 11, 5, 50, 4], [33, 12, 40, 17, 29, 6]]


@pytest.fixture(scope="module", params=[*TEXT, *WRAPPERS])
def backend(request):
    """A tiny model of one family, with patches of every kind that none of the defaults applies."""
    model = tiny_model(request.param)
    engine = TransformersBackend()
    engine.load_model(model, tokenizer=IdTokenizer(), model_id="test/tiny")
    engine.compatibility_mode = "unsafe"
    for patch in patches(len(engine.blocks)):
        engine.install_patch(patch, enabled=False)
    yield engine
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0


def patches(layers):
    """Patches for a tiny model: one at each block alone, and three that depend on the position."""

    def one(name, where, site="all", **fields):
        items = [{"layer": layer, "vector": f"v{layer}", "site": site} for layer in where]
        return make_patch(items, name=name, hidden=HIDDEN, layers=layers, seed=len(name), **fields)

    return [
        *(one(f"at-{layer}", [layer]) for layer in range(layers)),
        one("everywhere", range(layers), schedule={"0": 1.0, "2": -0.5, "4": 0.0}),
        one("before", range(layers), "prompt"),
        one("after", [0, layers - 1], "continuation"),
    ]


WISHES = [{"everywhere": 1.0}, {}, {"before": -1.0, "after": 1.5}]


def family_type(backend):
    return backend.model.config.model_type


def test_the_blocks_are_where_the_table_says(backend):
    known = families.families_of(backend.model.config)
    assert known, "not in the table"
    path, blocks = families.find_blocks(backend.model, backend.model.config)
    assert path in [path for family in known for path in family.paths]
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
            eos_token_id=None, pad_token_id=0, do_sample=False, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    return out.sequences[0, len(ids) :].tolist(), torch.log_softmax(torch.stack(out.logits)[:, 0].float(), -1)


def test_zero_is_nothing(backend):
    for ids in PROMPTS:
        reference, raw = plain(backend, ids)
        for wish in ({}, {"everywhere": 0.0, "at-0": 0}):
            answer = backend.generate_detailed([ids], SHORT, patches=wish)[0]
            assert answer.token_ids == reference
            for step, row in enumerate(answer.logprobs):
                assert all(value == float(raw[step, token]) for token, value in row.items())


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


def test_a_batch_equals_each_row_alone_and_the_formula(backend):
    together = backend.generate_detailed(PROMPTS, SHORT, patches=WISHES)
    for ids, wish, answer in zip(PROMPTS, WISHES, together, strict=True):
        alone = backend.generate_detailed([ids], SHORT, patches=wish)[0]
        assert answer.token_ids == alone.token_ids
        applied = [
            (backend.patches[name].patch, strength, backend.patches[name].schedule)
            for name, strength in wish.items()
        ]
        expected = by_hand.logprobs(backend.model, ids, answer.token_ids, applied, blocks=backend.blocks)
        for row, step in zip(answer.logprobs, expected, strict=True):
            for token, value in row.items():
                assert value == pytest.approx(float(step[token]), abs=1e-3)
    unpatched = backend.generate_detailed(PROMPTS, SHORT, patches={})
    assert unpatched[1].logprobs == together[1].logprobs or not families.can_be_padded(backend.model.config)
    for i in (0, 2):
        assert unpatched[i].logprobs != together[i].logprobs
