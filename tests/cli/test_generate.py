"""run, compare, trace, learn, doctor, backends, and how errors look."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brainpatch import __version__, load_patch
from brainpatch.cli.options import split_strength
from brainpatch.patch.compatibility import ModelDescriptor
from brainpatch.runtime import discovery
from brainpatch.runtime.requests import TraceRow
from tests.cli.conftest import outside
from tests.runtime.engine import RecordingBackend

ROOT = Path(__file__).parent.parent.parent


class FakeBackend(RecordingBackend):
    """An engine made for these tests: no model, and text with an escape sequence in it."""

    name = "fake"
    broken = None

    def _run(self, requests):
        if FakeBackend.broken is not None:
            raise FakeBackend.broken
        answers = super()._run(requests)
        for answer in answers:
            answer.text = f"\x1b[31mred {answer.patches}\nsecond\tline"
        return answers

    @classmethod
    def capabilities(cls):
        from dataclasses import replace

        return replace(super().capabilities(), trace=True)

    def _run_trace(self, request):
        rows = [TraceRow(1, p, 2.0, 2.0) for p in range(3)] + [
            TraceRow(1, 3, 0.5, 1.0),
            TraceRow(2, 0, 1.0, 0.0),
        ]
        return rows if not request.patches.is_empty else []


@pytest.fixture
def fake(monkeypatch):
    FakeBackend.broken = None
    made = []

    def make(name="auto"):
        made.append(FakeBackend())
        return made[-1]

    monkeypatch.setattr(discovery, "select_backend", make)
    monkeypatch.setattr("brainpatch.runtime.model.select_backend", make)
    return made


def test_run_prints_the_text_with_controls_shown(brainpatch, fake, patch_file):
    done = brainpatch("run", "hi", "-m", "m", "-p", f"{patch_file}@0.5")
    assert done.status == 0
    assert done.out == "\\x1b[31mred {'formal': 0.5}\nsecond\tline\n"
    assert done.err == "loading m\n"


def test_run_passes_options_on(brainpatch, fake, patch_file):
    arguments = (
        "--max-tokens",
        7,
        "--temperature",
        0.5,
        "--seed",
        3,
        "-s",
        2,
        "--model-id",
        "x",
        "--device",
        "cpu",
    )
    document = json.loads(brainpatch("run", "hi", "-m", "m", "-p", patch_file, *arguments, "--json").out)
    assert document["patches"] == {"formal": 2.0}
    assert document["backend"] == "fake"
    assert len(document["digest"]) == 64
    config = fake[0].seen[0].config
    assert (config.max_new_tokens, config.temperature, config.seed) == (7, 0.5, 3)
    assert fake[0].arguments == {
        "model": "m",
        "revision": None,
        "dtype": "auto",
        "device": "cpu",
        "model_id": "x",
    }


def test_run_reads_a_prompt_from_stdin(brainpatch, fake, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 50))
    assert brainpatch("run", "-", "-m", "m").status == 0
    assert fake[0].seen[0].prompt_ids == (50,)


def test_run_streams_to_a_terminal(brainpatch, fake, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert brainpatch("run", "hi", "-m", "m").out == "\\x1b[31mred {}\nsecond\tline\n"


def test_compare_shows_the_baseline_and_each_strength(brainpatch, fake, patch_file):
    done = brainpatch("compare", "-m", "m", "-p", patch_file, "--prompt", "hi", "-s", 0.5, "-s", -1)
    assert [line for line in done.out.splitlines() if line.startswith("---")] == [
        "--- baseline",
        "--- formal +0.5",
        "--- formal -1",
    ]
    single = brainpatch("compare", "-m", "m", "-p", f"{patch_file}@0.25", "--prompt", "hi", "--json")
    document = json.loads(single.out)
    assert [answer["patches"] for answer in document["answers"]] == [{}, {"formal": 0.25}]


def test_trace_joins_like_positions(brainpatch, fake, patch_file):
    done = brainpatch("trace", "hi", "-m", "m", "-p", patch_file)
    assert done.out.splitlines() == [
        "layer  positions  norm    expected  ratio",
        "1      0..2       2.0000  2.0000    1.000000",
        "1      3          0.5000  1.0000    0.500000",
        "2      0          1.0000  0.0000    -",
    ]
    assert len(json.loads(brainpatch("trace", "hi", "-m", "m", "-p", patch_file, "--json").out)) == 5
    assert brainpatch("trace", "hi", "-m", "m", "-p", patch_file, "-s", 0).out == "nothing was added\n"


def test_an_incompatible_patch_is_status_1(brainpatch, fake, patch_file, monkeypatch):
    monkeypatch.setattr(FakeBackend, "describe_model", lambda self: ModelDescriptor("other", 4, 4, "Test"))
    done = brainpatch("run", "hi", "-m", "m", "-p", patch_file)
    assert done.status == 1
    assert "BP201" in done.err
    assert brainpatch("run", "hi", "-m", "m", "-p", patch_file, "--compatibility", "architecture").status == 0
    assert brainpatch("validate", patch_file, "-m", "m").status == 1
    relaxed = brainpatch("validate", patch_file, "-m", "m", "--mode", "architecture")
    assert relaxed.status == 0
    assert "warning: model_id" in relaxed.out
    assert brainpatch("validate", patch_file, "-m", "m", "--mode", "lax").status == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["-p", "{patch}@nan"], "BP402"),
        (["-p", "{patch}", "-s", "inf"], "BP402"),
        (["--temperature", "-1"], "BP404"),
        (["--max-tokens", "0"], "BP404"),
    ],
)
def test_wrong_values_are_status_2_and_a_code(brainpatch, fake, patch_file, arguments, code):
    filled = [a.replace("{patch}", str(patch_file)) for a in arguments]
    done = brainpatch("run", "hi", "-m", "m", *filled)
    assert (done.status, done.out) == (2, "")
    assert f"error: {code}" in done.err
    document = json.loads(brainpatch("run", "hi", "-m", "m", *filled, "--json").out)
    assert set(document["error"]) == {"code", "title", "reason", "remedy"}


def test_a_clamped_strength_is_a_warning_on_stderr(brainpatch, fake, patch_file):
    done = brainpatch("run", "hi", "-m", "m", "-p", f"{patch_file}@99", "--json")
    assert json.loads(done.out)["patches"] == {"formal": 8.0}
    assert "warning: [brainpatch:fake] formal: strength 99" in done.err


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["run"], ["run", "x", "--nonsense"], ["learn", "-m", "x"]]
)
def test_wrong_use_is_status_2(brainpatch, arguments):
    done = brainpatch(*arguments)
    assert done.status == 2
    assert done.err.startswith("error: ")
    assert done.out == ""


def test_an_interruption_is_status_130(brainpatch, fake):
    FakeBackend.broken = KeyboardInterrupt()
    done = brainpatch("run", "hi", "-m", "m")
    assert (done.status, done.out) == (130, "")


def test_an_unexpected_error_has_no_traceback_unless_asked(brainpatch, fake, monkeypatch):
    FakeBackend.broken = ZeroDivisionError("\x1b[2J")
    done = brainpatch("run", "hi", "-m", "m")
    assert done.status == 1
    assert "ZeroDivisionError: \\x1b[2J" in done.err
    from brainpatch.cli.main import run

    monkeypatch.setenv("BRAINPATCH_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run(["run", "hi", "-m", "m"])


def test_help_has_an_example_for_every_command(brainpatch):
    top = brainpatch("--help")
    assert top.status == 0
    commands = [
        line.split()[0] for line in top.out.split("Commands:")[1].strip().splitlines() if line[:4].strip()
    ]
    assert len(commands) == 12
    for command in commands:
        shown = brainpatch(command, "--help")
        assert shown.status == 0
        assert f"Example: brainpatch {command}" in " ".join(shown.out.split())


def test_version(brainpatch):
    assert brainpatch("--version").out == f"brainpatch {__version__}\n"


def test_doctor_and_backends(brainpatch, monkeypatch):
    report = json.loads(brainpatch("doctor", "--json").out)
    assert report["brainpatch_version"] == __version__
    assert "transformers" in brainpatch("doctor").out
    shown = brainpatch("backends").out
    assert "per_request_strength" in shown
    assert "one configuration at a time" in " ".join(shown.split()) or "group by group" in shown
    assert json.loads(brainpatch("backends", "--json").out)[0]["backend"] == "transformers"
    monkeypatch.setattr(discovery, "ENGINES", {"mlx": "brainpatch.backends.mlx_backend"})
    none = brainpatch("doctor")
    assert none.status == 3
    assert "no engine is available" in none.out
    assert brainpatch("doctor", "--json").status == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("formal", ("formal", None)),
        ("formal@0.5", ("formal", 0.5)),
        ("formal@-1", ("formal", -1.0)),
        ("a@b/x.brainpatch", ("a@b/x.brainpatch", None)),
        ("a@b/x.brainpatch@2", ("a@b/x.brainpatch", 2.0)),
        ("@3", ("@3", None)),
        ("formal@", ("formal@", None)),
    ],
)
def test_a_strength_stands_after_the_last_at(text, expected):
    assert split_strength(text) == expected


def test_a_strength_that_is_no_number_is_kept_to_be_refused():
    name, strength = split_strength("formal@nan")
    assert name == "formal"
    assert math.isnan(strength)


# --- in a process of its own ------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["list"], ["inspect", "{patch}"], ["validate", "{patch}"], ["--help"], ["doctor", "--json"]]
)
def test_quick_commands_import_nothing_heavy(command, patch_file):
    arguments = [part.replace("{patch}", str(patch_file)) for part in command]
    code = (
        "import sys; from brainpatch.cli.main import run; status = run(sys.argv[1:]);"
        "heavy = {'numpy', 'torch', 'transformers', 'vllm', 'huggingface_hub', 'rich'};"
        "print(sorted(heavy & set(sys.modules)), status, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[] 0"


def test_exit_statuses_of_the_real_program(patch_file):
    assert outside("inspect", patch_file).status == 0
    assert outside("inspect", "nobody").status == 3
    assert outside("run").status == 2
    patch_file.write_bytes(b"x")
    done = outside("validate", patch_file)
    assert (done.status, done.err) == (1, "")


def test_a_broken_pipe_is_quiet(patch_file):
    command = f"{sys.executable} -m brainpatch inspect {patch_file} | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.model
def test_an_interrupted_learn_ends_with_130_and_leaves_nothing(model_folder, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    command = [
        sys.executable,
        "-m",
        "brainpatch",
        "learn",
        "-m",
        model_folder,
        "--name",
        "joy",
        "-o",
        output / "joy.brainpatch",
    ]
    command += ["--pairs", ROOT / "examples" / "cheerful" / "pairs.jsonl"]
    for wait in (0.05, 1.5, 6.0):
        process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
        )
        time.sleep(wait)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        if wait > 0.5:  # earlier, Python itself may not have begun
            assert process.returncode in (130, 0)
            assert "Traceback" not in err
        if process.returncode != 0:
            assert list(output.iterdir()) == []


@pytest.mark.model
def test_learn_inspect_and_compare_with_the_real_model(brainpatch, model_folder, tmp_path):
    output = tmp_path / "cheerful.brainpatch"
    pairs = ROOT / "examples" / "cheerful" / "pairs.jsonl"
    identity = ("--model-id", "HuggingFaceTB/SmolLM2-135M-Instruct", "--dtype", "float32")
    learned = brainpatch(
        "learn", "-m", model_folder, "--pairs", pairs, "--name", "cheerful", "-o", output, "--layers", "15",
        "--coefficient", 2, *identity,
    )  # fmt: skip
    assert learned.status == 0, learned.err
    assert "block 15: direction norm" in learned.out
    assert "reading: 48/48" in learned.err
    assert load_patch(output).manifest.interventions[0].coefficient == 2.0
    model = ("-m", model_folder, "-b", "transformers", *identity)
    shown = brainpatch(
        "compare", *model, "-p", output, "--prompt", "How was your day?", "--max-tokens", 8, "-s", 1
    )
    assert shown.status == 0, shown.err
    baseline, patched = shown.out.split("--- cheerful +1\n")
    assert baseline.replace("--- baseline\n", "").strip() != patched.strip()
    refused = brainpatch("compare", "-m", model_folder, "-b", "hf", "-p", output, "--prompt", "x")
    assert refused.status == 1
    assert "BP201" in refused.err


@pytest.mark.parametrize(
    ("change", "said"),
    [(["--method", "magic"], "magic"), (["--layers", "x"], "layers 'x'"), (["--backend", "vllm"], "vllm")],
)
def test_learn_refuses_what_it_cannot(brainpatch, tmp_path, change, said):
    done = brainpatch("learn", "-m", "m", "--pairs", "p", "--name", "n", "-o", tmp_path / "x", *change)
    assert done.status == 1
    assert said in done.err
    assert brainpatch("learn", "-m", "m", "--pairs", tmp_path / "p", "--name", "n", "-o", "x").status == 3
