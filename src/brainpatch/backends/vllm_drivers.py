"""Who steps a vLLM engine: requests go in from any thread, outputs come back to whoever asked.

- `LLMDriver`: vLLM's `LLM` may be used by one thread at a time. A thread of the driver's owns it: it takes
  commands from a queue, steps the engine while there is work, and hands each output to its request's sink.
  No lock is held over generation, and requests of different threads share one batch.
- `AsyncDriver`: an `AsyncLLM` belongs to the event loop that it was made in; the driver only hands over.

A sink is called with RequestOutputs, the last one `finished`, or with an exception, after which nothing comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from brainpatch.errors import BrainPatchError, CapabilityError, EngineError, EngineStateError, RequestError

Sink = Callable[[Any], None]
_T = TypeVar("_T")

_numbers = itertools.count()


class Driver(Protocol):
    """What the backend needs of an engine."""

    def submit(self, prompt: Any, parameters: Any, sink: Sink) -> str:
        """Hand in a request; returns its id. `prompt` is what vLLM calls TokensInput."""

    def abort(self, requests: Sequence[str]) -> None:
        """Stop requests; their sinks hear nothing more that matters."""

    def rpc(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Call a worker method by name; one result a rank. EngineError with the code that a worker reports."""

    async def rpc_async(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """As `rpc`, on an event loop, which goes on meanwhile."""

    def check_thread(self) -> None:
        """EngineStateError (BP409) when the caller may not wait for the engine where it stands."""

    def close(self) -> None:
        """Take no more work. The engine itself is not ended."""


class LLMDriver:
    """Drives a `vllm.LLM` from a thread of its own."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}  # touched by the thread alone
        self._failed: BaseException | None = None
        self._closed = False
        self._gate = threading.Lock()  # nothing is queued after the last command was taken
        self._thread = threading.Thread(target=self._drive, name="brainpatch-vllm", daemon=True)
        self._thread.start()

    def submit(self, prompt: Any, parameters: Any, sink: Sink) -> str:
        """See `Driver`."""
        request = f"brainpatch-{next(_numbers)}"

        def add() -> None:
            self._sinks[request] = sink
            if self._failed is not None:
                self._tell(request, self._failed)
                return
            try:
                self._llm.llm_engine.add_request(request, prompt, parameters)
            except Exception as error:
                self._tell(request, error)

        self._put(add)
        return request

    def _put(self, command: Callable[[], None] | None) -> None:
        with self._gate:
            if self._closed:
                raise EngineStateError("BP407", "the engine is closed")
            self._commands.put(command)

    def abort(self, requests: Sequence[str]) -> None:
        """See `Driver`."""
        named = list(requests)

        def drop() -> None:
            self._drop([request for request in named if self._sinks.pop(request, None) is not None])

        with contextlib.suppress(EngineStateError):
            self._put(drop)

    def _drop(self, live: list[str]) -> None:
        if live:
            with contextlib.suppress(Exception):  # a dead engine has nothing left to drop
                self._llm.llm_engine.abort_request(live)

    def call(self, function: Callable[[], _T]) -> _T:
        """Run `function` on the thread that owns the engine, between two steps, and return its result."""
        done: Future[_T] = Future()

        def run() -> None:
            try:
                if self._closed:
                    raise EngineStateError("BP407", "the engine is closed")
                done.set_result(function())
            except BaseException as error:  # it belongs to the caller's thread
                done.set_exception(error)

        self._put(run)
        return done.result()

    def rpc(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """See `Driver`."""
        return _judged(lambda: self.call(lambda: self._llm.collective_rpc(method, args=arguments)), method)

    async def rpc_async(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """See `Driver`."""
        return await asyncio.to_thread(self.rpc, method, *arguments)

    def check_thread(self) -> None:
        """See `Driver`. The engine's thread is the driver's own: everybody else may wait for it."""

    def reset_cache(self) -> None:
        """Forget the prefix cache. EngineError (BP508) when vLLM refuses."""
        if not self.call(self._llm.reset_prefix_cache):
            raise EngineError("BP508", "vLLM did not reset its prefix cache")

    def close(self) -> None:
        """See `Driver`. Requests that still run hear that the engine is closed."""
        with contextlib.suppress(EngineStateError):
            self._put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _drive(self) -> None:
        engine = self._llm.llm_engine
        while True:
            try:
                command = self._commands.get(block=not self._sinks)
            except queue.Empty:
                self._step(engine)
                continue
            if command is None:
                break
            command()
        with self._gate:
            self._closed = True
        self._failed = _closed()
        self._tell_all(self._failed)
        while not self._commands.empty():  # what came after the end
            late = self._commands.get()
            if late is not None:
                late()

    def _step(self, engine: Any) -> None:
        try:
            outputs = engine.step()
        except Exception as error:
            self._failed = error
            self._tell_all(error)
            return
        for output in outputs:
            self._tell(output.request_id, output)

    def _tell(self, request: str, output: Any) -> None:
        """Hand an output or an error to its request's sink. One that cannot take it, as after its event loop is
        closed, is dropped: the thread belongs to the others, too."""
        if isinstance(output, BaseException):
            output, last = _as_error(output), True
        else:
            last = output.finished
        sink = self._sinks.pop(request, None) if last else self._sinks.get(request)
        if sink is None:
            return
        try:
            sink(output)
        except Exception:
            if not last:
                del self._sinks[request]
                self._drop([request])

    def _tell_all(self, error: BaseException) -> None:
        for request in list(self._sinks):
            self._tell(request, error)


class AsyncDriver:
    """Hands requests to a `vllm.AsyncLLM` on the event loop that it lives in."""

    def __init__(self, llm: Any) -> None:
        """Errors: CapabilityError (BP502) for replicas that cannot all be asked."""
        self._llm = llm
        # `collective_rpc` returns the first data-parallel replica's results only.
        self._ask_all = getattr(llm.engine_core, "call_utility_all_async", None)
        replicas = llm.vllm_config.parallel_config.data_parallel_size
        if replicas > 1 and self._ask_all is None:
            raise CapabilityError("BP502", f"{replicas} replicas: this engine can ask only one of them")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[str, Future[None]] = {}
        self._sinks: dict[str, Sink] = {}
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()

    def submit(self, prompt: Any, parameters: Any, sink: Sink) -> str:
        """See `Driver`."""
        request = f"brainpatch-{next(_numbers)}"

        async def run() -> None:
            try:
                async for output in self._llm.generate(prompt, parameters, request):
                    if request not in self._sinks:  # aborted or told already
                        return
                    sink(output)
            except asyncio.CancelledError:  # by `abort`, or since the loop ends
                self._tell(request, _closed())
                raise
            except Exception as error:
                self._tell(request, _as_error(error))
            finally:
                self._tasks.pop(request, None)
                self._sinks.pop(request, None)

        self._sinks[request] = sink
        self._tasks[request] = asyncio.run_coroutine_threadsafe(run(), self._found_loop())
        return request

    def abort(self, requests: Sequence[str]) -> None:
        """See `Driver`."""
        for request in requests:
            self._sinks.pop(request, None)
            task = self._tasks.pop(request, None)
            if task is not None:
                task.cancel()

    def _tell(self, request: str, error: BaseException) -> None:
        """The last that a sink hears, if it has not heard its last."""
        sink = self._sinks.pop(request, None)
        if sink is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits
                sink(error)

    def rpc(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """See `Driver`. EngineStateError (BP409) on the loop's own thread, which would wait for itself."""
        self.check_thread()
        call = self._call_all(method, arguments)
        return _judged(lambda: asyncio.run_coroutine_threadsafe(call, self._found_loop()).result(), method)

    async def rpc_async(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """See `Driver`."""
        results = await self._call_all(method, arguments)
        return _judged(lambda: results, method)

    async def _call_all(self, method: str, arguments: tuple[Any, ...]) -> list[dict[str, Any]]:
        """One result a rank of every data-parallel replica."""
        if self._ask_all is None:
            found: list[dict[str, Any]] = await self._llm.collective_rpc(method, args=arguments)
            return found
        replicas = await self._ask_all("collective_rpc", method, None, arguments, {})
        return [result for ranks in replicas for result in ranks]

    def check_thread(self) -> None:
        """See `Driver`. Not on the loop that would have to do the work."""
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self._found_loop():
                raise EngineStateError(
                    "BP409",
                    "this call would block the event loop of the AsyncLLM",
                    "Use `astream`, or another thread.",
                )

    def close(self) -> None:
        """See `Driver`. Requests that still run hear that the engine is closed."""
        for request, task in list(self._tasks.items()):
            self._tell(request, _closed())
            task.cancel()

    def _found_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                raise EngineStateError(
                    "BP407", "the event loop of the AsyncLLM is not known", "Call `from_llm` inside it."
                ) from None
        return self._loop


def _closed() -> EngineStateError:
    return EngineStateError("BP407", "the engine was closed while it worked on the request")


def _as_error(error: BaseException) -> BaseException:
    """What a caller gets to see: ours as they are, vLLM's with a code."""
    for found in (error, error.__cause__):  # an AsyncLLM wraps what it does not know
        if isinstance(found, BrainPatchError):
            return found
    if any(
        kind.__name__ == "VLLMValidationError" for kind in type(error).__mro__
    ):  # found out when the request was handed in
        return RequestError("BP404", f"vLLM refuses the request: {error}")
    return EngineError("BP508", f"{type(error).__name__}: {error}")


def _judged(call: Callable[[], list[dict[str, Any]]], method: str) -> list[dict[str, Any]]:
    try:
        results = call()
    except BrainPatchError:
        raise
    except Exception as error:
        raise EngineError(
            "BP508", f"vLLM could not be asked for {method}: {type(error).__name__}: {error}"
        ) from error
    for rank, result in enumerate(results):
        if "error" in result:
            where = f" (rank {rank})" if len(results) > 1 else ""
            raise EngineError(result["error"]["code"], result["error"]["reason"] + where)
    return results
