"""Who waits for an engine always hears something, whatever happens to the others. The engines here are fakes: they
answer as vLLM's do, and fail when they are told to. The real ones are in tests/engines/vllm."""

from __future__ import annotations

import asyncio
import queue
import threading
from types import SimpleNamespace

import pytest

from brainpatch.backends.vllm_drivers import AsyncDriver, LLMDriver, _as_error
from brainpatch.errors import CapabilityError, EngineError, EngineStateError, RequestError


class FakeEngine:
    """An `LLMEngine` whose requests take `length` steps; `hold` makes a step wait."""

    def __init__(self, length=3):
        self.length = length
        self.live = {}
        self.aborted = []
        self.hold = threading.Event()
        self.hold.set()
        self.error = None

    def add_request(self, request, prompt, parameters):
        if prompt == "bad":
            raise RequestError("BP410", "bad")
        self.live[request] = 0

    def abort_request(self, requests):
        for request in requests:
            self.aborted.append(request)
            self.live.pop(request, None)

    def step(self):
        self.hold.wait(10)
        if self.error is not None:
            raise self.error
        outputs = []
        for request in list(self.live):
            self.live[request] += 1
            done = self.live[request] == self.length
            outputs.append(SimpleNamespace(request_id=request, finished=done))
            if done:
                del self.live[request]
        return outputs


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def driver(engine):
    driver = LLMDriver(SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: True))
    yield driver
    engine.hold.set()
    driver.close()


def heard_of(driver, prompt="good"):
    heard = queue.SimpleQueue()
    driver.submit(prompt, None, heard.put)
    return heard


def all_of(heard):
    """What a request hears until its end."""
    found = []
    while True:
        found.append(heard.get(timeout=5))
        if isinstance(found[-1], BaseException) or found[-1].finished:
            return found


def test_outputs_come_to_who_asked(driver):
    several = [heard_of(driver) for _ in range(4)]
    assert [len(all_of(heard)) for heard in several] == [3] * 4


def test_a_sink_that_cannot_take_its_output_hurts_no_other(driver, engine):
    """As when the event loop that waited was closed."""
    loop = asyncio.new_event_loop()
    loop.close()
    engine.hold.clear()
    lost = driver.submit("good", None, lambda output: loop.call_soon_threadsafe(print, output))
    other = heard_of(driver)
    engine.hold.set()
    assert len(all_of(other)) == 3
    assert engine.aborted == [lost]
    assert len(all_of(heard_of(driver))) == 3
    assert driver.call(lambda: 7) == 7


def test_a_request_that_is_refused_hears_why_and_the_others_go_on(driver):
    bad, good = heard_of(driver, "bad"), heard_of(driver)
    (error,) = all_of(bad)
    assert error.code == "BP410"
    assert len(all_of(good)) == 3


def test_when_the_engine_fails_all_hear_it_and_later_ones_too(driver, engine):
    engine.hold.clear()
    several = [heard_of(driver) for _ in range(3)]
    engine.error = RuntimeError("the core is dead")
    engine.hold.set()
    for heard in (*several, heard_of(driver)):
        error = all_of(heard)[-1]
        assert isinstance(error, EngineError)
        assert error.code == "BP508"


def test_when_the_driver_is_closed_nobody_is_left_waiting(engine):
    driver = LLMDriver(SimpleNamespace(llm_engine=engine))
    engine.length = 10**9
    several = [heard_of(driver) for _ in range(3)]
    assert several[0].get(timeout=5).finished is False
    driver.close()
    for heard in several:
        error = all_of(heard)[-1]
        assert isinstance(error, EngineStateError)
        assert error.code == "BP407"
    for call in (lambda: driver.submit("good", None, print), lambda: driver.call(lambda: 1)):
        with pytest.raises(EngineStateError, match="BP407"):
            call()
    driver.abort(["x"])
    driver.close()


def test_requests_that_race_with_the_end_hear_it_as_well(engine):
    for _ in range(50):
        driver = LLMDriver(SimpleNamespace(llm_engine=engine))
        answers = []

        def ask(driver=driver, answers=answers):
            try:
                answers.append(all_of(heard_of(driver))[-1])
            except EngineStateError as error:
                answers.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        driver.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert len(answers) == 4


class FakeAsyncLLM:
    """An `AsyncLLM` whose answers never end."""

    def __init__(self):
        self.engine_core = SimpleNamespace()
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))

    async def generate(self, prompt, parameters, request):
        while True:
            await asyncio.sleep(0.001)
            yield SimpleNamespace(finished=False)


def test_an_async_engine_that_is_closed_tells_those_who_wait():
    async def run():
        driver = AsyncDriver(FakeAsyncLLM())
        started, late = queue.SimpleQueue(), queue.SimpleQueue()
        driver.submit("x", None, started.put)
        await asyncio.sleep(0.02)
        driver.submit("x", None, late.put)  # its task has not begun
        driver.close()
        await asyncio.sleep(0.02)
        return started, late

    for heard in asyncio.run(run()):
        error = all_of(heard)[-1]
        assert isinstance(error, EngineStateError)
        assert error.code == "BP407"
        assert heard.empty()


def test_replicas_that_cannot_all_be_asked_are_refused():
    engine = FakeAsyncLLM()
    engine.vllm_config.parallel_config.data_parallel_size = 2
    with pytest.raises(CapabilityError, match=r"BP502.*2 replicas"):
        AsyncDriver(engine)
    engine.engine_core.call_utility_all_async = print  # any callable
    AsyncDriver(engine)


def test_the_end_of_the_loop_is_told_too_and_an_abort_is_not():
    heard, dropped = queue.SimpleQueue(), queue.SimpleQueue()

    async def run():
        driver = AsyncDriver(FakeAsyncLLM())
        driver.submit("x", None, heard.put)
        name = driver.submit("x", None, dropped.put)
        await asyncio.sleep(0.02)
        driver.abort([name])
        await asyncio.sleep(0.02)

    asyncio.run(run())
    assert all_of(heard)[-1].code == "BP407"
    while not dropped.empty():
        assert not isinstance(dropped.get(), BaseException)


def test_a_code_is_found_inside_what_an_engine_makes_of_it():
    wrapped = RuntimeError("EngineGenerateError")
    wrapped.__cause__ = RequestError("BP410", "junk")
    assert _as_error(wrapped) is wrapped.__cause__
    assert _as_error(RuntimeError("x")).code == "BP508"
