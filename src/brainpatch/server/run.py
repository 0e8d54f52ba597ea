"""Running our own server: signals, draining, bounds on connections."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

_KEEP_ALIVE_SECONDS: Final = 75
_HEADER_BYTES: Final = 64 << 10


class _Server(uvicorn.Server):
    """Leaves signals to `run`, so that a drained server ends with status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


def run(app: Any, host: str, port: int, drain_seconds: int) -> None:
    """Serve until SIGTERM or SIGINT: then nothing new is taken, and running requests may finish."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=drain_seconds,
        h11_max_incomplete_event_size=_HEADER_BYTES,
    )
    asyncio.run(_serve(_Server(config), app))


async def _serve(server: uvicorn.Server, app: Any) -> None:
    def stop() -> None:
        app.state.draining = True
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, stop)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop))
    await server.serve()
    if not server.started:
        raise SystemExit(1)
