"""The entry point: `brainpatch` and `python -m brainpatch`."""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn


class Interrupted(BaseException):
    """Ctrl-C. Not a KeyboardInterrupt, since there are libraries that swallow one: vLLM does while it starts."""

    came = False


def main() -> None:
    """Run the command line. An interruption ends it quietly at any point, also while modules are imported."""
    try:
        # A shell that starts a program in the background has it ignore interruptions: so it stays.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        from brainpatch.cli.main import run
        from brainpatch.cli.output import claim_stdout

        claim_stdout()
        status = run(sys.argv[1:])
    except (KeyboardInterrupt, Interrupted):
        print("interrupted", file=sys.stderr)
        status = 130
    if Interrupted.came and status != 0:  # out of a library's import it may come as another error
        status = 130
    # A second interruption, while Python ends, would show a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


def _interrupt(*_: Any) -> NoReturn:
    Interrupted.came = True
    raise Interrupted


if __name__ == "__main__":
    main()
