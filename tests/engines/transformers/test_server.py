"""Our own server over Transformers, over a real socket."""

from __future__ import annotations

import pytest

from tests.server.contract import Contract, check_drained, start, under_load

pytestmark = [pytest.mark.model]


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    running = start(tmp_path_factory.mktemp("server"), model_folder, ["--backend", "transformers"])
    yield running
    assert running.stop() == 0, running.log.read_text()[-3000:]


class TestTransformers(Contract):
    engine_does = frozenset()


def test_a_server_that_is_told_to_stop_finishes_what_runs(model_folder, tmp_path):
    server = start(tmp_path, model_folder, ["--backend", "transformers"])
    check_drained(*under_load(server, "smol"))
