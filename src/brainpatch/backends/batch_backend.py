"""What engines have in common that run a batch in this process and tell its text while they do."""

from __future__ import annotations

import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from brainpatch.errors import BrainPatchError, EngineError
from brainpatch.runtime.backend import BrainPatchBackend
from brainpatch.runtime.requests import Generation, Listener, Request

T = TypeVar("T")


class BatchBackend(BrainPatchBackend):
    """An engine whose `run_batch` is all that it generates with."""

    @abstractmethod
    def run_batch(
        self, requests: Sequence[Request], listeners: Sequence[Listener] | None
    ) -> list[Generation | BrainPatchError]:
        """See the base class. Nobody listens where `listeners` is None."""

    def _run(self, requests: Sequence[Request]) -> list[Generation]:
        results = self.run_batch(requests, None)
        failed = next((one for one in results if isinstance(one, EngineError)), None)
        if failed is not None:
            failed.answers = [None if isinstance(one, BrainPatchError) else one for one in results]
            raise failed
        return [one for one in results if isinstance(one, Generation)]

    def _run_stream(self, request: Request) -> Iterator[str]:
        """The answer's pieces, generated in a thread that ends when this iterator is closed."""
        listener = _Pieces()

        def work() -> None:
            try:
                (result,) = self.run_batch([request], [listener])
                listener.heard.put(result if isinstance(result, BrainPatchError) else None)
            except BaseException as error:  # everything goes to the consumer, who is in another thread
                listener.heard.put(error)

        thread = threading.Thread(target=work, name="brainpatch-stream", daemon=True)
        thread.start()
        try:
            while (piece := listener.heard.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            listener.cancelled = True
            thread.join()


class _Pieces:
    """A listener of another thread."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        self.cancelled = False

    def piece(self, text: str) -> None:
        """More of the answer."""
        self.heard.put(text)


class EngineThread:
    """The one thread that touches an engine which knows only one; callers wait in line for it."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"brainpatch-{name}")

    def call(self, work: Callable[[Callable[[], bool]], T]) -> T:
        """Run `work` there, and wait. It is given a question to ask at each step: whether the caller has gone
        (Ctrl-C), so that it ends early; the engine is quiet again when that exception leaves here."""
        gone = threading.Event()
        future = self._executor.submit(work, gone.is_set)
        try:
            return future.result()
        finally:
            gone.set()
            wait([future])

    def close(self) -> None:
        """End the thread. May be called more than once."""
        self._executor.shutdown()
