"""Learning by difference of means: what is read, and what comes out."""

from __future__ import annotations

import json

import numpy as np
import pytest

from brainpatch.errors import LearnError, PatchExistsError
from brainpatch.learn.activations import Reading, read_activations
from brainpatch.learn.contrast import learn_patch, read_pairs


def write(tmp_path, *lines):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


GOOD = [
    {"prompt": "How was dinner?", "positive": "It was a joy, a real joy!", "negative": "It was awful."},
    {"prompt": "And the sea?", "positive": "Wonderful!", "negative": "Grey and sad, as ever and always."},
    {"prompt": "Your day?", "positive": "I loved every bit of it.", "negative": "I hated it."},
]


def test_pairs_are_read_with_the_digest_of_the_file(tmp_path):
    pairs = read_pairs(write(tmp_path, *GOOD, ""))
    assert [pair.positive for pair in pairs.items] == [line["positive"] for line in GOOD]
    assert len(pairs.digest) == 64


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ("[1]", "not an object"),
        ({"positive": "x"}, "negative is missing"),
        ({"positive": "x", "negative": ""}, "negative is missing, empty"),
        ({"positive": "x", "negative": 3}, "neither text nor messages"),
        ({"positive": "x", "negative": "y", "label": 1}, "unknown key 'label'"),
        ({"prompt": "", "positive": "x", "negative": "y"}, "prompt is empty"),
        ({"prompt": "p", "positive": [{"role": "user", "content": "x"}], "negative": "y"}, "is a string"),
        ('{"positive": "x", "positive": "z", "negative": "y"}', "line 2"),
    ],
)
def test_a_wrong_line_is_refused_by_number(tmp_path, line, said):
    with pytest.raises(LearnError, match=said) as caught:
        read_pairs(write(tmp_path, GOOD[0], line))
    assert caught.value.code == "BP601"
    assert "line 2" in caught.value.reason


def test_too_few_pairs_and_no_file_are_refused(tmp_path):
    with pytest.raises(LearnError, match="at least 2") as caught:
        read_pairs(write(tmp_path, GOOD[0]))
    assert caught.value.code == "BP601"
    with pytest.raises(LearnError) as caught:
        read_pairs(tmp_path / "nothing.jsonl")
    assert caught.value.code == "BP101"


@pytest.fixture(scope="module")
def backend(model_folder):
    from brainpatch.backends.transformers_backend import TransformersBackend

    backend = TransformersBackend()
    backend.load_model(str(model_folder), dtype="float32", model_id="HuggingFaceTB/SmolLM2-135M-Instruct")
    yield backend
    backend.unload()


