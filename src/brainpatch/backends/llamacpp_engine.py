"""llama.cpp at work on requests: which tokens of which request a step computes, and what is added in it.

Everything here belongs to the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from brainpatch.backends.answers import Answer
from brainpatch.backends.llamacpp_edits import NodeEdits, Stretch, Vector, Vectors, control_vector
from brainpatch.backends.llamacpp_library import open_library
from brainpatch.backends.llamacpp_model import GgufModel, Settings
from brainpatch.backends.sampling import Logits, advance, not_finite
from brainpatch.errors import EngineError
from brainpatch.runtime.meaning import PreparedIntervention, ResolvedPatch, ResolvedSet
from brainpatch.runtime.requests import Listener, Request, TraceRow


@dataclass
class _Row:
    """A request at work: the tokens from `position` on are `pending`, not computed yet."""

    answer: Answer
    sequence: int
    pending: list[int]
    position: int = 0
    trace: list[TraceRow] = field(default_factory=list)

    @property
    def room(self) -> int:
        """How many tokens it may come to have in the context."""
        return _room(self.answer.request)


class Engine:
    """A loaded model and the way in which it is edited, "callback" or "control-vector"."""

    def __init__(self, path: Path, settings: Settings) -> None:
        """Load and prove. Errors: EngineError (BP503 to BP507)."""
        self._vectors = Vectors()
        self._edits: NodeEdits | None = None
        self._control: bytes = b""
        if settings.editing != "control-vector":
            self._edits = NodeEdits(open_library())
        self.model = GgufModel(path, settings, self._edits and self._edits.on_node)
        try:
            self._prove(path, settings)
        except BaseException:
            self.close()
            raise
        self.editing = "callback" if self._edits is not None else "control-vector"

    def close(self) -> None:
        """Free the model. May be called more than once."""
        self.model.close()

    def generate(
        self,
        requests: Sequence[Request],
        listeners: Sequence[Listener] | None,
        slots: int,
        gone: Callable[[], bool],
        *,
        measured: bool = False,
    ) -> tuple[list[Answer], list[TraceRow]]:
        """Answer all requests, `slots` of them at a time at most, and of the last one what was measured."""
        heard: Sequence[Listener | None] = listeners or [None] * len(requests)
        tokenizer = self.model.tokenizer
        answers = [
            Answer(request, tokenizer.decode, tokenizer.end_ids, listener)
            for request, listener in zip(requests, heard, strict=True)
        ]
        waiting = deque(answers)
        free = list(range(slots))
        running: list[_Row] = []
        trace: list[TraceRow] = []
        try:
            while (waiting or running) and not gone():
                while waiting and free and self._may_join(waiting[0].request, running):
                    answer = waiting.popleft()
                    running.append(_Row(answer, free.pop(), list(answer.request.prompt_ids)))
                self._step(running, measured=measured)
                for row in [row for row in running if row.answer.done]:
                    running.remove(row)
                    free.append(row.sequence)
                    self.model.forget(row.sequence)
                    trace = row.trace
        except BaseException:
            self.model.forget_all(wipe=True)  # a step that was cut off may have left anything
            raise
        self.model.forget_all()
        return answers, trace

    def _may_join(self, request: Request, running: Sequence[_Row]) -> bool:
        """Whether there is room for a request beside those that run, and its patches can act in the same step."""
        if sum(row.room for row in running) + _room(request) > self.model.context_length:
            return False
        if not running:
            return True
        if self.model.one_by_one:
            return False
        if self._edits is not None:
            return True
        beside = running[0].answer.request.patches
        return beside.digest == request.patches.digest and not beside.depends_on_position

    def _step(self, running: Sequence[_Row], *, measured: bool) -> None:
        """Compute one token of each that answers, and as much of the prompts as fits beside."""
        stretches: list[Stretch] = []
        at_work: list[_Row] = []
        rows: list[tuple[int, int, int, bool]] = []
        for row in sorted(running, key=lambda row: len(row.pending)):
            row.answer.hear()
            count = min(len(row.pending), self.model.step_size - len(rows))
            if row.answer.done or not count:
                continue
            request = row.answer.request
            stretches.append(
                Stretch(request.patches, len(request.prompt_ids), len(rows), row.position, count)
            )
            at_work.append(row)
            for offset in range(count):
                wanted = offset == len(row.pending) - 1 or measured
                rows.append((row.pending[offset], row.position + offset, row.sequence, wanted))
        if not rows:
            return
        self._compute(rows, stretches, measured=measured)
        ends = [
            (row, stretch.first + stretch.length - 1)
            for row, stretch in zip(at_work, stretches, strict=True)
            if stretch.length == len(row.pending)
        ]
        if not all(np.isfinite(self.model.logits(end).max()) for _, end in ends):
            self._part_with_broken(running)
            return
        for row, stretch in zip(at_work, stretches, strict=True):
            if measured and self._edits is not None:
                row.trace += self._edits.trace(stretch)
            row.pending = row.pending[stretch.length :]
            row.position += stretch.length
        for row, end in ends:
            advance(row.answer, self.model.logits(end))
            row.pending = row.answer.token_ids[-1:]

    def _part_with_broken(self, running: Sequence[_Row]) -> None:
        """Find out whose numbers are not finite, end those answers, and let the others begin again.

        All sequences share one cache. What a row must not see is multiplied by 0 there, and 0 times NaN is NaN: one
        broken request spoils the numbers of all, and those of later ones that get its place.
        """
        for row in running:
            self.model.forget_all(wipe=True)
            row.pending = [*row.answer.request.prompt_ids, *row.answer.token_ids]
            row.position = 0
            if not row.answer.done and not np.isfinite(self._alone(row).max()):
                row.answer.fail(not_finite(row.answer.request))
        self.model.forget_all(wipe=True)

    def _alone(self, row: _Row) -> Logits:
        """The logits after all tokens of a row, computed with nothing beside it."""
        request = row.answer.request
        for start in range(0, len(row.pending), self.model.step_size):
            part = row.pending[start : start + self.model.step_size]
            rows = [
                (token, start + offset, row.sequence, offset == len(part) - 1)
                for offset, token in enumerate(part)
            ]
            self._compute(rows, [Stretch(request.patches, len(request.prompt_ids), 0, start, len(part))])
        return self.model.logits(len(part) - 1)

    def _compute(
        self,
        rows: Sequence[tuple[int, int, int, bool]],
        stretches: Sequence[Stretch],
        *,
        measured: bool = False,
    ) -> None:
        plan = self._vectors.plan(stretches)
        if self._edits is None:
            vector = control_vector(plan, self.model.layers, self.model.width)
            held = b"" if vector is None else vector.tobytes()
            if held != self._control:
                self.model.set_control_vector(vector)
                self._control = held
            self.model.decode(rows)
            return
        with_logits = [i for i, row in enumerate(rows) if row[3]]
        for _ in range(2):
            self._edits.begin(plan, len(rows), with_logits, measured=measured)
            self.model.decode(rows)
            if self._edits.end():
                return
            # The graph is another than it was for a step of this shape: drop what was computed, and look again.
            for stretch in stretches:
                _, position, sequence, _ = rows[stretch.first]
                if not self.model.forget(sequence, position):
                    raise EngineError("BP508", "llama.cpp cannot repeat a step of this model")
        raise EngineError("BP508", "llama.cpp's graph changes from step to step")

    # --- proof at load -----------------------------------------------------------------------

    def _prove(self, path: Path, settings: Settings) -> None:
        """That all streams can be edited, that an edit moves the logits, and that nothing of it stays."""
        if self._edits is not None:
            self._edits.shape(self.model.layers, self.model.width)
            still = np.zeros(self.model.width, dtype=np.float32)
            try:
                self._logits_of(dict.fromkeys(range(self.model.layers), still))
            except EngineError as error:
                if settings.editing == "callback" or error.code != "BP503":
                    raise
                self.model.close()  # without the callback a step is faster
                self._edits = None
                self.model = GgufModel(path, settings, None)
        layer = self.model.layers // 2
        vector = np.random.default_rng(0).standard_normal(self.model.width).astype(np.float32)
        plain = self._logits_of({})
        edited = self._logits_of({layer: vector})
        if np.array_equal(plain, edited):
            raise EngineError("BP506", f"an edit at block {layer} changes no logit")
        if not np.array_equal(plain, self._logits_of({})):
            raise EngineError("BP506", "an edit is still there in the next step")

    def _logits_of(self, edits: dict[int, Vector]) -> Vector:
        """The last logits of three tokens with a vector added at some blocks."""
        items = tuple(
            PreparedIntervention(layer, "all", 1.0, vector, bytes([number]))
            for number, (layer, vector) in enumerate(edits.items())
        )
        patches = ResolvedSet([ResolvedPatch("proof", 1.0, None, items)])
        ids = [token % len(self.model.tokenizer) for token in (1, 2, 3)]
        rows = [(token, position, 0, position == 2) for position, token in enumerate(ids)]
        try:
            self._compute(rows, [Stretch(patches, 3, 0, 0, 3)])
            return self.model.logits(2).copy()
        finally:
            self.model.forget_all()


def _room(request: Request) -> int:
    return len(request.prompt_ids) + request.config.max_new_tokens
