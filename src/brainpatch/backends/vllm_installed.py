"""One set of patches for all requests: the road of an engine that has our worker extension alone.

Its workers hold one configuration at a time, and a batch that needs several runs group by group. Serves a
`vllm.LLM` whose worker class is somebody else's; eager only.

State and who owns it: `_applied` is the digest of what the workers hold, or None when unknown. It is changed
by `_ensure` alone, inside the one call that is let in at a time.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

from brainpatch.backends.vllm_drivers import LLMDriver
from brainpatch.errors import CapabilityError, EngineError, EngineStateError
from brainpatch.runtime.config import GenerationConfig
from brainpatch.runtime.meaning import ResolvedSet
from brainpatch.runtime.requests import Generation, Request, TraceRow

EMPTY = ResolvedSet()
_EVERYWHERE = "the worker extension adds the same at every position; start vLLM with BrainPatchWorker"

# (relative step, smallest number) of the dtypes that a residual stream has
_PRECISION = {
    "float32": (2.0**-23, 2.0**-149),
    "bfloat16": (2.0**-8, 2.0**-133),
    "float16": (2.0**-10, 2.0**-24),
}

Ask = Callable[[Sequence[Request], "str | None"], list[Generation]]
"""Generates requests of one configuration; the text, where there is one, is the salt of all of them."""


class InstalledPatches:
    """What the workers of one engine hold.

    `report` says what they answered to the last change: a mapping with the keys digest, layers, norms
    {layer: L2 norm as cast}, expected {layer: L2 norm}, dtype, hooks (number of edited blocks), ranks.
    """

    def __init__(self, driver: LLMDriver, ask: Ask, warn: Callable[[str], None]) -> None:
        """Finds out what the blocks return. Errors: EngineError (BP503, BP504, BP505, BP506)."""
        self.report: dict[str, Any] = {}
        self._driver = driver
        self._ask = ask
        self._applied: str | None = EMPTY.digest
        self._rows: dict[int, int] = {}
        self._in_call = Lock()
        result = self._find_forms()
        expected, found = result["expected_form"], set(result["forms"].values())
        if expected is not None and found - {expected}:
            forms = ", ".join(sorted(found))
            warn(f"the blocks return {forms}, and {expected} was expected; what was found is used")

    def _find_forms(self) -> dict[str, Any]:
        """Prove that an edit reaches the stream, block kind by block kind; returns rank 0's probe."""
        probes = self._driver.rpc("bp_probe")
        total = probes[0]["num_layers"]
        missing = sorted(set(range(total)) - {layer for probe in probes for layer in probe["local_layers"]})
        if missing:
            raise EngineError(
                "BP503", f"no rank holds the blocks {missing} of {total} at {probes[0]['path']}"
            )
        self._watched_pass(-1, 0)
        cases = {(case[0], case[1]) for rank in self._driver.rpc("bp_form_stop") for case in rank["cases"]}
        for layer, element in sorted(cases):
            self._watched_pass(layer, element)
            self._driver.rpc("bp_form_stop")
        return self._driver.rpc("bp_form_result")[0]

    def _watched_pass(self, layer: int, element: int) -> None:
        self._driver.rpc("bp_form_start", layer, element)
        probe = Request(tuple(range(8)), GenerationConfig(max_new_tokens=1), EMPTY)
        self._ask([probe], f"brainpatch-probe:{uuid.uuid4()}")

    @staticmethod
    def check(patches: ResolvedSet) -> None:
        """CapabilityError (BP502) for a set that depends on the position."""
        if patches.depends_on_position:
            names = ", ".join(patch.name for patch in patches.patches)
            raise CapabilityError("BP502", f"{names}: a schedule or a site, and {_EVERYWHERE}")

    def run(self, requests: Sequence[Request]) -> list[Generation]:
        """Generate, group by group. EngineStateError (BP409) while another thread is in a call."""
        with self._exclusive():
            answers: dict[int, Generation] = {}
            for members in self._groups(requests):
                group = [requests[index] for index in members]
                self._ensure(group[0].patches)
                try:
                    made = self._ask(group, None)
                except BaseException:
                    self._applied = None  # what ran until now was not checked
                    raise
                self._check_work(group[0].patches, made)
                answers |= zip(members, made, strict=True)
            return [answers[index] for index in range(len(requests))]

    def trace(self, request: Request) -> list[TraceRow]:
        """What was added while the request was answered."""
        with self._exclusive():
            self._ensure(request.patches)
            self._driver.rpc("bp_trace_start")
            try:
                # a salt of its own: every position is computed, none comes from the cache
                answer = self._ask([request], f"brainpatch-trace:{uuid.uuid4()}")[0]
            finally:
                measured = self._driver.rpc("bp_trace_stop")
            self._check_work(request.patches, [answer])
            length = answer.prompt_tokens + len(answer.token_ids) - 1
            return _trace_rows(measured, request.patches, length, self.report)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One call at a time; another thread's is refused, not queued."""
        if not self._in_call.acquire(blocking=False):
            raise EngineStateError("BP409", "another call is running on this vLLM engine")
        try:
            yield
        finally:
            self._in_call.release()

    def _groups(self, requests: Sequence[Request]) -> list[list[int]]:
        """Indices of requests that need one configuration, the one that is applied now first."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.patches.digest, []).append(index)
        return [groups[digest] for digest in sorted(groups, key=lambda digest: digest != self._applied)]

    def _ensure(self, patches: ResolvedSet) -> None:
        """Make the workers hold `patches`; sends the edits only when they hold another set."""
        if self._applied == patches.digest:
            return
        self._applied = None
        edits = {layer: _static_coefficients(patches, layer) for layer in patches.layers}
        deltas = {layer: patches.sum(layer, edit).tolist() for layer, edit in edits.items()}
        probes = self._driver.rpc("bp_apply_deltas", deltas)
        if any(probe["was_broken"] for probe in probes):
            self._driver.rpc("bp_clear_cache")
            self._driver.reset_cache()
        report = _agreed(probes)
        expected = {layer: patches.expected_norm(layer, edit) for layer, edit in edits.items()}
        if report["layers"] != list(patches.layers):
            raise EngineError(
                "BP506", f"blocks {list(patches.layers)} were to be edited, {report['layers']} are"
            )
        step, smallest = _PRECISION.get(report["dtype"], (2.0**-7, 2.0**-24))
        slack = smallest * math.sqrt(probes[0]["hidden_size"])
        for layer, norm in expected.items():
            if abs(report["norms"][layer] - norm) > step * norm + slack:
                raise EngineError(
                    "BP506",
                    f"the edit at block {layer} has norm {report['norms'][layer]:g}, expected {norm:g}",
                )
        self.report = {"digest": patches.digest, "expected": expected, **report}
        self._rows = dict.fromkeys(expected, 0)
        self._applied = patches.digest

    def _check_work(self, patches: ResolvedSet, made: Sequence[Generation]) -> None:
        """Every computed token went through every edited block's hook (BP506), and no logit broke (BP509)."""
        if not self._rows:
            return
        probes = self._driver.rpc("bp_probe")
        counted = {int(layer): rows for probe in probes for layer, rows in probe["rows_edited"].items()}
        computed = sum(one.prompt_tokens - one.cached_tokens + len(one.token_ids) - 1 for one in made)
        for layer, before in self._rows.items():
            edited = counted.get(layer, 0) - before
            if edited < computed:
                raise EngineError("BP506", f"block {layer} was edited for {edited} of {computed} tokens")
        self._rows = {layer: counted[layer] for layer in self._rows}
        if any(probe["broken_logits"] for probe in probes):
            self._applied = None  # so that the next call applies anew, and clears what was broken
            raise EngineError("BP509", f"NaN or infinite logits with the patches {patches.to_mapping()}")


