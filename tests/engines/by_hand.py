"""The meaning applied the long way: no cache, no batch, one explicit number for each position.

It shares nothing with the engine but the formula of docs/semantics.md, and the engine is compared with it.
"""

from __future__ import annotations

import torch


def delta(patch, strength, schedule, layer, position, prompt_length):
    """What one patch adds at one block and position, float64 [hidden]."""
    manifest = patch.manifest
    clamped = max(-manifest.max_abs_strength, min(manifest.max_abs_strength, strength))
    index = max(0, position - prompt_length)
    multiplier = clamped * (schedule.strength_at(index) if schedule else 1.0)
    total = torch.zeros(manifest.base_model.hidden_size, dtype=torch.float64)
    for item in manifest.interventions:
        here = item.site == "all" or item.site == ("prompt" if position < prompt_length else "continuation")
        if item.layer == layer and here:
            vector = torch.tensor(list(patch.vector_for(item.vector).data), dtype=torch.float64)
            total += multiplier * item.coefficient * vector
    return total


def logits(model, ids, prompt_length, patches, blocks=None):
    """Logits [positions, vocabulary] of one sequence; `patches` lists (patch, strength, schedule)."""
    handles = []
    blocks = model.model.layers if blocks is None else blocks
    layers = {item.layer for patch, _, _ in patches for item in patch.manifest.interventions}
    for layer in layers:
        rows = [
            sum(
                delta(patch, strength, schedule, layer, p, prompt_length)
                for patch, strength, schedule in patches
            )
            for p in range(len(ids))
        ]
        edit = torch.stack(rows).float()[None]

        def add(module, args, out, edit=edit):
            return (out[0] + edit, *out[1:]) if isinstance(out, tuple) else out + edit

        handles.append(blocks[layer].register_forward_hook(add))
    try:
        with torch.no_grad():
            return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()


def logprobs(model, prompt_ids, token_ids, patches, blocks=None):
    """Log-probabilities of each generated token, float [tokens, vocabulary], teacher-forced."""
    ids = [*prompt_ids, *token_ids]
    out = logits(model, ids, len(prompt_ids), patches, blocks)
    return torch.log_softmax(out[len(prompt_ids) - 1 : -1], dim=-1)
