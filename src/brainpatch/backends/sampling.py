"""Choosing a row's next token from its logits, by the row's own parameters and draws.

One place for every engine that hands out logits, so that the same parameters mean the same there. The order is
Transformers' own: repetition penalty, presence and frequency penalties, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from brainpatch.backends.answers import Answer
from brainpatch.errors import EngineError
from brainpatch.runtime.requests import Request

Logits = NDArray[np.float32]


def advance(answer: Answer, logits: Logits) -> None:
    """Choose the next token of an answer and add it; NaN ends this answer alone, with BP509.

    `logits`: float32 [vocabulary], not changed.
    """
    answer.hear()
    if answer.done:
        return
    if not np.isfinite(logits.max()):  # NaN spreads to the maximum
        answer.fail(not_finite(answer.request))
        return
    request, config = answer.request, answer.request.config
    if request.rows is not None:
        request.rows.append(log_softmax(logits))
    if request.forced:
        token = request.forced[len(answer.token_ids)]
    else:
        changed = _penalised(answer, logits)
        token = _draw(answer, changed) if config.do_sample else int(changed.argmax())
    if config.logprobs is not None:
        answer.logprobs.append(_likeliest(log_softmax(logits), config.logprobs, token))
    answer.add(token)


def log_softmax(logits: Logits) -> Logits:
    """Natural log-probabilities, float32."""
    shifted = logits - logits.max()
    normalised: Logits = shifted - np.log(np.exp(shifted).sum())
    return normalised


def _likeliest(logprobs: Logits, count: int, token: int) -> dict[int, float]:
    """The `count` likeliest tokens, the likeliest first, and the chosen one."""
    best = np.argpartition(logprobs, -count)[-count:] if count else np.empty(0, dtype=np.int64)
    best = best[np.argsort(-logprobs[best], kind="stable")]
    row = {int(one): float(logprobs[one]) for one in best}
    row.setdefault(token, float(logprobs[token]))
    return row


def _penalised(answer: Answer, logits: Logits) -> Logits:
    config = answer.request.config
    repeated = config.repetition_penalty != 1.0
    counted = bool(answer.counts) and bool(config.presence_penalty or config.frequency_penalty)
    if not repeated and not counted:
        return logits
    logits = logits.copy()
    if repeated:
        seen = np.unique([*answer.request.prompt_ids, *answer.token_ids])
        penalty = np.float32(config.repetition_penalty)
        logits[seen] = np.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
    if counted:
        counts = np.array(list(answer.counts.values()))
        logits[list(answer.counts)] -= config.presence_penalty + config.frequency_penalty * counts
    return logits


def _draw(answer: Answer, logits: Logits) -> int:
    config = answer.request.config
    scores = logits.astype(np.float64) / config.temperature
    ids = np.arange(len(scores))
    if 0 < config.top_k < len(scores):
        ids = np.argpartition(-scores, config.top_k - 1)[: config.top_k]
    if config.top_p < 1.0:
        ids = ids[np.argsort(-scores[ids], kind="stable")]
    weights = np.exp(scores[ids] - scores.max())
    weights /= weights.sum()
    if config.top_p < 1.0:  # the fewest that reach top_p together
        kept = int(np.searchsorted(np.cumsum(weights), config.top_p)) + 1
        ids, weights = ids[:kept], weights[:kept]
    if config.min_p > 0.0:
        likely = weights >= config.min_p * weights.max()
        ids, weights = ids[likely], weights[likely]
    return int(answer.random.choice(ids, p=weights / weights.sum()))


def not_finite(request: Request) -> EngineError:
    """BP509 for a request."""
    strengths = ", ".join(f"{patch.name}@{patch.strength:g}" for patch in request.patches.patches)
    return EngineError("BP509", f"with {strengths or 'no patch'}, the model gives NaN or infinite logits")
