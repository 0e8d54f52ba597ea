"""A process of `vllm_overhead_engine.py` that is stopped and continued by signals, and the CPU time that others use."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).with_name("vllm_overhead_engine.py")
PATIENCE_SECONDS = 900.0
_TICKS = os.sysconf("SC_CLK_TCK")


class EngineFailed(Exception):
    """The process ended, did not answer in time, or reported an error."""


class Engine:
    """An engine's process. It runs only while an answer is awaited."""

    def __init__(self, settings: dict[str, Any], python: str, environment: dict[str, str], log: Path) -> None:
        self.log = log
        self.windows: list[tuple[float, float]] = []
        """When it was running, by `time.perf_counter`, which on Linux is one clock for all processes."""
        with log.open("wb") as written:
            self.process = subprocess.Popen(
                [python, str(ENGINE), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                env=os.environ | environment,
                text=True,
            )
        self.versions: dict[str, str] = self._line()["versions"]
        time.sleep(1.0)  # what a new engine still does on its own
        used, since = self.cpu_seconds(), time.perf_counter()
        time.sleep(2.0)
        self.idle_cpu = (self.cpu_seconds() - used) / (time.perf_counter() - since)
        self._signal(signal.SIGSTOP)

    def send(self, do: str, **what: Any) -> None:
        """Ask for something; `run` brings the answer."""
        try:
            self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailed(self._last_words()) from None

    def run(self) -> dict[str, Any]:
        """Let the process run until it has written a line."""
        started = time.perf_counter()
        self._signal(signal.SIGCONT)
        try:
            return self._line()
        finally:
            self._signal(signal.SIGSTOP)
            self.windows.append((started, time.perf_counter()))

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """One question, one answer."""
        self.send(do, **what)
        return self.run()

    def ran(self, until: float) -> float:
        """Seconds that the process has been running until then, of those that `windows` lists."""
        return sum(min(end, until) - start for start, end in self.windows if start < until)

    def cpu_seconds(self) -> float:
        """User and system time of the whole process group so far."""
        ticks = 0
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = entry.read_text().rsplit(")", 1)[1].split()
                if int(fields[2]) == self.process.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / _TICKS

    def close(self) -> None:
        """End the process and its workers."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.process.kill()  # when it had not come to make itself a group
        self.process.wait()

    def _line(self) -> dict[str, Any]:
        timer = threading.Timer(PATIENCE_SECONDS, self.close)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise EngineFailed(self._last_words())
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise EngineFailed(f"{found['error']}\n{self._last_words()}")
        return found

    def _last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def busy_seconds() -> float:
    """CPU time that all processes used so far, and that other machines took from this one."""
    user, nice, system, _idle, _wait, irq, soft, stolen = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + soft + stolen) / _TICKS