@pytest.mark.model
def test_readings_do_not_depend_on_batch_size_and_equal_plain_hidden_states(backend):
    import torch

    texts = [
        "A short one.",
        "A much longer text, with a good many more tokens in it than the other has.",
        "Hm",
    ]
    ids = [backend.tokenizer(text)["input_ids"] for text in texts]
    readings = [Reading(tuple(tokens), 1, len(tokens)) for tokens in ids]
    layers = [0, 15, 28]
    together = read_activations(backend, readings, layers, batch_size=3)
    alone = read_activations(backend, readings, layers, batch_size=1)
    np.testing.assert_allclose(together.means, alone.means, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(together.norms, alone.norms, rtol=1e-4)
    with torch.no_grad():
        plain = backend.model(torch.tensor([ids[1]]), output_hidden_states=True).hidden_states
    for column, layer in enumerate(layers):
        expected = plain[layer + 1][0, 1:].double().mean(dim=0).numpy()
        np.testing.assert_allclose(alone.means[1, column], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.model
def test_the_last_block_is_read_before_the_final_norm(backend):
    import torch

    ids = backend.tokenizer("The last block's output is not normed.")["input_ids"]
    read = read_activations(backend, [Reading(tuple(ids), 0, len(ids))], [29])
    with torch.no_grad():
        normed = backend.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
    assert not np.allclose(read.means[0, 0], normed[0].double().mean(dim=0).numpy(), rtol=0.1)


@pytest.mark.model
def test_a_learned_patch_is_the_difference_of_means(backend, tmp_path):
    pairs = read_pairs(write(tmp_path, *GOOD))
    steps = []
    learned = learn_patch(
        backend,
        pairs,
        "joy",
        tmp_path / "joy.brainpatch",
        layers=[3, 15],
        coefficient=2.0,
        site="continuation",
        progress=lambda done, total: steps.append((done, total)),
    )
    manifest = learned.patch.manifest
    assert [(i.layer, i.coefficient, i.site) for i in manifest.interventions] == [
        (3, 2.0, "continuation"),
        (15, 2.0, "continuation"),
    ]
    assert manifest.base_model.model_id == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert manifest.provenance["training_dataset_hash"] == pairs.digest
    assert manifest.provenance["extraction_position"] == "cont_mean"
    assert steps[-1] == (6, 6)
    readings = []
    for pair in pairs.items:
        head = backend.tokenizer.apply_chat_template(
            [{"role": "user", "content": pair.prompt}], add_generation_prompt=True, return_dict=False
        )
        for side in (pair.positive, pair.negative):
            tail = backend.tokenizer(side)["input_ids"]
            readings.append(Reading((*head, *tail), len(head), len(head) + len(tail)))
    means = read_activations(backend, readings, [15], batch_size=1).means[:, 0]
    expected = means[0::2].mean(axis=0) - means[1::2].mean(axis=0)
    found = learned.patch.vector_for("layer_15").float32()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    assert learned.direction_norms[1] == pytest.approx(np.linalg.norm(expected), rel=1e-3)


@pytest.mark.model
def test_equal_inputs_give_equal_bytes_and_swapped_sides_the_opposite(backend, tmp_path):
    pairs = read_pairs(write(tmp_path, *GOOD))
    first = tmp_path / "a.brainpatch"
    learn_patch(backend, pairs, "joy", first)
    again = tmp_path / "b.brainpatch"
    learned = learn_patch(backend, pairs, "joy", again)
    assert first.read_bytes() == again.read_bytes()
    assert learned.layers == (15,)
    swapped = read_pairs(
        write(
            tmp_path, *[line | {"positive": line["negative"], "negative": line["positive"]} for line in GOOD]
        )
    )
    opposite = learn_patch(backend, swapped, "joy", tmp_path / "c.brainpatch").patch
    np.testing.assert_allclose(
        opposite.vector_for("layer_15").float32(), -learned.patch.vector_for("layer_15").float32(), rtol=1e-4
    )


@pytest.mark.model
def test_strings_and_messages_without_a_prompt(backend, tmp_path):
    chat = [{"role": "user", "content": "Hello"}]
    lines = [{"positive": "I love it.", "negative": "I hate it."}, {"positive": chat, "negative": "No."}]
    pairs = read_pairs(write(tmp_path, *lines))
    learned = learn_patch(backend, pairs, "joy", tmp_path / "joy.brainpatch", position="last")
    assert learned.patch.manifest.provenance["extraction_position"] == "last_prompt"
    with pytest.raises(LearnError, match="needs pairs with a prompt"):
        learn_patch(backend, pairs, "joy", tmp_path / "x.brainpatch", position="completion")


@pytest.mark.model
def test_what_cannot_be_learned_is_refused_and_nothing_written(backend, tmp_path):
    pairs = read_pairs(write(tmp_path, *GOOD))
    same = read_pairs(write(tmp_path, *[{"positive": "Same.", "negative": "Same."}] * 2))
    target = tmp_path / "x.brainpatch"
    for arguments, said in (
        ({"pairs": same}, "the same mean"),
        ({"layers": [30]}, "not in 0..29"),
        ({"position": "first"}, "not one of"),
    ):
        with pytest.raises(LearnError, match=said):
            learn_patch(backend, arguments.pop("pairs", pairs), "joy", target, **arguments)
        assert not target.exists()
    target.write_bytes(b"mine")
    with pytest.raises(PatchExistsError):
        learn_patch(backend, pairs, "joy", target)
    assert target.read_bytes() == b"mine"
