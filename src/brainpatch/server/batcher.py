"""Who uses the engine of our own server: one thread, which runs what waits in batches.

State and who owns it: `_waiting` is shared between the event loop, which puts jobs in, and the thread, which takes
them out, under a lock that is held for that alone. Clients take turns: of those who wait, each gives the next
batch one request after another, so that one with a hundred requests does not keep out one with a single one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from brainpatch.errors import BrainPatchError, EngineError, ServerError
from brainpatch.runtime.backend import BrainPatchBackend
from brainpatch.runtime.requests import Generation, Request

_log = logging.getLogger("brainpatch.server")


@dataclass(frozen=True)
class Event:
    """Of answer `index`: a piece of text, or the whole answer, or why there is none."""

    index: int
    piece: str = ""
    done: Generation | None = None
    error: BrainPatchError | None = None


@dataclass(eq=False)
class Job:
    """The requests of one HTTP request, and the events that come of them. Made on the event loop."""

    requests: Sequence[Request]
    client: str = ""
    cancelled: bool = False
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def cancel(self) -> None:
        """Nobody waits for it any more: its work ends at the next token."""
        self.cancelled = True

    def tell(self, event: Event) -> None:
        """From the thread."""
        if not self.cancelled:
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class Listener:
    """What an engine tells while it works on one request, and asks."""

    def __init__(self, job: Job, index: int) -> None:
        self._job, self._index = job, index

    def piece(self, text: str) -> None:
        """More of the answer."""
        self._job.tell(Event(self._index, piece=text))

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._job.cancelled


class Batcher:
    """Runs jobs on a backend. `limit` requests may wait or be in work."""

    def __init__(self, backend: BrainPatchBackend, limit: int) -> None:
        self._backend = backend
        self._limit = limit
        self._waiting: OrderedDict[str, deque[tuple[Job, int]]] = OrderedDict()
        self._count = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="brainpatch-batches", daemon=True)
        self._thread.start()

    @property
    def in_work(self) -> int:
        """Requests that wait or are in work."""
        return self._count

    def submit(self, job: Job) -> None:
        """Put a job in. ServerError (BP705) when there is no room, BP706 when the server stops."""
        with self._changed:
            if self._closed:
                raise ServerError("BP706", "the server stops")
            if self._count + len(job.requests) > self._limit:
                raise ServerError("BP705", f"{self._count} requests are in work or waiting")
            self._count += len(job.requests)
            queue = self._waiting.setdefault(job.client, deque())
            queue.extend((job, index) for index in range(len(job.requests)))
            self._changed.notify()

    def close(self) -> None:
        """Take nothing more; the batch that runs is finished, and the thread ends."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _take(self) -> list[tuple[Job, int]]:
        """The next batch: one request of each client in turn."""
        batch: list[tuple[Job, int]] = []
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            while self._waiting and len(batch) < self._backend.max_batch_size:
                client, queue = self._waiting.popitem(last=False)
                job, index = queue.popleft()
                if queue:
                    self._waiting[client] = queue  # at the end
                if job.cancelled:
                    self._count -= 1
                else:
                    batch.append((job, index))
        return batch

    def _run(self) -> None:
        while True:
            batch = self._take()
            if not batch and self._closed:
                return
            if batch:
                self._work(batch)

    def _work(self, batch: list[tuple[Job, int]]) -> None:
        requests = [job.requests[index] for job, index in batch]
        listeners = [Listener(job, index) for job, index in batch]
        results: Sequence[Any]
        try:
            results = self._backend.run_batch(requests, listeners)
        except Exception as error:  # the thread belongs to all
            if not isinstance(error, BrainPatchError):
                _log.exception("a batch failed")
                error = EngineError("BP508", f"{type(error).__name__}")
            results = [error] * len(batch)
        with self._changed:
            self._count -= len(batch)
        for (job, index), result in zip(batch, results, strict=True):
            if isinstance(result, BrainPatchError):
                job.tell(Event(index, error=result))
            else:
                job.tell(Event(index, done=result))
