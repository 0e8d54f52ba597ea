#!/usr/bin/env python3
"""How long commands that need no model take, beside a bare typer program: interleaved, as ratios.

Usage: cli_startup.py [--rounds 20]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import brainpatch.patch as bp

HELLO = """
import typer

app = typer.Typer()


@app.command()
def hello(name: str = "world") -> None:
    typer.echo(f"hello {name}")


app()
"""
ENTRY = "import sys; sys.argv[0] = 'brainpatch'; from brainpatch.__main__ import main; main()"


def patch(folder: Path) -> Path:
    """A patch of the usual size: one float32 direction of 4096 numbers."""
    model = bp.BaseModelSpec("some/model", "LlamaForCausalLM", 4096, 32)
    manifest = bp.Manifest("formal", model, [bp.Intervention(15, "v")])
    return bp.save_patch(manifest, {"v": [0.01] * 4096}, folder / "formal.brainpatch")


def seconds(command: list[str]) -> float:
    """Wall-clock time of one run."""
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["BRAINPATCH_HOME"] = str(Path(scratch) / "home")
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled once, as in any installation
        file = patch(Path(scratch))
        hello = Path(scratch) / "hello.py"
        hello.write_text(HELLO)
        start = [sys.executable, "-c", ENTRY]
        subprocess.run([*start, "install", str(file)], check=True, stdout=subprocess.DEVNULL)
        commands = {
            "bare typer program": [sys.executable, str(hello)],
            "brainpatch --help": [*start, "--help"],
            "brainpatch list": [*start, "list"],
            "brainpatch inspect": [*start, "inspect", str(file)],
            "brainpatch doctor --json": [*start, "doctor", "--json"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for command in commands.values():
            seconds(command)  # warm
        for _ in range(rounds):
            for name, command in commands.items():
                times[name].append(seconds(command))
    bare = times["bare typer program"]
    print(f"| command | median, ms | ratio (median of {rounds}) | 10% to 90% |\n|---|---|---|---|")
    for name, found in times.items():
        ratios = sorted(one / base for one, base in zip(found, bare, strict=True))
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        print(
            f"| `{name}` | {statistics.median(found) * 1000:.0f} | {statistics.median(ratios):.2f} "
            f"| {low:.2f} to {high:.2f} |"
        )


if __name__ == "__main__":
    main()
