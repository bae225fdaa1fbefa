"""pagemill as one engine of a comparison. Usage: python pagemill_engine.py MODEL [JSON of LLM arguments]."""

import json
import sys

from harness import Generate, serve_jobs

from pagemill import LLM, SamplingParams


def build() -> Generate:
    llm = LLM(sys.argv[1], **(json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if any(len(output.outputs[0].token_ids) != num_tokens for output in outputs):
            raise RuntimeError("a request got another number of tokens than it asked for")

    return generate


if __name__ == "__main__":
    serve_jobs(build)
