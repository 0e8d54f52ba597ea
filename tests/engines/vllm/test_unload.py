"""An engine begins, fails and ends without leaving anything behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import psutil
import pytest

from brainpatch.backends import vllm_engine
from brainpatch.backends.vllm_backend import VLLMBackend
from brainpatch.errors import CapabilityError, EngineError, EngineStateError
from tests.engines.vllm.material import ARGUMENTS, steering

pytestmark = [pytest.mark.vllm, pytest.mark.model]


def engine_processes():
    """Processes below this one that are not Python's resource tracker."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize(
    "arguments",
    [{"worker_cls": "a.B"}, {"device": "cuda"}],
)
def test_arguments_that_patches_cannot_live_with_are_refused_before_any_cost(arguments):
    with pytest.raises(CapabilityError) as caught:
        VLLMBackend().load_model("/nowhere", **arguments)
    assert caught.value.code == "BP502"
    assert next(iter(arguments)) in caught.value.reason


def test_nothing_loaded_is_an_error_with_a_code():
    backend = VLLMBackend()
    for call in (
        backend.describe_model,
        backend.worker_state,
        backend.begin_serving,
        lambda: backend.generate("x"),
        lambda: backend.install_patch(steering("p")),
    ):
        with pytest.raises(EngineStateError, match="BP407"):
            call()
    backend.unload()
    backend.unload()


def test_a_failed_load_leaves_nothing_running(free_slot, model_folder, tmp_path):
    before = engine_processes()
    with pytest.raises(EngineError, match="BP507"):
        VLLMBackend().load_model(tmp_path / "missing")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, tmp_path / name)
    backend = VLLMBackend()
    with pytest.raises(EngineError, match="BP507"):  # no weights: found out in the engine's process
        backend.load_model(tmp_path, **ARGUMENTS)
    with pytest.raises(EngineStateError, match="BP407"):
        backend.generate("x")
    with pytest.raises(EngineError, match="BP507"):
        backend.load_model(model_folder, colour="red")
    assert engine_processes() == before


def test_unload_frees_the_processes_and_what_was_installed(free_slot, slot, chats):
    before = engine_processes()
    backend = slot.engine()
    started = [process for process in engine_processes() if process not in before]
    assert started
    backend.install_patch(steering("p"))
    backend.unload()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
    assert backend.list_patches() == []
    with pytest.raises(EngineStateError, match="BP407"):
        backend.generate(chats[0])
    backend.unload()
    slot.release()


def test_the_context_is_capped_and_stdout_stays_the_callers(free_slot, model_folder):
    """In a process of its own, with vLLM's log at its most talkative."""
    program = f"""
import json
from brainpatch.backends.vllm_backend import VLLMBackend
from brainpatch.runtime import GenerationConfig
if __name__ == "__main__":
    with VLLMBackend() as backend:
        backend.load_model({str(model_folder)!r}, dtype="float32", max_model_len=100000)
        model = backend.describe_model()
        text = backend.generate("Say hello.", GenerationConfig(max_new_tokens=3))
        print(json.dumps([backend._context, model.model_id, model.architecture, text]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    context, model_id, architecture, text = json.loads(done.stdout)
    assert context == json.loads((model_folder / "config.json").read_text())["max_position_embeddings"]
    assert (model_id, architecture) == (str(model_folder), "LlamaForCausalLM")
    assert text


def test_memory_for_the_cache_on_a_cpu_is_bounded(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    (chosen,) = vllm_engine.cache_arguments({}).values()
    assert 1 << 30 <= chosen <= 4 << 30
    assert vllm_engine.cache_arguments({"kv_cache_memory_bytes": 5}) == {}
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert vllm_engine.cache_arguments({}) == {}
