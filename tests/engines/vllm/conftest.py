"""One real engine for all tests, and answers of plain vLLM and of Transformers recorded before it starts.

Two engines never live at once: the references run in processes of their own that end first, and tests
that load another engine take the `slot` and release the shared one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brainpatch.backends.vllm_backend import VLLMBackend
from tests.engines.vllm.material import ARGUMENTS, EDITED, HERE, MODEL_ID, QUESTIONS, edits_of, steering


@pytest.fixture(scope="session", autouse=True)
def _small_cache() -> Iterator[None]:
    """One GiB for the KV cache, and a quiet log; inherited by every engine process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        yield


def alone(script: str, question: dict[str, Any], answer: Path) -> Path:
    """Run one of the reference scripts in a process of its own."""
    asked = answer.with_suffix(".question.json")
    asked.write_text(json.dumps(question))
    done = subprocess.run(
        [sys.executable, str(HERE / script), str(asked), str(answer)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return answer


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="session")
def chats(tokenizer: Any) -> list[list[int]]:
    """The questions as token ids, chat template included."""
    return [
        [
            int(token)
            for token in tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
        ]
        for question in QUESTIONS
    ]


@pytest.fixture(scope="session")
def long_prompt(tokenizer: Any) -> list[int]:
    """300 tokens."""
    text = "The train left the city at noon and went along the river, past the old mill and the garden. " * 20
    return [int(token) for token in tokenizer(text)["input_ids"]][:300]


@pytest.fixture(scope="session")
def plain(
    model_folder: Path, chats: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Answers of a plain vllm.LLM: 24 greedy tokens with 5 logprobs; all logprobs of the first."""
    question = {
        "model": str(model_folder),
        "arguments": ARGUMENTS,
        "prompts": chats,
        "parameters": {"temperature": 0.0, "max_tokens": 24, "logprobs": 5},
        "full": chats[:2],
    }
    file = alone("plain_vllm.py", question, tmp_path_factory.mktemp("plain") / "plain.json")
    answers: dict[str, Any] = json.loads(file.read_text())
    return answers


@pytest.fixture(scope="session")
def reference(
    model_folder: Path, chats: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Transformers with the patches of EDITED: arrays by (name, number of the question)."""
    runs = [
        {"ids": ids, "new": 24 if name == "three" else 2, "edits": edits_of(steering(name, layers))}
        for name, layers in EDITED.items()
        for ids in (chats if name == "three" else chats[:2])
    ]
    question = {"model": str(model_folder), "blocks": "model.layers", "runs": runs}
    arrays = np.load(alone("plain_transformers.py", question, tmp_path_factory.mktemp("hf") / "hf.npz"))
    keys = [(name, i) for name in EDITED for i in range(len(chats) if name == "three" else 2)]
    return {
        key: {what: arrays[f"{what}_{number}"] for what in ("logits", "tokens", "gap")}
        for number, key in enumerate(keys)
    }


class Slot:
    """Holds the shared engine, and loads it again for whoever needs it after a release."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._backend: VLLMBackend | None = None

    def engine(self) -> VLLMBackend:
        if self._backend is None:
            self._backend = VLLMBackend()
            self._backend.load_model(self._folder, model_id=MODEL_ID, **ARGUMENTS)
        return self._backend

    def release(self) -> None:
        if self._backend is not None:
            self._backend.unload()
            self._backend = None


@pytest.fixture(scope="session")
def slot(model_folder: Path, plain: Any, reference: Any) -> Iterator[Slot]:
    held = Slot(model_folder)
    yield held
    held.release()


@pytest.fixture
def backend(slot: Slot) -> Iterator[VLLMBackend]:
    """The shared engine with nothing installed."""
    engine = slot.engine()
    yield engine
    engine.end_serving()
    for name in engine.list_patches():
        engine.remove_patch(name)


@pytest.fixture
def free_slot(slot: Slot) -> Slot:
    """For tests that start an engine of their own: the shared one is down."""
    slot.release()
    return slot
