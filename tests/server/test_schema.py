"""The routes that are our own, called with whatever their OpenAPI description allows and does not."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, settings

from brainpatch.runtime import BrainPatchedModel
from brainpatch.server import build_app
from brainpatch.server.settings import Settings
from tests.factories import make_patch
from tests.runtime.engine import RecordingBackend


def _app():
    backend = RecordingBackend()
    backend.install_patch(make_patch([{"layer": 1}], name="formal"), enabled=False)
    return build_app(BrainPatchedModel(backend), "m", settings=Settings(admin_key="a"))


schema = schemathesis.openapi.from_asgi("/openapi.json", _app())


@schema.parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_is_a_failure_of_the_server(case):
    answer = case.call(headers={"Authorization": "Bearer a"})
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert isinstance(answer.json()["error"]["message"], str)
        assert answer.status_code != 422
