"""Where the lines of our own logs go when nobody has said."""

from __future__ import annotations

import logging


def log_to_stderr() -> None:
    """Show `brainpatch.*`, the audit and the access log too, on stderr, where nobody configured logging."""
    log = logging.getLogger("brainpatch")
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
