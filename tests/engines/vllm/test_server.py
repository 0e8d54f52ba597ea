"""vLLM's own server with patches in it, over a real socket."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time

import httpx
import openai
import psutil
import pytest

from brainpatch.backends.vllm_backend import VLLMBackend
from brainpatch.runtime import GenerationConfig
from tests.engines.vllm.material import ARGUMENTS, MODEL_ID, QUESTIONS
from tests.server.contract import (
    ADMIN,
    USER,
    Contract,
    Server,
    ask,
    check_drained,
    digest,
    echo,
    free_port,
    patches,
    start,
    text,
    under_load,
    wait_until_healthy,
)

pytestmark = [pytest.mark.vllm, pytest.mark.model]


TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="module")
def server(slot, model_folder, tmp_path_factory):
    slot.release()  # two engines never live at once
    folder = tmp_path_factory.mktemp("server")
    running = start(folder, model_folder, ["--backend", "vllm"], ["--max-model-len", "1024", *TOOLS])
    yield running
    assert running.stop() == 0, running.log.read_text()[-3000:]


class TestVLLM(Contract):
    engine_takes = ({"messages": [{"role": "user"}]},)
    engine_does = frozenset(("response_format", "logit_bias", "tool", "logprobs"))


@pytest.fixture
def started(slot, model_folder, tmp_path):
    """A server for one test, which may end it."""
    slot.release()
    server = start(tmp_path, model_folder, ["--backend", "vllm"], ["--max-model-len", "1024"])
    yield server
    if server.process.poll() is None:
        server.stop()


@pytest.mark.slow
def test_a_server_that_is_told_to_stop_finishes_what_runs(started):
    check_drained(*under_load(started, "smol"))


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_server_and_no_request_hangs(started):
    failed = []

    def long():
        try:
            failed.append(ask(started.client(), "smol+sea", max_tokens=600, extra_body={"ignore_eos": True}))
        except openai.OpenAIError as error:
            failed.append(error)

    thread = threading.Thread(target=long)
    thread.start()
    time.sleep(2)
    children = psutil.Process(started.process.pid).children(recursive=True)
    (worker,) = [one for one in children if "Worker" in one.name() or "Worker" in " ".join(one.cmdline())]
    os.kill(worker.pid, signal.SIGKILL)
    thread.join(90)
    assert not thread.is_alive()
    assert isinstance(failed[0], openai.OpenAIError), failed
    assert started.process.wait(90) is not None


@pytest.mark.slow
def test_an_own_vllm_command_with_one_line_more(slot, model_folder, tmp_path):
    """The same contract for people who already run vLLM; patches come from the environment."""
    from brainpatch import save_patch

    slot.release()
    files = [str(save_patch(one.manifest, one.vectors, tmp_path / name)) for name, one in patches().items()]
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_folder)]
    command += ["--served-model-name", "smol", "--port", str(port), "--api-key", USER, "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "1024"]
    command += ["--worker-cls", "brainpatch.backends.vllm_worker.BrainPatchWorker"]
    command += ["--middleware", "brainpatch.server.vllm_front.BrainPatchMiddleware"]
    own = {
        "BRAINPATCH_PATCHES": " ".join(files),
        "BRAINPATCH_DEFAULT_OFF": "1",
        "BRAINPATCH_MODEL_ID": MODEL_ID,
    }
    log = tmp_path / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **own})
    server = wait_until_healthy(Server(f"http://127.0.0.1:{port}", process, log))
    try:
        plain, patched = ask(server.client(), "smol"), ask(server.client(), "smol+sea")
        assert text(plain) != text(patched)
        assert echo(patched.choices[0]) == {"patches": {"sea": 1.0}, "digest": digest({"sea": 1})}
        assert server.http().post("/brainpatch/patches", content=b"x").status_code == 404
    finally:
        server.stop()


@pytest.mark.slow
def test_a_patch_that_does_not_fit_ends_an_own_vllm_command(slot, model_folder, tmp_path):
    slot.release()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_folder)]
    command += ["--port", str(free_port()), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--worker-cls", "brainpatch.backends.vllm_worker.BrainPatchWorker"]
    command += ["--middleware", "brainpatch.server.vllm_front.BrainPatchMiddleware"]
    environment = {**os.environ, "BRAINPATCH_PATCHES": str(tmp_path / "nothing.brainpatch")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "BP302" in done.stderr + done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_change_reaches_every_replica(slot, model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    slot.release()
    more = ["--max-model-len", "512", "--data-parallel-size", "2"]
    server = start(tmp_path, model_folder, ["--backend", "vllm"], more)
    try:
        with server.http(ADMIN) as admin:
            assert admin.patch("/brainpatch/patches/sea", json={"enabled": True}).status_code == 200
        wanted = text(ask(server.client(), "smol+sea"))
        found: list[str] = []
        threads = [
            threading.Thread(target=lambda: found.append(text(ask(server.client(), "smol"))))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [wanted] * 8
        assert text(ask(server.client(), "smol+")) != wanted
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_clients_with_many_patches_get_what_the_engine_gives(slot, model_folder, tmp_path, capsys):
    """64 clients, 1000 requests, 12 configurations by field and by name beside plain ones, some of them abandoned."""
    wishes = [
        {},
        *({name: x} for name in patches() for x in (1.0, 0.5, -1.0)),
        {"sea": 0.5, "late": 1.0},
        {"deep": 2.0},
    ]
    slot.release()
    with VLLMBackend() as backend:
        backend.load_model(model_folder, model_id=MODEL_ID, **ARGUMENTS)
        for patch in patches().values():
            backend.install_patch(patch, enabled=False)
        config = GenerationConfig(max_new_tokens=8)
        prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
        pairs = [(p, w) for p in range(len(prompts)) for w in range(len(wishes))]
        answers = backend.generate_detailed(
            [prompts[p] for p, _ in pairs], config, patches=[wishes[w] for _, w in pairs]
        )
        wanted = {pair: (one.text, one.digest) for pair, one in zip(pairs, answers, strict=True)}
    server = start(tmp_path, model_folder, ["--backend", "vllm"], ["--max-model-len", "1024"])
    wrong, done, abandoned = [], [], []
    todo: list[int] = []
    process = psutil.Process(server.process.pid)

    def memory():
        return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])

    def client(number):
        turn = random.Random(number)
        with httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {USER}"}, timeout=600
        ) as http:
            while todo:
                try:
                    todo.pop()
                except IndexError:
                    return
                p, w = turn.choice(pairs)
                body = {"messages": prompts[p], "max_tokens": 8, "temperature": 0, "model": "smol"}
                if turn.random() < 0.5:
                    body["brainpatch"] = wishes[w]
                else:
                    body["model"] += "+" + "+".join(f"{name}@{x}" for name, x in wishes[w].items())
                if turn.random() < 0.05:
                    with http.stream(
                        "POST", "/v1/chat/completions", json={**body, "stream": True, "max_tokens": 99}
                    ):
                        abandoned.append(number)
                    continue
                started = time.monotonic()
                answer = http.post("/v1/chat/completions", json=body)
                done.append(time.monotonic() - started)
                if answer.status_code != 200:
                    wrong.append((answer.status_code, answer.text[:200]))
                    continue
                choice = answer.json()["choices"][0]
                got = choice["message"]["content"], choice["brainpatch"]["digest"]
                if got != wanted[p, w]:
                    wrong.append((p, w, got, wanted[p, w]))

    try:
        used = []
        for part in range(2):  # in the first half, pages of the KV cache are touched for the first time
            todo += range(500)
            threads = [threading.Thread(target=client, args=(64 * part + number,)) for number in range(64)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            used.append(memory())
    finally:
        assert server.stop() == 0
    done.sort()
    with capsys.disabled():
        print(f"\nserver: {len(done)} answered, {len(abandoned)} abandoned, p50 {done[len(done) // 2]:.2f} s, "
              f"p95 {done[len(done) * 95 // 100]:.2f} s, memory {used[1] / used[0]:.3f}")  # fmt: skip
    assert not wrong
    assert abandoned
    assert used[1] < 1.05 * used[0]
