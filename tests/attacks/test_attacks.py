"""Every hostile file gets its verdict, at no cost and with no effect."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import brainpatch
from brainpatch.errors import ERRORS

HERE = Path(__file__).parent
FILES = HERE / "files"
VERDICTS: dict[str, dict[str, Any]] = json.loads((HERE / "verdicts.json").read_text())
KIB_ALLOWED = 64 * 1024
SECONDS_ALLOWED = 1.0

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="measured in forked processes")


def _tree() -> dict[str, str]:
    return {
        str(path.relative_to(FILES)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(FILES.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `measure.py` says of each file, run in an empty folder that is also home and the place for
    temporary files."""
    folder = tmp_path_factory.mktemp("empty")
    places = {name: str(folder) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "BRAINPATCH_HOME")}
    source = str(Path(brainpatch.__file__).parents[1])
    before = _tree()
    run = subprocess.run(
        [sys.executable, "-B", str(HERE / "measure.py")],
        input="".join(f"{FILES / name}\n" for name in VERDICTS),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=300,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": source, **places},
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert list(folder.iterdir()) == []
    assert _tree() == before
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    return {str(Path(line["path"]).relative_to(FILES)): line for line in lines}


def test_all_files_have_a_verdict_and_all_verdicts_a_file() -> None:
    found = {str(path.relative_to(FILES)) for path in FILES.glob("*/*.brainpatch")}
    assert found == VERDICTS.keys()


@pytest.mark.parametrize("name", VERDICTS)
def test_a_file_cannot_act(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    verdict, outcome = VERDICTS[name], outcomes[name]
    assert outcome["error"] is None, verdict["why"]
    assert outcome["code"] == verdict["code"], verdict["why"]
    assert outcome["events"] == []
    assert outcome["kib"] <= KIB_ALLOWED
    assert outcome["seconds"] <= SECONDS_ALLOWED
    assert not outcome["numpy"]


@pytest.mark.parametrize("name", [name for name, verdict in VERDICTS.items() if verdict["code"]])
def test_a_refusal_is_two_printable_lines(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    what, remedy = outcomes[name]["message"].split("\n")
    assert what.startswith(f"{VERDICTS[name]['code']} {ERRORS[VERDICTS[name]['code']].title}: ")
    assert remedy.startswith("  what to do: ")
    assert what.isprintable()
    assert remedy.isprintable()
    assert len(what) < 600
