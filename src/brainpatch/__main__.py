"""The entry point: `brainpatch` and `python -m brainpatch`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. An interruption while its modules are imported ends quietly as well."""
    try:
        from brainpatch.cli.main import run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    main()
