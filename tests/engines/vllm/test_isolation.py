"""Law 4 under pressure: what a request gets is what it gets alone, whatever runs beside and before it.

Random requests of many configurations share one engine whose batches are small and whose KV cache is too
small for them, so that prompts are computed in chunks, blocks are shared and requests are preempted, while
others come and are aborted. The engine's own noise, the same work without patches, is measured beside.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from brainpatch.backends.vllm_backend import VLLMBackend
from brainpatch.runtime import GenerationConfig
from tests.engines.vllm.material import MODEL_ID, RUNNER, steering

pytestmark = [pytest.mark.vllm, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(2400)]

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 24,
    "num_gpu_blocks_override": 36,
    "block_size": 32,
    # Prompts are let in before there is room for all of them, so that requests are preempted.
    "scheduler_reserve_full_isl": False,
    "disable_log_stats": False,
}
SCHEDULES = (None, {"0": 1, "3": 0}, {"0": 0, "2": 1.5}, {"keyframes": {"0": 0, "8": 1}, "interpolate": True})


def configurations(backend: VLLMBackend, turn: random.Random) -> list[dict[str, Any]]:
    """40 different ones, of five patches."""
    patches = [
        steering("one", (15,)),
        steering("many", tuple(range(2, 28, 5)), norm=6.0),
        steering("prompt", (9,), site="prompt"),
        steering("late", (20, 29), site="continuation"),
        steering("stepped", (12,)),
    ]
    for patch in patches:
        backend.install_patch(patch, enabled=False)
    found: list[dict[str, Any]] = [{}]
    while len(found) < 40:
        chosen = turn.sample(patches, turn.randint(1, 3))
        wish = {
            patch.name: {"strength": round(turn.uniform(-1, 1), 2), "schedule": turn.choice(SCHEDULES)}
            for patch in chosen
        }
        if wish not in found:
            found.append(wish)
    return found


def work(turn: random.Random, count: int, words: list[int]) -> tuple[list[list[int]], list[GenerationConfig]]:
    """Prompts of 1 to 700 tokens, of which some begin alike, and what is asked of them."""
    prompts, configs = [], []
    for _ in range(count):
        length = turn.choice([1, 3, 17, 60, 130, 260, turn.randint(300, 700)])
        start = turn.choice([0, 0, 0, 40, 90])
        prompts.append([words[(start + i) % len(words)] for i in range(length)])
        drawn = {"temperature": 0.8, "seed": turn.randint(1, 999)} if turn.random() < 0.3 else {}
        configs.append(
            GenerationConfig(
                max_new_tokens=turn.randint(2, 14),
                logprobs=3,
                ignore_eos=True,
                n=turn.choice([1, 1, 1, 3]) if drawn else 1,
                **drawn,
            )
        )
    return prompts, configs


def distance(one: Any, other: Any) -> float:
    """The largest difference of log-probabilities over the tokens that both list, as far as both agree."""
    worst = 0.0
    for a, b, x, y in zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True):
        shared = sorted(set(x) & set(y))
        worst = max(worst, float(np.abs([x[t] - y[t] for t in shared]).max(initial=0.0)))
        if a != b:
            break
    return worst


class Aborting:
    """While it is open, patched requests are handed in beside the others, and aborted a little later."""

    def __init__(self, backend: VLLMBackend, wishes: list[dict[str, Any]], prompt: list[int]) -> None:
        self._backend, self._wishes, self._prompt = backend, wishes, prompt
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.aborted = 0

    def __enter__(self) -> Aborting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        config = GenerationConfig(max_new_tokens=200, ignore_eos=True)
        while not self._stop.wait(0.3):
            wish = self._wishes[self.aborted % len(self._wishes)]
            stream = self._backend.stream(self._prompt[: 40 + self.aborted % 60], config, patches=wish)
            next(stream)
            stream.close()
            self.aborted += 1


def pressed(backend: VLLMBackend, count: int, words: list[int]) -> dict[str, Any]:
    """Run the work together and alone; say how far the two are apart, with patches and without."""
    turn = random.Random(7)
    known = configurations(backend, turn)
    wishes = [turn.choice(known) for _ in range(count)]
    prompts, configs = work(turn, count, words)
    report: dict[str, Any] = {"requests": count}
    for name, asked in (("plain", [{}] * count), ("patched", wishes)):
        backend._driver.reset_cache()
        with Aborting(backend, known if name == "patched" else [{}], words) as beside:
            together = backend.generate_detailed(prompts, configs, patches=asked)
        alone = []
        for prompt, config, wish in zip(prompts, configs, asked, strict=True):
            backend._driver.reset_cache()
            alone += backend.generate_detailed([prompt], config, patches=wish)
        pairs = list(zip(together, alone, strict=True))  # of all answers, which `n` makes more than requests
        report[name] = max(distance(a, b) for a, b in pairs)
        report[f"{name} differ"] = sum(a.token_ids != b.token_ids for a, b in pairs)
        report[f"{name} cached"] = sum(one.cached_tokens for one in together)
        report[f"{name} aborted"] = beside.aborted
    metrics = backend._driver.call(backend._engine.llm.get_metrics)
    report["preemptions"] = sum(one.value for one in metrics if one.name == "vllm:num_preemptions")
    report["state"] = backend.worker_state()[0]
    return report


def check(report: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print("\nisolation:", {key: value for key, value in report.items() if key != "state"})
    assert report["preemptions"] > 0
    assert report["patched cached"] > 0
    # No more than the engine's own noise, which batch shapes and chunks make.
    assert report["patched"] <= max(1e-5, 3 * report["plain"])
    assert report["patched differ"] <= report["plain differ"]
    assert min(report["plain aborted"], report["patched aborted"]) > 0
    state = report["state"]
    assert (state["live_requests"], state["live_vectors"], state["blocks_missed"]) == (0, 0, 0)


def test_requests_under_pressure_get_what_they_get_alone(free_slot, model_folder, long_prompt, capsys):
    with VLLMBackend() as backend:
        backend.load_model(model_folder, model_id=MODEL_ID, enforce_eager=True, **SMALL)
        count = 200 if RUNNER == "V1" else 24  # the second one's kernels are interpreted
        report = pressed(backend, count, long_prompt)
        assert report["state"]["runner"] == RUNNER
        check(report, capsys)


@pytest.mark.skipif(RUNNER == "V2", reason="compiled engines are tested with the first runner")
def test_requests_under_pressure_in_a_compiled_engine(free_slot, model_folder, long_prompt, capsys):
    with VLLMBackend() as backend:
        backend.load_model(model_folder, model_id=MODEL_ID, enforce_eager=False, **SMALL)
        report = pressed(backend, 200, long_prompt)
        assert report["state"]["compiled"]
        check(report, capsys)
