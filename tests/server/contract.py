"""What every server of ours must do, whatever the engine: called over a real socket by the real openai client.

A test module makes a class of `Contract` and a fixture `server`, a `Server` that runs with `PATCHES`, a user's
key and an admin key. `engine_does` says which parameters the engine does; the others must be refused by name.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx
import openai
import pytest

from brainpatch import save_patch
from brainpatch.patch.file import LoadedPatch
from brainpatch.runtime.meaning import ActivePatch, resolve
from tests.engines.vllm.material import MODEL_ID, steering

USER, ADMIN = "user-key", "admin-key"
QUESTION: Any = [{"role": "user", "content": "How was your day?"}]


def patches() -> dict[str, LoadedPatch]:
    """Those that the servers start with: all off unless asked for."""
    return {
        "sea": steering("sea", norm=40.0),
        "deep": steering("deep", (3, 15, 27), norm=12.0),
        "late": steering("late", norm=40.0, site="continuation"),
    }


def digest(wish: dict[str, Any]) -> str:
    """What a request for these patches must be told."""
    installed = {name: ActivePatch(patch) for name, patch in patches().items()}
    return resolve(wish, installed).digest


@dataclass
class Server:
    """A `brainpatch serve` that runs."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, key: str = USER, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120, **more)

    def http(self, key: str | None = USER) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120)

    def stop(self, seconds: float = 60) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


def start(
    folder: Path, model: Path, words: Sequence[str], after: Sequence[str] = (), *, dtype: str = "float32"
) -> Server:
    """Start `brainpatch serve` with the patches and wait until it is healthy."""
    files = []
    for name, patch in patches().items():
        files += ["-p", str(save_patch(patch.manifest, patch.vectors, folder / f"{name}.brainpatch"))]
    port = free_port()
    command = [sys.executable, "-m", "brainpatch", "serve", "-m", str(model), "--model-id", MODEL_ID, *files]
    command += ["--default-off", "--dtype", dtype, "--port", str(port), "--api-key", USER]
    command += [
        "--served-model-name",
        "smol",
        "--admin-key",
        ADMIN,
        *words,
        *(["--", *after] if after else []),
    ]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, "BRAINPATCH_HOME": str(folder)}
        )
    return wait_until_healthy(Server(f"http://127.0.0.1:{port}", process, log))


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(server: Server) -> Server:
    """The server, once it is; AssertionError with its log when it ends first."""
    for _ in range(600):
        if server.process.poll() is not None:
            break
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return server
        except httpx.TransportError:
            time.sleep(0.5)
    server.process.kill()
    raise AssertionError(server.log.read_text()[-4000:])


