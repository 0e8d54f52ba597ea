"""Run by itself: what Transformers computes with vectors added to block outputs.

Arguments: a JSON file with the question, an .npz file to write. The question:
{"model", "blocks": path of the block list, "runs": [{"ids", "new", "edits": {layer: [floats]}}],
"forced": [{"ids", "first", "edits": [{"layer", "vector": [floats], "scales": [one for each id]}]}]}.
Written for run i: `logits_i` [vocabulary], of the first generated position; `tokens_i` [new]; `gap_i`
[new], the distance of the two highest logits at each step. For the i-th of `forced`, where all ids are given
and one pass computes them: `forced_i` [ids - first, vocabulary], the logits from position `first` on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    question = json.loads(Path(sys.argv[1]).read_text())
    model = AutoModelForCausalLM.from_pretrained(question["model"], dtype=torch.float32).eval()
    blocks = model.get_submodule(question["blocks"])

    def added(vector):
        def hook(_module, _arguments, output):
            return output + vector if isinstance(output, torch.Tensor) else (output[0] + vector, *output[1:])

        return hook

    arrays = {}
    for number, run in enumerate(question.get("forced", [])):
        handles = []
        for edit in run["edits"]:
            vector, scales = (torch.tensor(edit[key], dtype=torch.float32) for key in ("vector", "scales"))
            hook = added(scales[None, :, None] * vector)
            handles.append(blocks[edit["layer"]].register_forward_hook(hook))
        with torch.inference_mode():
            logits = model(torch.tensor([run["ids"]])).logits[0, run["first"] :]
        for handle in handles:
            handle.remove()
        arrays[f"forced_{number}"] = logits.numpy()
    for number, run in enumerate(question["runs"]):
        handles = [
            blocks[int(layer)].register_forward_hook(added(torch.tensor(vector, dtype=torch.float32)))
            for layer, vector in run["edits"].items()
        ]
        tokens, gaps, state = [], [], None
        ids = torch.tensor([run["ids"]])
        with torch.inference_mode():
            for step in range(run["new"]):
                out = model(ids, past_key_values=state, use_cache=True)
                state = out.past_key_values
                logits = out.logits[0, -1]
                if step == 0:
                    arrays[f"logits_{number}"] = logits.numpy()
                high = logits.topk(2)
                tokens.append(int(high.indices[0]))
                gaps.append(float(high.values[0] - high.values[1]))
                ids = high.indices[:1][None]
        for handle in handles:
            handle.remove()
        arrays[f"tokens_{number}"] = np.array(tokens)
        arrays[f"gap_{number}"] = np.array(gaps)
    np.savez(sys.argv[2], **arrays)


if __name__ == "__main__":
    main()
