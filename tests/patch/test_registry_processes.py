"""The registry under several processes at once, and under kill -9."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from brainpatch.patch import PatchRegistry, save_patch
from tests.factories import make_patch

# Each reports a line per install; all wait for the same moment.
INSTALL = """
import sys, time
from brainpatch.errors import RegistryError
from brainpatch.patch.registry import PatchRegistry
home, path, mode, start = sys.argv[1:]
registry = PatchRegistry(home)
print("ready", flush=True)
while time.time() < float(start):
    pass
while True:
    try:
        registry.install_file(path, overwrite=mode != "once")
        print("won", flush=True)
    except RegistryError as error:
        print(error.code, flush=True)
    if mode != "forever":
        break
"""


@pytest.fixture
def files(tmp_path):
    """Two different patches of one name, large enough that writing them takes a moment."""
    paths = []
    for seed in (0, 1):
        patch = make_patch([{"layer": 1}], name="formal", hidden=4096, seed=seed)
        paths.append(save_patch(patch.manifest, patch.vectors, tmp_path / f"file-{seed}"))
    return paths


def start(home, path, mode, moment=0.0):
    return subprocess.Popen(
        [sys.executable, "-c", INSTALL, str(home), str(path), mode, str(moment)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_one_of_two_installs_wins(tmp_path, files):
    for turn in range(4):
        home = tmp_path / f"home-{turn}"
        moment = time.time() + 0.8
        processes = [start(home, path, "once", moment) for path in files]
        answers = [process.communicate(timeout=30)[0].split()[-1] for process in processes]
        assert sorted(answers) == ["BP301", "won"]
        winner = files[answers.index("won")]
        installed = PatchRegistry(home).get("formal")
        assert installed.path.read_bytes() == winner.read_bytes()
        assert installed.source["origin"] == str(winner)


def test_two_that_overwrite_leave_a_patch_with_its_own_record(tmp_path, files):
    registry = PatchRegistry(tmp_path / "home")
    processes = [start(registry.home, path, "forever") for path in files]
    contents = {path.read_bytes(): str(path) for path in files}
    try:
        deadline = time.monotonic() + 30
        while not registry.is_installed("formal"):
            assert time.monotonic() < deadline
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            # Whole at every moment, whoever wrote it.
            assert registry.path_for("formal").read_bytes() in contents
            with registry._alone():
                source = json.loads((registry.patches_dir / "formal.source.json").read_text())
                assert contents[registry.path_for("formal").read_bytes()] == source["origin"]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_killed_install_leaves_a_whole_patch_or_none(tmp_path, files):
    registry = PatchRegistry(tmp_path / "home")
    contents = {path.read_bytes(): str(path) for path in files}
    generator = random.Random(0)
    seen = set()
    for turn in range(20):
        process = start(registry.home, files[turn % 2], "forever")
        process.stdout.readline()
        time.sleep(generator.random() * 0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        listed = registry.list_patches()
        seen.add(len(listed))
        for installed in listed:
            content = installed.path.read_bytes()
            assert content in contents
            # No record, or its own.
            assert installed.source.get("origin", contents[content]) == contents[content]
    # The lock died with its holder, and nothing is left lying about.
    registry.install_file(files[0], overwrite=True)
    left = sorted(path.name for path in registry.patches_dir.iterdir())
    assert left == ["formal.brainpatch", "formal.source.json"]
    assert 1 in seen
