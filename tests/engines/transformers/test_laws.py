"""The laws, on Transformers with a real model in float32."""

from __future__ import annotations

import pytest
import torch

from brainpatch.runtime.config import GenerationConfig
from tests.engines.laws import SHORT, Laws
from tests.engines.material import PROMPTS, patch
from tests.engines.transformers.conftest import hooks, weights_digest

pytestmark = pytest.mark.model


class TestTransformers(Laws):
    def plain(self, backend, ids, count):
        given = torch.tensor([ids])
        with torch.no_grad():
            out = backend.model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=count,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        return out.sequences[0, len(ids) :].tolist(), torch.stack(out.logits)[:, 0].float().numpy()

    def digest(self, backend):
        return weights_digest(backend.model)


def test_zero_is_the_baseline_in_the_published_form(backend):
    backend.install_patch(patch())
    assert backend.assert_zero_is_baseline(PROMPTS[0], SHORT)["identical"]


def test_without_edits_there_are_no_hooks(backend):
    backend.install_patch(patch(), strength=0.0)
    seen = []
    block = backend.blocks[3]
    forward = block.forward
    block.forward = lambda *a, **k: (seen.append(hooks(backend.model)), forward(*a, **k))[1]
    try:
        backend.generate("Hi", SHORT)
        assert set(seen) == {0}
        backend.generate("Hi", SHORT, patches={"p": 1})
        assert set(seen) == {0, 1}
    finally:
        del block.forward


def test_a_cache_that_is_not_known_is_refused(backend):
    with pytest.raises(Exception, match="cache_implementation") as caught:
        backend.generate("Hi", GenerationConfig(extra={"cache_implementation": "quantized"}))
    assert caught.value.code == "BP404"
