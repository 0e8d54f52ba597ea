"""Turns between clients, bounds, cancelled work, and batches that fail; the engine is a stand-in."""

from __future__ import annotations

import asyncio
import threading

import pytest

from brainpatch.errors import BrainPatchError, EngineError
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.meaning import ResolvedSet
from brainpatch.runtime.requests import Generation, Request
from brainpatch.server.batcher import Batcher, Job


class Engine:
    """Notes which batches it was given; works only when it may."""

    max_batch_size = 3

    def __init__(self):
        self.batches = []
        self.may = threading.Event()
        self.answer = lambda request: Generation(str(request.prompt_ids[0]), [1], None, "stop", 1)

    def run_batch(self, requests, listeners):
        self.may.wait(10)
        self.batches.append([request.prompt_ids[0] for request in requests])
        for request, listener in zip(requests, listeners, strict=True):
            listener.piece(f"piece {request.prompt_ids[0]}")
        return [self.answer(request) for request in requests]


@pytest.fixture
def engine():
    return Engine()


def requests(*numbers):
    return [Request((number,), GenerationConfig(), ResolvedSet()) for number in numbers]


async def finished(job):
    found = {}
    while len(found) < len(job.requests):
        event = await asyncio.wait_for(job.events.get(), 10)
        if event.done is not None or event.error is not None:
            found[event.index] = event.error or event.done
    return [found[index] for index in sorted(found)]


def test_clients_take_turns(engine):
    async def work():
        batcher = Batcher(engine, 100)
        first = Job(requests(0), "z")
        batcher.submit(first)
        while batcher._waiting:  # the thread has taken it, and waits in the engine
            await asyncio.sleep(0.01)
        jobs = [Job(requests(*range(10, 16)), "many"), Job(requests(1), "one"), Job(requests(2, 3), "two")]
        for job in jobs:
            batcher.submit(job)
        engine.may.set()
        answers = [await finished(job) for job in [first, *jobs]]
        await asyncio.to_thread(batcher.close)
        return answers

    answers = asyncio.run(work())
    assert engine.batches == [[0], [10, 1, 2], [11, 3, 12], [13, 14, 15]]
    assert [one.text for one in answers[1]] == [str(n) for n in range(10, 16)]


def test_bounds_and_the_end(engine):
    async def work():
        batcher = Batcher(engine, 3)
        job = Job(requests(1, 2, 3))
        batcher.submit(job)
        with pytest.raises(BrainPatchError, match="BP705"):
            batcher.submit(Job(requests(4)))
        engine.may.set()
        await finished(job)
        assert batcher.in_work == 0
        batcher.submit(Job(requests(4)))
        await asyncio.to_thread(batcher.close)
        with pytest.raises(BrainPatchError, match="BP706"):
            batcher.submit(Job(requests(5)))

    asyncio.run(work())


def test_nobody_works_for_who_went_away(engine):
    async def work():
        batcher = Batcher(engine, 100)
        batcher.submit(Job(requests(0)))
        while batcher._waiting:
            await asyncio.sleep(0.01)
        gone, here = Job(requests(1, 2)), Job(requests(3))
        for job in (gone, here):
            batcher.submit(job)
        gone.cancel()
        engine.may.set()
        await finished(here)
        await asyncio.to_thread(batcher.close)
        assert gone.events.empty()
        assert batcher.in_work == 0

    asyncio.run(work())
    assert [number for batch in engine.batches for number in batch] == [0, 3]


def test_a_request_that_fails_fails_alone_and_a_batch_that_fails_ends_nothing(engine):
    broken = EngineError("BP509", "x")
    engine.answer = lambda request: (
        broken if request.prompt_ids[0] == 1 else Generation("ok", [1], None, "stop", 1)
    )
    engine.may.set()

    async def work():
        batcher = Batcher(engine, 100)
        job = Job(requests(0, 1, 2))
        batcher.submit(job)
        first = await finished(job)

        def fail(request):
            raise RuntimeError("boom")

        engine.answer = fail
        job = Job(requests(5))
        batcher.submit(job)
        (second,) = await finished(job)
        engine.answer = lambda request: Generation("ok", [1], None, "stop", 1)
        job = Job(requests(6))
        batcher.submit(job)
        (third,) = await finished(job)
        await asyncio.to_thread(batcher.close)
        return first, second, third

    first, second, third = asyncio.run(work())
    assert [getattr(one, "code", "ok") for one in first] == ["ok", "BP509", "ok"]
    assert (second.code, third.text) == ("BP508", "ok")
    assert "boom" not in second.reason
