#!/usr/bin/env python3
"""What patches cost in vLLM: the same work on a plain engine and on a patched one, side by side, as ratios.

Both engines are loaded in processes of their own, and only one of them runs at a time: the other is stopped
by a signal. They decode the same batch in turns, a step of the one and a step of the other, so that whatever
else happens on the machine meets both; who is first changes from turn to turn. A ratio is speed, or for the
first token 1 / time: below 1 is slower than what it is compared with. For each round the ratio is that of the
summed times ("step": the median over pairs of steps, which forgets what disturbs a few); given are the median
over the rounds, the smallest and the largest. Two processes of one and the same engine differ by some per cent
for as long as they live, by where their memory lies; so each round loads all engines anew, in turns in this
order and in the other, and an even number of rounds is best. Measure on an otherwise idle machine: the table
says what other processes used, and the arm `noise` what cannot be told apart. `--profile` adds up the time in
the code of the plugin itself, which small costs are better read from.

    python benchmarks/vllm_overhead.py --model MODEL --json eager.json
    python benchmarks/vllm_overhead.py --model MODEL --plugin vllm-lens --python OTHER/bin/python --json lens.json
    python benchmarks/vllm_overhead.py --table eager.json lens.json
    python benchmarks/vllm_overhead.py --model MODEL --profile --arms all-layers --batches 32
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overhead_process import Engine, EngineFailed, busy_seconds

FIRST_TOKENS = {1: 8, 8: 4}
"""How often the first token is timed in a round, by batch; once for all others."""
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 4096
NOTHING: dict[str, Any] = {"edits": None, "different": 1, "every": 1}


@dataclass(frozen=True)
class Arm:
    """Work to measure, and what it is compared with: None is the plain engine without patches.

    `rate` and `first` are the least ratios that are aimed at.
    """

    text: str
    work: dict[str, Any]
    rate: float | None = None
    first: float | None = 0.99
    role: str = "patched"
    against: dict[str, Any] | None = None
    batches: tuple[int, ...] | None = None


ARMS = {
    "noise": Arm(
        "plain against itself: what the measurement cannot tell apart", NOTHING, None, None, "plain again"
    ),
    "idle": Arm("installed, no request uses a patch", NOTHING, 0.995),
    "one-layer": Arm(
        "every request an edit at one block, 32 different",
        {"edits": "one", "different": 32, "every": 1},
        0.99,
    ),
    "all-layers": Arm(
        "every request an edit at every block, 32 different",
        {"edits": "all", "different": 32, "every": 1},
        0.97,
    ),
    "mix": Arm(
        "every second request an edit at one block, 32 different, the others plain",
        {"edits": "one", "different": 32, "every": 2},
    ),
    "many": Arm(
        "256 requests with 256 different edits, against 256 with one and the same, both patched",
        {"edits": "one", "different": 256, "every": 1},
        0.97,
        None,
        against={"edits": "one", "different": 1, "every": 1},
        batches=(256,),
    ),
}


@contextlib.contextmanager
def engines(options: argparse.Namespace, kinds: dict[str, str]) -> Iterator[dict[str, Engine]]:
    """The processes for role -> kind, loaded one after another; all end here."""
    with tempfile.TemporaryDirectory() as scratch:
        running: dict[str, Engine] = {}
        try:
            for role, kind in kinds.items():
                say(f"loading {kind} ({role})")
                folder = Path(scratch) / role
                folder.mkdir()
                settings = {
                    "kind": kind,
                    "model": str(options.model),
                    "dtype": options.dtype,
                    "eager": options.eager,
                    "in_process": options.profile,
                    "max_num_seqs": MAX_NUM_SEQS,
                    "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
                    "scratch": str(folder),
                }
                running[role] = Engine(
                    settings, options.python, environment(options, kind), Path(scratch) / f"{role}.log"
                )
            yield running
        finally:
            for engine in running.values():
                engine.close()


def environment(options: argparse.Namespace, kind: str) -> dict[str, str]:
    """The environment variables of an engine's process."""
    found = {
        # both may use the same cores, since they never run together
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", _cores()),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
    }
    if kind == "plain":
        found["VLLM_PLUGINS"] = ""  # none is loaded
    if options.profile:
        found["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return found


def _cores() -> str:
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


# --- measuring -------------------------------------------------------------------------------------


def pairs(options: argparse.Namespace) -> list[tuple[str, int]]:
    """What a round measures: (arm, batch)."""
    return [(name, batch) for name in options.arms for batch in ARMS[name].batches or options.batches]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds; everything that was measured, as it goes into the JSON file."""
    plugin = options.plugin or "brainpatch"
    samples: list[dict[str, Any]] = []
    for turn in range(options.rounds):
        roles = list(dict.fromkeys(role for name in options.arms for role, _ in sides(name)))
        kinds = {
            role: plugin if role.startswith("patched") else "plain"
            for role in roles[:: -1 if turn % 2 else 1]
        }
        with engines(options, kinds) as running:
            acts = all(running[role].ask("probe")["acts"] for role in roles if role.startswith("patched"))
            if not acts:
                say(f"{plugin}: a steered request answers like a plain one; arms with edits are left out")
                options.arms = [name for name in options.arms if ARMS[name].work["edits"] is None]
            samples += measure_round(options, running, turn)
            versions = running["patched" if "patched" in running else "plain"].versions
            idle_cpu = {role: round(engine.idle_cpu, 3) for role, engine in running.items()}
        if not options.arms:
            break
    return {
        "kind": plugin,
        "acts": acts,
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "eager": options.eager,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "versions": versions,
        "idle_cpu": idle_cpu,
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()},
        "rows": summary(samples),
        "samples": samples,
    }


def measure_round(options: argparse.Namespace, running: dict[str, Engine], turn: int) -> list[dict[str, Any]]:
    """One round of all arms and batches, after a run of each without looking at the clock."""
    wanted = pairs(options)
    for name, batch in wanted:
        for role, work in sides(name):
            running[role].ask("warm", work=work, batch=batch)
    samples = []
    for name, batch in wanted:
        both = [(running[role], work) for role, work in sides(name)]
        samples.append(sample(both, batch, options.tokens, turn))
        samples[-1] |= {"round": turn, "arm": name, "batch": batch}
        ratio, others = rate_ratio(samples[-1]), samples[-1]["others"]
        say(f"round {turn + 1}/{options.rounds}  {name} x {batch}: {ratio:.3f}  (others {others:.2f})")
    return samples


def sides(name: str) -> list[tuple[str, dict[str, Any]]]:
    """(role of an engine, work) of what an arm is compared with, and of the arm."""
    arm = ARMS[name]
    if arm.against is not None:
        return [("patched again", arm.against), ("patched", arm.work)]
    return [("plain", NOTHING), (arm.role, arm.work)]


def sample(both: list[tuple[Engine, dict[str, Any]]], batch: int, tokens: int, turn: int) -> dict[str, Any]:
    """One round of one arm and batch: times of both sides, [reference, arm]."""
    used, busy, since = [engine.cpu_seconds() for engine, _ in both], busy_seconds(), time.perf_counter()
    firsts: list[list[dict[str, float]]] = [[], []]
    for attempt in range(FIRST_TOKENS.get(batch, 1)):
        for side in _order(turn + attempt):
            engine, work = both[side]
            asked = {"work": work, "batch": batch, "seed": 1000 * turn + attempt}
            firsts[side].append(engine.ask("first", **asked))
    counts, steps = in_turns(both, batch, tokens, turn)
    own = sum(engine.cpu_seconds() for engine, _ in both) - sum(used)
    return {
        "first": [[one["first"] for one in side] for side in firsts],
        "parameters": [[one["parameters"] for one in side] for side in firsts],
        "steps": steps,
        "rows": counts[1]["rows"],
        "rows_due": counts[1]["rows_due"],
        "others": (busy_seconds() - busy - own) / (time.perf_counter() - since),
    }


def in_turns(
    both: list[tuple[Engine, dict[str, Any]]], batch: int, tokens: int, turn: int
) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """Decode on both engines, a step on each in turn.

    Returns what each answers in the end, and the seconds of each step in which the whole batch was decoding.
    """
    for engine, work in both:
        engine.windows.clear()
        engine.send("decode", work=work, batch=batch, tokens=tokens, seed=turn)
    ends: list[list[float]] = [[], []]
    answers: list[dict[str, Any]] = [{}, {}]
    while not all(answers):
        turn += 1
        for side in _order(turn):
            if not answers[side]:
                engine = both[side][0]
                line = engine.run()
                if "step" in line:
                    ends[side].append(engine.ran(line["step"]))
                else:
                    answers[side] = line
    steps = []
    for mine in ends:
        admitting = len(mine) - (tokens - 1)  # steps until the last request had its first token
        if not 1 <= admitting < tokens:
            raise EngineFailed(f"{len(mine)} steps for {tokens} tokens: there is no telling what they did")
        steps.append([end - start for start, end in itertools.pairwise(mine[admitting - 1 : tokens])])
    return answers, steps


def _order(turn: int) -> tuple[int, int]:
    return (0, 1) if turn % 2 == 0 else (1, 0)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def rate_ratio(one: dict[str, Any]) -> float:
    """Output tokens per second of the arm, over those of the reference."""
    reference, arm = (statistics.fmean(steps) for steps in one["steps"])
    return reference / arm


def step_ratio(one: dict[str, Any]) -> float:
    """The median of the ratios of neighbouring steps."""
    return statistics.median(reference / arm for reference, arm in zip(*one["steps"], strict=False))


def first_ratio(one: dict[str, Any]) -> float:
    """By the medians of the round."""
    reference, arm = (statistics.median(seconds) for seconds in one["first"])
    return reference / arm


def summary(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each arm and batch."""
    rows = []
    for name, batch in dict.fromkeys((one["arm"], one["batch"]) for one in samples):
        mine = [one for one in samples if (one["arm"], one["batch"]) == (name, batch)]
        rows.append(
            {
                "arm": name,
                "batch": batch,
                "tokens_per_second": batch / statistics.median(s for one in mine for s in one["steps"][1]),
                "rate": spread([rate_ratio(one) for one in mine]),
                "rate_target": ARMS[name].rate,
                "step": spread([step_ratio(one) for one in mine]),
                "first": spread([first_ratio(one) for one in mine]),
                "first_target": ARMS[name].first,
                "first_ms": 1000 * statistics.median(s for one in mine for s in one["first"][1]),
                "parameters_ms": 1000 * statistics.median(s for one in mine for s in one["parameters"][1]),
                "rows_edited": None if mine[0]["rows"] is None else sum(one["rows"] for one in mine),
                "rows_due": sum(one["rows_due"] for one in mine),
                "others": statistics.median(one["others"] for one in mine),
            }
        )
    return rows


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Median, smallest, largest."""
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


# --- what people read ------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    """The rows of one file, as text."""
    versions = found["versions"]
    mode = "eager" if found["eager"] else "compiled"
    lines = [
        f"{found['kind']} against plain vLLM: {found['model']}, {found['dtype']}, {mode}, {found['rounds']} rounds, "
        f"{found['tokens']} tokens",
        ", ".join(f"{name} {version}" for name, version in versions.items())
        + f"; {found['machine']['cpu']}, {found['machine']['cores']} cores",
        "",
        f"{'arm':<11}{'batch':>6}{'tok/s':>9}   {'decoding, ratio':<25}{'target':<14}{'step':<8}"
        f"{'first token, ratio':<25}{'target':<14}{'others':<8}rows edited/due",
    ]
    for row in found["rows"]:
        edited = "" if row["rows_edited"] is None else f"{row['rows_edited']}/{row['rows_due']}"
        lines.append(
            f"{row['arm']:<11}{row['batch']:>6}{row['tokens_per_second']:>9.1f}   {_spread(row['rate']):<25}"
            f"{_verdict(row['rate'], row['rate_target']):<14}{row['step']['median']:<8.3f}"
            f"{_spread(row['first']):<25}{_verdict(row['first'], row['first_target']):<14}"
            f"{row['others']:<8.2f}{edited}".rstrip()
        )
    lines += [
        "",
        *(f"{name}: {ARMS[name].text}" for name in dict.fromkeys(row["arm"] for row in found["rows"])),
    ]
    lines.append("others: cores that were busy with something else meanwhile")
    if not found["acts"]:
        lines.append(f"{found['kind']} does not act here: a steered request answered like a plain one")
    return "\n".join(lines)


def _spread(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['min']:.3f}..{ratio['max']:.3f})"


def _verdict(ratio: dict[str, float], target: float | None) -> str:
    if target is None:
        return "-"
    return f"{target:.3f} {'met' if ratio['median'] >= target else 'missed'}"


# --- profile -----------------------------------------------------------------------------------------


def profile(options: argparse.Namespace) -> str:
    """Where the time of a decoding goes on the patched engine, which then lives in one process."""
    texts = []
    with engines(options, {"patched": options.plugin or "brainpatch"}) as running:
        for name, batch in pairs(options):
            if ARMS[name].role == "patched":
                say(f"profiling {name} x {batch}")
                asked = {"work": ARMS[name].work, "batch": batch, "tokens": options.tokens}
                texts.append(f"{name} x {batch}\n{running['patched'].ask('profile', **asked)['text']}")
    return "\n".join(texts)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(ARMS)):
        raise argparse.ArgumentTypeError(f"no arm is called {', '.join(unknown)}; known: {', '.join(ARMS)}")
    return names


def _numbers(text: str) -> list[int]:
    numbers = [int(number) for number in text.split(",")]
    if not all(1 <= number <= MAX_NUM_SEQS for number in numbers):
        raise argparse.ArgumentTypeError(f"a batch has 1 to {MAX_NUM_SEQS} requests")
    return numbers


def arguments() -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of the model that both engines load")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--eager", action="store_true", default=True, help="without compilation (the default)")
    mode.add_argument("--compiled", dest="eager", action="store_false", help="as vLLM compiles by itself")
    parser.add_argument("--rounds", type=int, default=6, help="measurements of each arm (6)")
    parser.add_argument(
        "--batches", type=_numbers, default=[1, 8, 32, 128], help="requests at once (1,8,32,128)"
    )
    parser.add_argument("--tokens", type=int, default=16, help="tokens that a request decodes (16)")
    measured = [name for name in ARMS if name != "noise"]
    parser.add_argument(
        "--arms",
        type=_names,
        default=measured,
        help="some of " + ", ".join(ARMS) + "; all but noise unless given",
    )
    parser.add_argument("--noise", action="store_true", help="measure the arm noise, too")
    parser.add_argument(
        "--plugin", choices=("vllm-lens", "hotwire"), help="measure this plugin instead of BrainPatch"
    )
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of the environment of both engines (this one)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured here")
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="print the tables of such files, and measure nothing",
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where the time goes in each arm, and measure nothing"
    )
    options = parser.parse_args()
    if options.table is None and options.model is None:
        parser.error("--model is needed")
    if options.tokens < 8 or options.rounds < 1:
        parser.error("at least 8 tokens and 1 round are needed")
    if options.noise and "noise" not in options.arms:
        options.arms = ["noise", *options.arms]
    return options


def main() -> int:
    """Measure, or print what was measured."""
    options = arguments()
    if options.table is not None:
        print("\n\n".join(table(json.loads(file.read_text())) for file in options.table))
        return 0
    try:
        if options.profile:
            print(profile(options))
            return 0
        found = measure(options)
    except EngineFailed as error:
        print(f"an engine failed:\n{error}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