def _static_coefficients(patches: ResolvedSet, layer: int) -> tuple[float, ...]:
    """The layer's coefficients, for a set that does not depend on position."""
    return patches.segments(layer, 0, 1, 1)[0].coefficients


def _agreed(probes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The report of all ranks as one. EngineError (BP508) when two ranks of one block differ."""
    norms: dict[int, float] = {}
    for probe in probes:
        for layer, norm in probe["norms"].items():
            if norms.setdefault(int(layer), norm) != norm:
                raise EngineError("BP508", f"the ranks hold different edits at block {layer}")
    if len({probe["dtype"] for probe in probes}) != 1:
        raise EngineError("BP508", "the ranks run in different dtypes")
    return {
        "layers": sorted(norms),
        "norms": dict(sorted(norms.items())),
        "dtype": probes[0]["dtype"],
        "hooks": len(norms),
        "ranks": len(probes),
    }


def _trace_rows(
    measured: Sequence[Mapping[str, Any]], patches: ResolvedSet, length: int, report: Mapping[str, Any]
) -> list[TraceRow]:
    """Rows by layer and position. EngineError (BP508) unless every position was seen exactly once."""
    rows: dict[tuple[int, int], TraceRow] = {}
    for rank in measured:
        for name, norms in rank["norms"].items():
            layer = int(name)
            # an engine that schedules ahead may compute one more token than the answer has
            seen = [(p, n) for p, n in zip(rank["positions"], norms, strict=False) if p < length]
            if sorted(p for p, _ in seen) != list(range(length)):
                raise EngineError("BP508", f"the trace saw {len(seen)} rows for {length} positions")
            for position, norm in seen:
                row = TraceRow(layer, position, norm, report["expected"][layer], report["dtype"])
                rows.setdefault((layer, position), row)
    if len(rows) != length * len(patches.layers):
        raise EngineError(
            "BP506", f"{len(rows)} edits were measured, {length * len(patches.layers)} were due"
        )
    return [rows[key] for key in sorted(rows)]