def under_load(server: Server, model: str, tokens: int = 60) -> tuple[list[Any], list[Any], int]:
    """Tell a server to stop while it answers four requests: (their answers, what later ones got, exit status)."""
    answers: list[Any] = []

    def long(number: int) -> None:
        wish = {"sea": 1} if number % 2 else {}
        more = {"brainpatch": wish, "ignore_eos": True}
        try:
            answers.append(ask(server.client(), model, max_tokens=tokens, extra_body=more))
        except openai.OpenAIError as error:
            answers.append(error)

    threads = [threading.Thread(target=long, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)  # they are in the engine
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    late: list[Any] = []
    try:
        late.append(ask(server.client(), model, max_tokens=1))
    except openai.OpenAIError as error:
        late.append(error)
    for thread in threads:
        thread.join()
    return answers, late, server.process.wait(90)


def check_drained(answers: list[Any], late: list[Any], status: int) -> None:
    """Those that ran are whole, what came later was turned away, and the server ended well."""
    assert [getattr(one, "usage", one) and one.usage.completion_tokens for one in answers] == [60] * 4
    assert isinstance(late[0], openai.APIConnectionError) or late[0].status_code == 503, late
    assert status == 0


def ask(client: openai.OpenAI, model: str, wish: Any = None, **more: Any) -> Any:
    """An answer of 12 greedy tokens."""
    body = {} if wish is None else {"extra_body": {"brainpatch": wish}}
    settings = {"max_tokens": 12, "temperature": 0, **more}
    return client.chat.completions.create(model=model, messages=QUESTION, **body, **settings)


def text(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def echo(choice: Any) -> dict[str, Any]:
    found: dict[str, Any] = choice.model_extra["brainpatch"]
    return found


BODIES: list[bytes] = [
    b"", b"{", b"[]", b"null", b'"x"', b"1", b"\xff\xfe", b'{"model"}', b"{}" * 2, b'{"a":' * 5000,
    b'{"model": "M", "messages": [{"role": "user", "content": "\xff"}]}', b"[" * 100000,
]  # fmt: skip
FIELDS: list[dict[str, Any]] = [
    {"model": 1}, {"model": []}, {"model": {}}, {"model": True}, {"model": ""}, {"model": "nobody"},
    {"model": "M+"*300}, {"model": "M+../../etc/passwd"}, {"model": "M+http://x/y.brainpatch"}, {"model": "M+sea@"},
    {"model": "M+sea@x"}, {"model": "M+sea@nan"}, {"model": "M+sea@inf"}, {"model": "M+sea+sea"}, {"model": "M++sea"},
    {"model": "M+sea", "brainpatch": {"sea": 1}}, {"model": "M+@1"}, {"model": "M+\u0000"}, {"model": "M+sea@1e400"},
    {"brainpatch": 1}, {"brainpatch": "sea"}, {"brainpatch": ["sea"]}, {"brainpatch": True},
    {"brainpatch": {"sea": "1"}},
    {"brainpatch": {"sea": None}}, {"brainpatch": {"sea": True}}, {"brainpatch": {"sea": []}},
    {"brainpatch": {"sea": {"strength": "x"}}}, {"brainpatch": {"sea": {"strenght": 1}}},
    {"brainpatch": {"sea": {"schedule": 1}}}, {"brainpatch": {"sea": {"schedule": {}}}},
    {"brainpatch": {"sea": {"schedule": {"-1": 1}}}}, {"brainpatch": {"sea": {"schedule": {"0": "x"}}}},
    {"brainpatch": {"sea": {"schedule": {"0": 1e9}}}}, {"brainpatch": {"../sea": 1}}, {"brainpatch": {"": 1}},
    {"brainpatch": {"file:///etc/passwd": 1}}, {"brainpatch": {"owner/repo": 1}},
    {"messages": None}, {"messages": []}, {"messages": "hi"}, {"messages": [1]}, {"messages": [{"role": "user"}]},
    {"messages": [{"role": "nobody", "content": 5}]}, {"messages": [{"content": "x"}]},
    {"messages": {"role": "user", "content": "x"}},
    {"max_tokens": -1}, {"max_tokens": "x"}, {"max_tokens": 10**9}, {"temperature": -1}, {"temperature": "hot"},
    {"temperature": []}, {"top_p": 2}, {"top_p": 0}, {"n": 0}, {"n": -1}, {"n": "x"}, {"stop": 5}, {"stop": [1]},
    {"presence_penalty": 9}, {"frequency_penalty": -9}, {"top_logprobs": 5}, {"logprobs": True, "top_logprobs": 999},
    {"logprobs": True, "top_logprobs": -1}, {"stream": "maybe"}, {"seed": "x"}, {"response_format": 5},
    {"tools": "x"}, {"stream_options": 7, "stream": True},
]  # fmt: skip


class Contract:
    """See the module."""

    model: ClassVar[str] = "smol"
    engine_does: ClassVar[frozenset[str]] = frozenset()
    engine_takes: ClassVar[Sequence[dict[str, Any]]] = ()
    """Fields of `FIELDS` that the engine's own server reads as something."""

    def test_the_models_are_listed(self, server):
        names = [one.id for one in server.client().models.list()]
        assert names == [self.model + rest for rest in ("", "+", "+sea", "+deep", "+late")]

    def test_field_and_name_choose_patches_and_the_answer_says_which(self, server):
        client = server.client()
        plain = ask(client, self.model)
        assert echo(plain.choices[0]) == {"patches": {}, "digest": digest({})}
        assert text(ask(client, f"{self.model}+")) == text(plain) == text(ask(client, self.model, {}))
        named = ask(client, f"{self.model}+sea")
        assert text(named) != text(plain)
        assert text(named) == text(ask(client, self.model, {"sea": 1}))
        assert echo(named.choices[0]) == {"patches": {"sea": 1.0}, "digest": digest({"sea": 1})}
        wish = {"sea": 0.5, "late": -1.0}
        both = ask(client, f"{self.model}+sea@0.5+late@-1")
        assert echo(both.choices[0]) == {"patches": wish, "digest": digest(wish)}
        assert text(both) == text(ask(client, self.model, wish))
        stepped = {"sea": {"strength": 1, "schedule": {"0": 1, "4": 0}}}
        answer = ask(client, self.model, stepped)
        assert echo(answer.choices[0])["digest"] == digest(stepped)
        assert text(answer) != text(named)
        assert answer.usage.completion_tokens == 12
        assert answer.choices[0].finish_reason == "length"

    def test_streams_say_it_in_their_first_and_last_chunk(self, server):
        client = server.client()
        whole = ask(client, f"{self.model}+sea")
        for options in ({}, {"stream_options": {"include_usage": True}}):
            chunks = list(ask(client, f"{self.model}+sea", stream=True, **options))
            with_choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
            pieces = [one.delta.content or "" for one in with_choices]
            assert "".join(pieces) == text(whole)
            assert len([piece for piece in pieces if piece]) > 4
            wanted = {"patches": {"sea": 1.0}, "digest": digest({"sea": 1})}
            assert echo(with_choices[0]) == echo(with_choices[-1]) == wanted
            assert with_choices[-1].finish_reason == "length"
            usage = [chunk.usage for chunk in chunks if chunk.usage]
            assert [one.completion_tokens for one in usage] == ([12] if options else [])
            assert all(one.prompt_tokens == whole.usage.prompt_tokens for one in usage)

    def test_completions_take_patches(self, server):
        client = server.client()
        texts = {}
        for model in (self.model, f"{self.model}+sea"):
            answer = client.completions.create(model=model, prompt="The sea", max_tokens=8, temperature=0)
            texts[model] = answer.choices[0].text
            assert echo(answer.choices[0])["patches"] == ({} if model == self.model else {"sea": 1.0})
        assert len(set(texts.values())) == 2
        several = client.completions.create(
            model=f"{self.model}+sea", prompt=["The sea", "The sea"], max_tokens=8, temperature=0
        )
        assert [one.text for one in several.choices] == [texts[f"{self.model}+sea"]] * 2
        chunks = client.completions.create(
            model=f"{self.model}+sea", prompt="The sea", max_tokens=8, temperature=0, stream=True
        )
        assert "".join(c.choices[0].text for c in chunks if c.choices) == texts[f"{self.model}+sea"]

    def test_parameters_mean_what_they_say(self, server):
        client = server.client()
        model = f"{self.model}+sea"
        plain = text(ask(client, model, max_tokens=24))
        word = plain.split()[3]
        stopped = ask(client, model, max_tokens=24, stop=[word])
        assert text(stopped) == plain[: plain.index(word)]
        assert stopped.choices[0].finish_reason == "stop"
        assert text(ask(client, model, max_tokens=openai.NOT_GIVEN, max_completion_tokens=12)) == text(
            ask(client, model)
        )
        drawn = [text(ask(client, model, temperature=1, seed=seed)) for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
        several = ask(client, model, temperature=1, seed=3, n=3)
        assert [one.index for one in several.choices] == [0, 1, 2]
        assert len({one.message.content for one in several.choices}) > 1
        assert several.usage.completion_tokens == 36
        scored = ask(client, model, max_tokens=3, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert len(scored) == 3
        assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].token == one.token for one in scored)
        assert all(one.logprob <= 0 for one in scored)
        for penalty in ("presence_penalty", "frequency_penalty"):
            assert text(ask(client, model, max_tokens=40, **{penalty: 2.0})) != text(
                ask(client, model, max_tokens=40)
            )
        talk = [
            {"role": "system", "content": "Answer in one word."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": [{"type": "text", "text": "What is the sea?"}]},
        ]
        long = client.chat.completions.create(model=model, messages=talk, max_tokens=8, temperature=0)
        assert long.usage.prompt_tokens > 30

    @pytest.mark.parametrize(
        ("name", "more"),
        [
            ("response_format", {"response_format": {"type": "json_object"}}),
            ("logit_bias", {"logit_bias": {"10": -100}}),
            ("tool", {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
                       "tool_choice": {"type": "function", "function": {"name": "f"}}}),
            ("logprobs", {"stream": True, "logprobs": True}),
        ],
    )  # fmt: skip
    def test_what_is_not_done_is_refused_by_name(self, server, name, more):
        client = server.client()
        if name in self.engine_does:
            answer = ask(client, f"{self.model}+sea", **more)
            if more.get("stream"):
                assert any(c.choices and c.choices[0].logprobs for c in answer)
            else:
                assert echo(answer.choices[0])["patches"] == {"sea": 1.0}
            return
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, self.model, **more)
        assert name.replace("logprobs", "log-prob") in str(refused.value)

    def test_a_misspelt_field_is_no_silent_baseline(self, server):
        for field in (
            {"brainpach": {"sea": 1}},
            {"brainPatch": {"sea": 1}},
            {"extra_body": {"brainpatch": {"sea": 1}}},
        ):
            with pytest.raises(openai.BadRequestError):
                ask(server.client(), self.model, extra_body=field)

    def test_an_answer_and_its_line_in_the_log_share_an_id(self, server):
        body = {"model": f"{self.model}+sea", "messages": QUESTION, "max_tokens": 2}
        with server.http() as http:
            given = http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine-1"})
            made = http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "no\tplain one"})
        assert given.headers["x-request-id"] == "mine-1"
        assert made.headers["x-request-id"] not in ("", "no\tplain one")
        lines = [json.loads(line[line.index("{"):]) for line in server.log.read_text().splitlines()
                 if "brainpatch.access" in line]  # fmt: skip
        (mine,) = [line for line in lines if line["request"] == "mine-1"]
        assert (mine["status"], mine["digest"], mine["whole"]) == (200, digest({"sea": 1}), True)

    def test_null_is_left_out(self, server):
        names = [
            *("temperature", "top_p", "n", "stop", "seed", "max_completion_tokens", "presence_penalty"),
            *("frequency_penalty", "logprobs", "top_logprobs", "stream", "stream_options", "response_format"),
            *("tools", "tool_choice", "logit_bias", "user", "brainpatch"),
        ]
        body = {"model": self.model, "messages": QUESTION, **dict.fromkeys(names), "max_tokens": 4}
        answer = server.http().post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text

    def test_errors_have_openais_shape_and_name_what_is_near(self, server):
        client = server.client()
        with pytest.raises(openai.NotFoundError) as missing:
            ask(client, f"{self.model}+see")
        assert missing.value.code == "BP401"
        assert "near it: sea" in str(missing.value)
        with pytest.raises(openai.NotFoundError) as nobody:
            ask(client, "smoll")
        assert nobody.value.code == "BP702"
        assert self.model in str(nobody.value)
        with pytest.raises(openai.BadRequestError) as twice:
            ask(client, f"{self.model}+sea", {"sea": 1})
        assert twice.value.code == "BP403"

    def test_malformed_bodies_are_refused_in_openais_shape(self, server):
        good = {"model": self.model, "messages": QUESTION, "max_tokens": 1}
        bodies: list[tuple[Any, bytes]] = [(None, body) for body in BODIES]
        for field in FIELDS:
            text_of = json.dumps({**good, **field}).replace("M+", f"{self.model}+")
            bodies.append((field, text_of.encode()))
        assert len(bodies) >= 60
        wrong = []
        with server.http() as http:
            for field, body in bodies:
                headers = {"Content-Type": "application/json"}
                answer = http.post("/v1/chat/completions", content=body, headers=headers)
                if answer.status_code == 200 and field in self.engine_takes:
                    continue
                said = answer.json().get("error", {}).get("message", "Traceback")
                if answer.status_code not in (400, 404) or "Traceback" in said:
                    wrong.append((body[:200], answer.status_code, answer.text[:300]))
        assert not wrong
        assert text(ask(server.client(), self.model)) != ""

    def test_keys(self, server):
        with pytest.raises(openai.AuthenticationError):
            ask(server.client("wrong"), self.model)
        with server.http(None) as http:
            for path in ("/v1/models", "/brainpatch/patches", "/brainpatch/patches/sea"):
                answer = http.get(path)
                assert (answer.status_code, answer.json()["error"]["type"]) == (
                    401,
                    "authentication_error",
                ), path
            assert http.post("/v1/chat/completions", json={}).status_code == 401
            assert http.get("/health").status_code == 200
        for key in (None, USER, "wrong"):
            with server.http(key) as http:
                assert http.post("/brainpatch/patches", content=b"x").status_code == 401
                assert http.patch("/brainpatch/patches/sea", json={"strength": 2}).status_code == 401
                assert http.delete("/brainpatch/patches/sea").status_code == 401
        with server.http() as http:
            listed = http.get("/brainpatch/patches").json()["data"]
            assert [one["name"] for one in listed] == ["sea", "deep", "late"]
            assert http.get("/brainpatch/patches/..%2f..%2fetc%2fpasswd").status_code == 404
            assert http.get("/brainpatch/patches/nobody").json()["error"]["code"] == "BP401"

    def test_patches_change_while_it_runs(self, server, tmp_path):
        client, name = server.client(), "extra"
        patch = steering(name, norm=50.0)
        file = save_patch(patch.manifest, patch.vectors, tmp_path / "x.brainpatch").read_bytes()
        with server.http(ADMIN) as admin:
            made = admin.post("/brainpatch/patches", content=file, params={"strength": 0.5})
            assert made.status_code == 201, made.text
            assert (made.json()["strength"], made.json()["enabled"]) == (0.5, False)
            assert admin.post("/brainpatch/patches", content=file).status_code == 409
            half = ask(client, f"{self.model}+{name}")
            assert echo(half.choices[0])["patches"] == {name: 0.5}
            form = {"file": ("x.brainpatch", file)}
            again = admin.post("/brainpatch/patches", files=form, params={"overwrite": True})
            assert (again.status_code, again.json()["strength"]) == (201, 1.0)
            full = text(ask(client, f"{self.model}+{name}"))
            assert full != text(half)
            refused = admin.patch(f"/brainpatch/patches/{name}", json={"strength": 2, "enabled": "x"})
            assert refused.status_code == 400
            changed = admin.patch(f"/brainpatch/patches/{name}", json={"strength": 2, "enabled": True,
                                                                       "schedule": {"0": 1, "2": 0}})  # fmt: skip
            assert changed.json()["schedule"]["keyframes"] == {"0": 1.0, "2": 0.0}
            default = ask(client, self.model)
            assert echo(default.choices[0])["patches"][name]["strength"] == 2.0
            assert text(default) == text(ask(client, f"{self.model}+{name}"))
            assert text(ask(client, f"{self.model}+")) != text(default)
            for bad in (b"", b"junk", file[:-10], b"PK\x03\x04" + b"\0" * 100):
                assert admin.post("/brainpatch/patches", content=bad).status_code == 400
            assert admin.post("/brainpatch/patches", content=b"\0" * (65 << 20)).status_code == 413
            assert admin.delete(f"/brainpatch/patches/{name}").status_code == 200
            assert admin.delete(f"/brainpatch/patches/{name}").status_code == 404
        assert text(ask(client, self.model)) == text(ask(client, f"{self.model}+"))
        log = server.log.read_text()
        assert '"action": "install", "patch": "extra"' in log
        assert ADMIN not in log
        assert "How was your day" not in log

    def test_activations_that_are_no_numbers_are_an_error_and_no_text(self, server, tmp_path):
        patch = steering("huge", (10, 12, 14), norm=3e38, coefficient=7.0)
        file = save_patch(patch.manifest, patch.vectors, tmp_path / "huge.brainpatch").read_bytes()
        client = server.client()
        with server.http(ADMIN) as admin:
            assert admin.post("/brainpatch/patches", content=file).status_code == 201
            before = text(ask(client, f"{self.model}+sea"))
            with pytest.raises(openai.BadRequestError) as whole:
                ask(client, f"{self.model}+huge")
            assert whole.value.code == "BP509"
            with pytest.raises(openai.APIError) as streamed:
                list(ask(client, f"{self.model}+huge", stream=True))
            assert streamed.value.code == "BP509"
            assert text(ask(client, f"{self.model}+sea")) == before
            admin.delete("/brainpatch/patches/huge")

    def test_a_client_that_goes_away_ends_the_work(self, server):
        client = server.client()
        stream = ask(
            client, f"{self.model}+sea", stream=True, max_tokens=400, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.7).chat.completions.create(
                model=self.model, messages=QUESTION, max_tokens=400, extra_body={"ignore_eos": True}
            )
        deadline = time.monotonic() + 20
        while "brainpatch_requests_in_work 0.0" not in (found := server.http().get("/metrics").text):
            assert time.monotonic() < deadline, found
            time.sleep(0.2)

    def test_metrics_by_patch(self, server):
        ask(server.client(), f"{self.model}+sea")
        found = server.http().get("/metrics").text
        assert 'brainpatch_requests_total{patch="sea"}' in found
        assert 'brainpatch_tokens_total{kind="completion",patch="sea"}' in found
        assert "brainpatch_refused_total" in found

    def test_langchain_picks_a_patch_by_model_name(self, server):
        from langchain_openai import ChatOpenAI

        found = {}
        for rest in ("", "+sea"):
            chat = ChatOpenAI(
                model=f"{self.model}{rest}",
                base_url=f"{server.url}/v1",
                api_key=USER,
                temperature=0,
                max_tokens=12,
            )
            found[rest] = str(chat.invoke("How was your day?").content)
            assert "".join(str(piece.content) for piece in chat.stream("How was your day?")) == found[rest]
            assert found[rest] == text(ask(server.client(), f"{self.model}{rest}"))
        assert found[""] != found["+sea"]

    def test_a_command_line_client_picks_a_patch_by_model_name(self, server, tmp_path):
        models = [
            f"- model_id: {name}\n  model_name: {self.model}{rest}\n  api_base: {server.url}/v1\n  api_key_name: k\n"
            for name, rest in (("plain", ""), ("patched", "+sea"))
        ]
        (tmp_path / "extra-openai-models.yaml").write_text("".join(models))
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
        said = {}
        for name in ("plain", "patched"):
            command = [
                sys.executable,
                "-m",
                "llm",
                "-m",
                name,
                "-o",
                "temperature",
                "0",
                "-o",
                "max_tokens",
                "12",
            ]
            done = subprocess.run(
                [*command, "--key", USER, "How was your day?"],
                env=environment, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            said[name] = done.stdout.strip()
        assert said["plain"] == text(ask(server.client(), self.model)).strip()
        assert said["patched"] == text(ask(server.client(), f"{self.model}+sea")).strip()
