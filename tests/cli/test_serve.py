"""What `brainpatch serve` refuses before any engine starts, and what it hands to vLLM; servers run in
`tests/engines/*/test_server.py`."""

from __future__ import annotations

import pytest

from brainpatch.errors import BrainPatchError
from brainpatch.server.launch import Place, check_place
from brainpatch.server.settings import Settings


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "nobody"], "BP302"),
        (["--port", "70000"], "BP404"),
        (["--max-requests", "0"], "BP404"),
        (["--api-key", ""], "BP404"),
        (["--mode", "loose"], "BP202"),
        (["--backend", "nobody"], "BP501"),
        (["--backend", "transformers", "--", "--max-model-len", "9"], "BP404"),
        (["--backend", "vllm", "--", "--worker-cls", "x"], "BP502"),
        (["--backend", "vllm", "--", "--port=1"], "BP502"),
    ],
)
def test_what_is_wrong_is_said_before_an_engine_starts(brainpatch, words, said):
    done = brainpatch("serve", "-m", "nowhere", *words)
    assert done.status != 0
    assert said in done.err


def test_a_wide_address_without_a_key_is_warned_of():
    assert "anybody" in (check_place(Settings(), Place("0.0.0.0")) or "")  # noqa: S104
    assert check_place(Settings(api_keys=["k"]), Place("0.0.0.0")) is None  # noqa: S104
    assert check_place(Settings(), Place()) is None
    with pytest.raises(BrainPatchError):
        check_place(Settings(), Place(drain_seconds=-1))
