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

from brainpatch import __version__, load_patch, save_patch
from brainpatch.cli import learning
from brainpatch.patch.compatibility import ModelDescriptor
from brainpatch.patch.names import split_strength
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


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["-p", "nobody"], 3, "BP302"),
        (["-p", "{bad}"], 1, "BP102"),
        (["-p", "{patch}", "-p", "{patch}"], 2, "BP403"),
        (["-p", "{patch}@inf"], 2, "BP402"),
        (["-p", "{patch}", "-s", "nan"], 2, "BP402"),
        (["-p", "{patch}", "--compatibility", "lax"], 2, "BP202"),
        (["-p", "{patch}", "--max-tokens", "0"], 2, "BP404"),
    ],
)
@pytest.mark.parametrize("command", [["run", "hi"], ["compare", "--prompt", "hi"], ["trace", "hi"]])
def test_what_can_be_refused_is_refused_before_a_model_is_loaded(
    brainpatch, fake, patch_file, command, arguments, status, code
):
    bad = patch_file.with_name("bad.brainpatch")
    bad.write_bytes(b"<html>")
    filled = [a.replace("{patch}", str(patch_file)).replace("{bad}", str(bad)) for a in arguments]
    done = brainpatch(*command, "-m", "m", *filled)
    assert (done.status, done.out) == (status, "")
    assert f"error: {code} " in done.err
    assert fake == []


@pytest.mark.parametrize(("prompt", "system"), [("", None), ("\udcff", None), ("hi", "\udcff")])
def test_a_prompt_that_is_no_text_is_status_2(brainpatch, fake, prompt, system):
    extra = [] if system is None else ["--system", system]
    done = brainpatch("run", prompt, "-m", "m", *extra)
    assert (done.status, done.out) == (2, "")
    assert "error: BP405" in done.err
    assert fake == []


def test_a_patch_of_a_hub_is_fetched_by_the_model(brainpatch, fake, patch_file, monkeypatch):
    asked = []

    def fetched(self, ref):
        asked.append(ref)
        return load_patch(patch_file)

    monkeypatch.setattr("brainpatch.runtime.model.BrainPatchedModel._from_hub", fetched)
    done = brainpatch("run", "hi", "-m", "m", "-p", "owner/repo@0.5", "--json")
    assert json.loads(done.out)["patches"] == {"formal": 0.5}
    assert asked == ["owner/repo"]
    twins = brainpatch("run", "hi", "-m", "m", "-p", patch_file, "-p", "owner/repo")
    assert twins.status == 2
    assert "BP403" in twins.err


def test_a_registry_that_cannot_be_read_is_no_reason_to_ask_a_hub(brainpatch, fake, monkeypatch):
    monkeypatch.setenv("BRAINPATCH_HOME", os.devnull)
    done = brainpatch("run", "hi", "-m", "m", "-p", "owner/repo")
    assert done.status == 3
    assert "error: BP307" in done.err
    assert fake == []


def test_what_an_engine_prints_is_no_result(brainpatch, fake, monkeypatch):
    monkeypatch.setattr(FakeBackend, "load_model", lambda self, model, **_: print("noise"))
    done = brainpatch("run", "hi", "-m", "m", "--json")
    assert json.loads(done.out)["backend"] == "fake"
    assert "noise" in done.err


def test_trace_writes_null_for_what_json_does_not_have(brainpatch, fake, patch_file, monkeypatch):
    rows = [TraceRow(1, 0, math.nan, math.inf, "float16")]
    monkeypatch.setattr(FakeBackend, "_run_trace", lambda self, request: rows)
    done = brainpatch("trace", "hi", "-m", "m", "-p", patch_file, "--json")
    assert json.loads(done.out) == [
        {"layer": 1, "position": 0, "norm": None, "expected": None, "applied_dtype": "float16"}
    ]


def test_options_of_a_chat_reach_the_engine(brainpatch, fake):
    brainpatch("run", "hi", "-m", "m", "--system", "Be kind.")
    brainpatch("run", "hi", "-m", "m", "--no-chat-template", "--json")
    assert [(one["system"], one["use_chat_template"]) for engine in fake for one in engine.encoded] == [
        ("Be kind.", True),
        (None, False),
    ]


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
    assert done.err.startswith("error: wrong use: ")
    assert done.out == ""
    if arguments[:1] in (["run"], ["learn"]):
        document = json.loads(brainpatch(*arguments, "--json").out)
        assert document["error"]["code"] == "usage"
        assert document["error"]["remedy"] == f"brainpatch {arguments[0]} --help"


def test_json_after_a_double_dash_is_a_prompt(brainpatch, fake):
    FakeBackend.broken = ZeroDivisionError()
    done = brainpatch("run", "-m", "m", "--", "--json")
    assert (done.status, done.out) == (1, "")


def test_an_interruption_is_status_130(brainpatch, fake):
    FakeBackend.broken = KeyboardInterrupt()
    done = brainpatch("run", "hi", "-m", "m")
    assert (done.status, done.out) == (130, "")


