"""The laws, on llama.cpp with a real model in float32."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from brainpatch.backends.llamacpp_model import GgufModel, Settings
from tests.engines.laws import Laws
from tests.engines.llamacpp.conftest import EXACT

pytestmark = pytest.mark.model


@pytest.fixture(scope="session")
def untouched(gguf_f32):
    """The model in a context without a callback."""
    model = GgufModel(gguf_f32, Settings(n_ctx=2048, **EXACT), None)
    yield model
    model.close()


class TestLlamaCpp(Laws):
    @pytest.fixture(autouse=True)
    def _model(self, untouched, tmp_path):
        self.model, self.folder = untouched, tmp_path

    def plain(self, backend, ids, count):
        model, tokens, rows = self.model, [], []
        model.decode([(token, at, 0, at == len(ids) - 1) for at, token in enumerate(ids)])
        rows.append(model.logits(len(ids) - 1).copy())
        for step in range(count - 1):
            tokens.append(int(np.argmax(rows[-1])))
            model.decode([(tokens[-1], len(ids) + step, 0, True)])
            rows.append(model.logits(0).copy())
        model.forget_all()
        return [*tokens, int(np.argmax(rows[-1]))], rows

    def digest(self, backend):
        """Of the weights as llama.cpp itself writes them out of its memory."""
        engine, thread = backend._ready()
        ffi, c = engine.model.library
        ffi.cdef("void llama_model_save_to_file(const void * model, const char * path);", override=True)
        file = self.folder / "weights.gguf"
        thread.call(lambda _: c.llama_model_save_to_file(engine.model._model, str(file).encode()))
        seal = hashlib.sha256(file.read_bytes()).hexdigest()
        file.unlink()
        return seal
