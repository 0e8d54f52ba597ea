"""Big offline work: a Ray Data pipeline over several engine replicas, each row with its own patches.

    import ray
    from brainpatch.backends.ray_data import generate

    rows = ray.data.read_json("prompts.jsonl", lines=True)  # columns prompt, patches
    generate(rows, "HuggingFaceTB/SmolLM2-135M-Instruct", ["formal.brainpatch"], replicas=4).write_parquet("out")

Ray is imported by whoever made the dataset, not here. Patch files are read once, where the pipeline is built, and
travel as bytes; each replica checks them again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from brainpatch.errors import BrainPatchError, EngineError, EngineStateError, RequestError
from brainpatch.patch.file import load_patch_bytes, read_patch_file
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.requests import Prompt

_ANSWER = ("text", "token_ids", "finish_reason", "digest", "error")


def generate(
    dataset: Any,
    model: str,
    patches: Iterable[str | os.PathLike[str]],
    *,
    replicas: int = 1,
    config: GenerationConfig | None = None,
    batch_size: int = 64,
    prompt_column: str = "prompt",
    patches_column: str = "patches",
    use_chat_template: bool = True,
    load: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The dataset (a `ray.data.Dataset`) with answers, computed by `replicas` vLLM engines.

    `prompt_column` holds texts, message lists or token ids. `patches_column` says what a request's `patches` says:
    a mapping of installed names to strengths, or the same as JSON text; nothing means no patch. Rows get the columns
    `text`, `token_ids`, `finish_reason`, `digest` and `error`: a row that is refused has a code and a reason there
    and no text, and hurts no other. `load` goes to `VLLMBackend.load_model`, `options` (`num_gpus`, `num_cpus`,
    `ray_remote_args`, ...) to `Dataset.map_batches`.

    Errors: PatchLoadError and PatchFormatError for a patch file, RequestError (BP404) for the config, before
    anything is started.
    """
    config = config or GenerationConfig()
    config.validate()
    if config.n != 1:
        raise RequestError("BP404", f"n is {config.n}; a row has one answer")
    files = [read_patch_file(path) for path in patches]
    for data in files:
        load_patch_bytes(data)
    return dataset.map_batches(
        Replica,
        fn_constructor_kwargs={
            "model": model,
            "patches": files,
            "config": config.to_dict(),
            "columns": (prompt_column, patches_column),
            "use_chat_template": use_chat_template,
            "load": dict(load or {}),
        },
        batch_size=batch_size,
        concurrency=replicas,
        **options,
    )


class Replica:
    """One engine with its patches, for `Dataset.map_batches`. Owned by one Ray actor."""

    def __init__(
        self,
        model: str,
        patches: Sequence[bytes],
        config: Mapping[str, Any],
        columns: tuple[str, str],
        use_chat_template: bool,
        load: Mapping[str, Any],
    ) -> None:
        from brainpatch.backends.vllm_backend import VLLMBackend

        self._config = GenerationConfig(**config)
        self._prompts, self._patches = columns
        self._use_chat_template = use_chat_template
        self._backend = VLLMBackend()
        self._backend.load_model(model, **load)
        for data in patches:
            self._backend.install_patch(load_patch_bytes(data), enabled=False)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch (columns of equal length) with the answers' columns."""
        prompts = batch[self._prompts]
        wishes = batch.get(self._patches, [None] * len(prompts))
        # A thread a row: vLLM runs what they ask in one batch, and a row that is refused is refused alone.
        with ThreadPoolExecutor(max(1, len(prompts))) as threads:
            answers = list(threads.map(self._answer, prompts, wishes))
        return {**batch, **{name: [answer[name] for answer in answers] for name in _ANSWER}}

    def _answer(self, prompt: Any, wish: Any) -> dict[str, Any]:
        found: dict[str, Any] = {**dict.fromkeys(_ANSWER, ""), "token_ids": []}
        try:
            (answer,) = self._backend.generate_detailed(
                [_prompt(prompt)],
                self._config,
                patches=_wish(wish),
                use_chat_template=self._use_chat_template,
            )
        except BrainPatchError as error:
            if isinstance(error, (EngineError, EngineStateError)):
                self._backend.worker_state()  # raises where the engine is gone; Ray then starts another replica
            return {**found, "error": f"{error.code} {error.reason}"}
        return {name: getattr(answer, name, "") for name in _ANSWER}


def _prompt(value: Any) -> Prompt:
    """A prompt as a dataset holds it: arrays are lists there."""
    plain: Prompt = value.tolist() if isinstance(value, np.ndarray) else value
    return plain


def _wish(value: Any) -> dict[str, Any]:
    """A row's patches. Columns of mappings have every row's keys, with None where a row did not have one."""
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        return {}  # NaN is how some readers say that there is none
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RequestError("BP402", f"the patches of the row are no JSON: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError("BP402", f"the patches of the row are a {type(value).__name__}, and no mapping")
    return {name: _without_none(wish) for name, wish in value.items() if wish is not None}


def _without_none(wish: Any) -> Any:
    if isinstance(wish, Mapping):
        return {key: _without_none(item) for key, item in wish.items() if item is not None}
    return wish
