"""What engines have in common that run a batch in this process and tell its text while they do."""

from __future__ import annotations

import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TypeVar

from brainpatch.backends.answers import Answer
from brainpatch.errors import BrainPatchError, EngineError
from brainpatch.runtime.backend import BrainPatchBackend
from brainpatch.runtime.requests import Generation, Listener, Request, Scored

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

    def score(
        self, requests: Sequence[Request], answers: Sequence[Sequence[int]] | None = None
    ) -> list[Scored]:
        """See the base class."""
        forced = [()] * len(requests) if answers is None else [tuple(answer) for answer in answers]
        asked = [
            replace(
                request,
                config=replace(request.config, ignore_eos=True, max_new_tokens=len(answer))
                if answer
                else request.config,
                forced=answer,
                rows=[],
            )
            for request, answer in zip(requests, forced, strict=True)
        ]
        import numpy as np

        made = self._run(asked)
        return [
            Scored(answer.token_ids, np.stack(request.rows or []))
            for request, answer in zip(asked, made, strict=True)
        ]

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


def shared_batches(
    requests: Sequence[Request], size: int, context: int | None, *, padded: bool
) -> list[list[int]]:
    """Which requests run together as rows of one batch, at most `size`: like lengths, and only equal ones where
    padding is not possible. A row that is finished goes on until the last one is, so the longest prompt and the longest
    answer must fit into the model's `context` together."""
    batches: list[list[int]] = []
    for i in sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids)):
        one = requests[i]
        rows = [requests[j] for j in batches[-1]] if batches else []
        if (
            0 < len(rows) < size
            and _fit([*rows, one], context)
            and rows[0].config.extra == one.config.extra
            and (padded or len(rows[0].prompt_ids) == len(one.prompt_ids))
        ):
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _fit(rows: Sequence[Request], context: int | None) -> bool:
    longest = max(len(row.prompt_ids) for row in rows)
    return context is None or longest + max(row.config.max_new_tokens for row in rows) <= context


def run_batches(
    requests: Sequence[Request],
    listeners: Sequence[Listener] | None,
    batches: Sequence[Sequence[int]],
    run: Callable[[Sequence[Request], Sequence[Listener] | None], Sequence[Answer]],
) -> list[Generation | BrainPatchError]:
    """`run` one batch after another; the results are in the requests' order."""
    results: dict[int, Generation | BrainPatchError] = {}
    for batch in batches:
        heard = None if listeners is None else [listeners[i] for i in batch]
        for number, answer in zip(batch, run([requests[i] for i in batch], heard), strict=True):
            results[number] = answer.error or answer.generation()
    return [results[number] for number in range(len(requests))]


class EngineThread:
    """The one thread that touches an engine which knows only one; callers wait in line for it."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"brainpatch-{name}")

    def call(self, work: Callable[[Callable[[], bool]], T]) -> T:
        """Run `work` there, and wait. It is given a question to ask at each step: whether the caller has gone
        (Ctrl-C), so that it ends early; the engine is quiet again when that exception leaves here."""
        gone = threading.Event()
        futures = []
        try:  # from here on, since an interruption may come at any point
            futures.append(self._executor.submit(work, gone.is_set))
            return futures[0].result()
        finally:
            gone.set()
            wait(futures)

    def close(self) -> None:
        """End the thread. May be called more than once."""
        self._executor.shutdown()
