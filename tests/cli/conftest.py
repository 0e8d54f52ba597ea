"""Running the command line, in this process and in another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import NamedTuple

import pytest

from brainpatch import save_patch
from brainpatch.cli.main import run
from tests.factories import make_patch

# What a terminal could act on: C0 but newline and tab, DEL and C1, bidirectional and zero-width characters.
CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\U000e0000-\U000e007f]"
)


class Result(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def brainpatch(capsys, monkeypatch):
    """Run a command line in this process."""
    monkeypatch.delenv("BRAINPATCH_DEBUG", raising=False)

    def call(*arguments):
        capsys.readouterr()
        status = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        assert not CONTROLS.search(captured.out)
        assert not CONTROLS.search(captured.err.replace("\r", ""))  # progress bars of libraries
        return Result(status, captured.out, captured.err)

    return call


def outside(*arguments, **options):
    """Run a command line as a person does: in a process of its own."""
    command = [sys.executable, "-m", "brainpatch", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=120, **options)
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def patch_file(tmp_path):
    """A patch for the model that FakeBackend pretends to have."""
    loaded = make_patch(
        [{"layer": 1, "coefficient": 2.0}, {"layer": 3, "site": "prompt"}],
        name="formal",
        description="Formal.",
    )
    return save_patch(loaded.manifest, loaded.vectors, tmp_path / "formal.brainpatch", readme="# Hello\n")
