"""Exit statuses: 0 yes, 1 the answer is no, 2 wrong use, 3 what is needed is not there, 130 interrupted."""

from __future__ import annotations

from brainpatch.errors import BrainPatchError

NO, WRONG_USE, NOT_THERE, INTERRUPTED = 1, 2, 3, 130
READER_GONE = 141
"""Whatever read stdout ended first; the number that a shell gives to a program that SIGPIPE ended."""

EXIT_STATUS: dict[str, int] = {
    "BP101": NOT_THERE,
    "BP202": WRONG_USE,
    "BP302": NOT_THERE,
    "BP303": NOT_THERE,
    "BP304": NOT_THERE,
    "BP305": NOT_THERE,
    "BP306": NOT_THERE,
    "BP307": NOT_THERE,
    "BP401": WRONG_USE,
    "BP402": WRONG_USE,
    "BP403": WRONG_USE,
    "BP404": WRONG_USE,
    "BP405": WRONG_USE,
    "BP501": NOT_THERE,
    "BP507": NOT_THERE,
    "BP605": NOT_THERE,
    "BP606": WRONG_USE,
}
"""Error code -> exit status, where it is not 1: the answer is no."""


def exit_status(error: BrainPatchError) -> int:
    """The status of a command that ends with this error."""
    return EXIT_STATUS.get(error.code, NO)
