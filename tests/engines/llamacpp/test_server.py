"""Our own server over llama.cpp, over a real socket, with a quantised model."""

from __future__ import annotations

import pytest

from tests.server.contract import Contract, start

pytestmark = [pytest.mark.model]


@pytest.fixture(scope="module")
def server(gguf_q4, tmp_path_factory):
    running = start(tmp_path_factory.mktemp("server"), gguf_q4, [], dtype="auto")
    yield running
    assert running.stop() == 0, running.log.read_text()[-3000:]


class TestLlamaCpp(Contract):
    engine_does = frozenset()