def test_an_unexpected_error_has_no_traceback_unless_asked(brainpatch, fake, monkeypatch):
    FakeBackend.broken = ZeroDivisionError("\x1b[2J")
    done = brainpatch("run", "hi", "-m", "m")
    assert done.status == 1
    assert "error: not expected: ZeroDivisionError: \\x1b[2J" in done.err
    document = json.loads(brainpatch("run", "hi", "-m", "m", "--json").out)
    assert document["error"]["code"] == "internal"
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
    assert len(commands) == 14
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
    assert "one set of patches for all requests" in " ".join(shown.split())
    assert json.loads(brainpatch("backends", "--json").out)[0]["backend"] == "transformers"
    monkeypatch.setattr(discovery, "ENGINES", {"mlx": "brainpatch.backends.not_written"})
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
        _, err = process.communicate(timeout=300)
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
    ("change", "status", "said"),
    [
        (["--method", "magic"], 2, "'magic' is not one of mean-difference"),
        (["--backend", "vllm"], 2, "'vllm' is not one of transformers"),
        (["--site", "here"], 2, "'here' is not one of all, prompt, continuation"),
        (["--position", "first"], 2, "'first' is not one of last"),
        (["--layers", "x"], 2, "'x' is not like 15, 10-20"),
        (["--layers", "20-10"], 2, "'20-10' is not like"),
        (["--layers", "0-99999"], 2, "'0-99999' is not like"),
        (["--name", "Formal"], 1, "BP113"),
        (["--coefficient", "nan"], 1, "BP110"),
        (["--coefficient", "1e9"], 1, "BP110"),
        (["-o", "there.brainpatch"], 1, "BP121"),
        (["--pairs", "nobody"], 3, "BP101"),
        (["--pairs", "there.brainpatch"], 1, "BP601"),
    ],
)
def test_learn_refuses_before_it_loads_a_model(brainpatch, tmp_path, monkeypatch, change, status, said):
    monkeypatch.chdir(tmp_path)
    Path("there.brainpatch").touch()
    Path("pairs.jsonl").write_text('{"positive": "a", "negative": "b"}\n' * 2)
    monkeypatch.setattr(discovery, "select_backend", lambda name: pytest.fail("too late"))
    done = brainpatch("learn", "-m", "m", "--pairs", "pairs.jsonl", "--name", "n", "-o", "x", *change)
    assert done.status == status
    assert said in done.err
    assert done.out == ""
    document = json.loads(
        brainpatch("learn", "-m", "m", "--pairs", "p", "--name", "n", "-o", "x", *change, "--json").out
    )
    assert list(document) == ["error"]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [("auto", None), ("15", [15]), ("2-4", [2, 3, 4]), ("3,15,3", [3, 15]), ("7-7,0-1", [0, 1, 7])],
)
def test_layers_are_numbers_and_ranges(text, blocks):
    assert learning._layers(text) == blocks


def _pipe(*parts):
    done = subprocess.run(
        ["bash", "-c", " ".join(map(str, parts))], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_what_else_can_be_wrong_with_stdin_and_stdout(patch_file):
    """A closed or full stdout, a reader that went away, a closed stdin, a terminal without the letters."""
    program = f"{sys.executable} -m brainpatch"
    loaded = load_patch(patch_file)
    loaded.manifest.description = "\u0416"
    save_patch(loaded.manifest, loaded.vectors, patch_file, overwrite=True)
    status, _, err = _pipe(program, "inspect", patch_file, "> /dev/full")
    assert status == 1
    assert "No space left" in err
    assert "Exception ignored" not in err
    assert _pipe(program, "inspect", patch_file, ">&-") == (0, "", "")
    assert _pipe("set -o pipefail;", program, "inspect", patch_file, "| true") == (141, "", "")
    status, _, err = _pipe(program, "run - -m x <&-")
    assert (status, "stdin is closed" in err) == (2, True)
    status, _, err = _pipe("printf '\\xff' |", program, "run - -m x")
    assert (status, "BP405" in err) == (2, True)
    status, out, err = _pipe("PYTHONIOENCODING=latin-1", program, "inspect", patch_file)
    assert (status, err) == (0, "")
    assert "\\u0416" in out


def test_the_shell_can_complete():
    environment = {"_BRAINPATCH_COMPLETE": "complete_bash", "COMP_WORDS": "brainpatch in", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "brainpatch"],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=True,
    )
    assert done.stdout.split() == ["install", "inspect"]


def test_only_results_reach_stdout(tmp_path):
    """Whatever an engine, its native libraries or its processes print goes to stderr."""
    code = """if True:
        import os, subprocess, sys
        from brainpatch.cli import output
        output.claim_stdout()
        with output.engine_prints_to_stderr():
            print("python")
            os.write(1, b"native\\n")
            subprocess.run([sys.executable, "-c", "print('child')"], check=True)
            output.say("result \\u20ac")
        output.say("after")
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.stdout == "result \\u20ac\nafter\n"
    assert sorted(done.stderr.split()) == ["child", "native", "python"]


def test_an_interruption_of_a_generation_is_status_130(tmp_path):
    """A real SIGINT to a real process, while an engine is at work that swallows KeyboardInterrupt."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\n"
        "from brainpatch.runtime import model\n"
        "from tests.runtime.engine import RecordingBackend\n"
        "class Slow(RecordingBackend):\n"
        "    def _run(self, requests):\n"
        "        print('at work', file=sys.stderr, flush=True)\n"
        "        try:\n"
        "            time.sleep(60)\n"
        "        except KeyboardInterrupt:  # as vLLM does while it starts\n"
        "            time.sleep(60)\n"
        "model.select_backend = lambda name: Slow()\n"
        "from brainpatch.__main__ import main\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, program, "run", "hi", "-m", "m"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
    )
    said = ""
    while "at work" not in said:
        said += process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in said + err
    assert "interrupted" in err
