"""Our own application without a socket, on a stand-in engine: what `tests/server/contract.py` cannot see."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from brainpatch.runtime import BrainPatchedModel
from brainpatch.server import build_app
from brainpatch.server.settings import Settings
from tests.factories import make_patch
from tests.runtime.engine import RecordingBackend

TALK = {"messages": [{"role": "user", "content": "hi"}]}


def client_of(**settings):
    backend = RecordingBackend()
    backend.install_patch(make_patch([{"layer": 1}], name="formal"), enabled=False)
    return TestClient(build_app(BrainPatchedModel(backend), "m", settings=Settings(**settings)))


@pytest.fixture
def client():
    with client_of() as made:
        yield made


def test_health_names_patches_only_where_anybody_may_ask(client):
    assert client.get("/health").json()["patches"]["formal"]["enabled"] is False
    with client_of(api_keys=["u"]) as closed:
        assert closed.get("/health").json() == {"status": "ok"}


def test_a_server_that_stops_says_so(client):
    client.app.state.draining = True
    answer = client.post("/v1/chat/completions", json=TALK)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert client.get("/health").status_code == 503


def test_without_an_admin_key_there_is_nothing_to_change(client):
    for method, path in (("POST", ""), ("PATCH", "/formal"), ("DELETE", "/formal")):
        answer = client.request(method, f"/brainpatch/patches{path}", headers={"Authorization": "Bearer "})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "BP709")
    assert client.get("/brainpatch/patches").status_code == 200
    described = client.get("/openapi.json").json()["paths"]
    assert set(described["/brainpatch/patches"]) == {"get"}


def test_bodies_are_bounded():
    with client_of(max_body_bytes=200) as small:
        answer = small.post("/v1/completions", json={"prompt": "x" * 300})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "BP703")
        answer = small.post("/v1/completions", content=iter([b"x" * 150, b"x" * 150]))
        assert answer.status_code == 413


def test_full_is_429():
    with client_of(max_requests=2) as small:
        answer = small.post("/v1/chat/completions", json={**TALK, "n": 3})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert small.post("/v1/chat/completions", json={**TALK, "n": 2}).status_code == 200


def test_what_a_request_fans_out_to_is_bounded_before_it_is_made():
    with client_of(max_requests=8) as small:
        answer = small.post("/v1/completions", json={"prompt": [[1]] * 5, "n": 2})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "BP705")


def test_one_model_is_found_by_any_of_its_names(client):
    assert client.get("/v1/models/m+formal@0.5").json()["brainpatch"] == {"patches": {"formal": 0.5}}
    assert client.get("/v1/models/m+nobody").status_code == 404
    assert client.get("/v1/models/nobody").status_code == 404


def test_fields_that_ask_for_nothing_pass_and_unknown_ones_do_not(client):
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "tools": [],
        "response_format": {"type": "text"},
        "store": True,
    }
    assert client.post("/v1/chat/completions", json={**TALK, **harmless}).status_code == 200
    for field in (
        {"brainpach": {"formal": 1}},
        {"tools": [{}]},
        {"best_of": 2},
        {"reasoning_effort": "high"},
    ):
        answer = client.post("/v1/chat/completions", json={**TALK, **field})
        assert answer.status_code == 400
        assert next(iter(field)) in answer.json()["error"]["message"]


def test_the_published_call_still_builds_an_app():
    """`build_app(model, served_model_name=None)`; the name is then the model's own."""
    backend = RecordingBackend()
    with TestClient(build_app(BrainPatchedModel(backend))) as made:
        names = [one["id"] for one in made.get("/v1/models").json()["data"]]
    assert names[0] == backend.describe_model().model_id
