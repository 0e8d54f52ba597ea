"""The entry point: `brainpatch` and `python -m brainpatch`."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line. An interruption while its modules are imported ends quietly as well."""
    try:
        from brainpatch.cli.main import run
        from brainpatch.cli.output import claim_stdout

        claim_stdout()
        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    # A second interruption, while Python ends, would show a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


if __name__ == "__main__":
    main()
