"""transformers' generate() as one engine of the comparison. Usage: python transformers_engine.py MODEL."""

import sys

import torch
from harness import Generate, serve_jobs
from transformers import AutoModelForCausalLM


def build() -> Generate:
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    model.generation_config.pad_token_id = 2

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )

    return generate


if __name__ == "__main__":
    serve_jobs(build)
