"""Run by itself: what a plain `vllm.LLM` answers, one prompt after another: what shares a step is then the same
everywhere, and with it every bit.

Arguments: a JSON file with the question, a JSON file to write. The question:
{"model", "arguments", "prompts": [[token id]], "parameters": {...}, "full": [[token id]]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    question = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(question["model"], **question["arguments"])

    def ask(prompts, **parameters):
        outputs = [
            llm.generate(TokensPrompt(prompt_token_ids=ids), SamplingParams(**parameters), use_tqdm=False)[0]
            for ids in prompts
        ]
        return [
            {
                "token_ids": list(output.outputs[0].token_ids),
                "text": output.outputs[0].text,
                "logprobs": [
                    {str(token): found.logprob for token, found in entry.items()}
                    for entry in output.outputs[0].logprobs
                ],
            }
            for output in outputs
        ]

    answers = {
        "answers": ask(question["prompts"], **question["parameters"]),
        "full": ask(question["full"], temperature=0.0, max_tokens=1, logprobs=-1),
    }
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
