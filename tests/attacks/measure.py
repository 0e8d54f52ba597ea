"""Read files given on stdin, each in a forked process of its own, and report what that did and cost.

One JSON object a line: `code` (None when accepted), `error` (another exception), `message`, `kib` (memory
beyond what the process had), `seconds` (of CPU), `events` (what was done besides reading the file).
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path

from brainpatch.errors import PatchFormatError
from brainpatch.patch import load_patch


def measure(path: str) -> dict[str, object]:
    events: list[str] = []
    watching = True

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if not watching or event in ("object.__setattr__", "sys._getframe"):
            return
        if event == "open":
            flags = arguments[2]
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if arguments[0] == path and not writes:
                return
        events.append(f"{event} {arguments!r}"[:200])

    sys.addaudithook(hook)
    code = error = message = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    try:
        load_patch(path)
    except PatchFormatError as refused:
        code, message = refused.code, str(refused)
    except BaseException as other:
        error = repr(other)
    seconds = time.process_time() - start
    watching = False
    return {
        "path": path,
        "code": code,
        "error": error,
        "message": message,
        "kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
        "seconds": seconds,
        "events": events,
        "numpy": "numpy" in sys.modules,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    # The first manifest of a process has the schema's annotations evaluated: not the file's doing.
    load_patch(Path(__file__).parent / "files" / "more-hostile" / "ok-plain.brainpatch")
    for line in sys.stdin:
        path = line.rstrip("\n")
        child = os.fork()
        if child == 0:
            os.write(1, (json.dumps(measure(path)) + "\n").encode())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"path": path, "error": f"the process ended with status {status}"}), flush=True)


if __name__ == "__main__":
    main()
