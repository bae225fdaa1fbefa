"""Decode steps/s on a CPU of a small model of a family, with random weights in bfloat16, and tokens/s of a prompt.

    PYTHONPATH=. python benchmarks/family_steps.py gemma3n [--layers 8] [--hidden 512] [--requests 1 8] [--rounds 3]

Families are those of tests/fakes/tiny_families.py, here with 8 heads of 64, MLPs of four times the hidden size or
32 experts of half of it, four for a token (one of Llama 4's), and 32,768 tokens. Run it with the PYTHONPATH of two
checkouts to see what a change did. Printed is the fastest round of each.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from pagemill import LLM, SamplingParams
from tests.fakes.tiny_checkpoint import ABSENT, make_checkpoint
from tests.fakes.tiny_families import FAMILIES

PROMPT = 512
STEPS = 128


def enlarged(changes: dict[str, Any], layers: int, hidden: int) -> dict[str, Any]:
    """The family's config with these sizes; what it says of each layer is repeated."""
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 4 * hidden,
        "vocab_size": 32_768,
        "max_position_embeddings": 1024,
    }
    sizes |= expert_sizes(changes, hidden)
    for name in ("laurel_rank", "hidden_size_per_layer_input"):
        if changes.get(name):
            sizes[name] = 64
    if changes.get("vocab_size_per_layer_input"):
        sizes["vocab_size_per_layer_input"] = 32_768
    if "intermediate_size_mlp" in changes:
        sizes |= {"intermediate_size_mlp": 4 * hidden, "attention_chunk_size": 256, "moe_layers": list(range(layers))}
    for name in ("layer_types", "activation_sparsity_pattern", "no_rope_layers"):
        if isinstance(changes.get(name), list):
            sizes[name] = [changes[name][index % len(changes[name])] for index in range(layers)]
    if changes.get("kv_lora_rank"):
        sizes |= {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
    if changes.get("q_lora_rank"):
        sizes["q_lora_rank"] = hidden // 2
    if "n_layer" in changes:
        sizes |= {"n_layer": layers, "n_head": 8}
    return changes | {name: size for name, size in sizes.items() if changes.get(name) is not ABSENT}


def expert_sizes(changes: dict[str, Any], hidden: int) -> dict[str, Any]:
    """Of the family's experts, if it has any."""
    counts = [name for name in ("num_experts", "num_local_experts", "n_routed_experts") if changes.get(name)]
    if not counts:
        return {}
    sizes: dict[str, Any] = dict.fromkeys(counts, 32) | {
        "num_experts_per_tok": 1 if changes.get("num_experts_per_tok") == 1 else 4,
        "top_k_experts": 4,
        "moe_intermediate_size": hidden // 2,
        "shared_expert_intermediate_size": hidden,
    }
    # What experts have within is called so by some families, and else as a dense MLP's.
    return sizes if "moe_intermediate_size" in changes else sizes | {"intermediate_size": hidden // 2}


def best_s(llm: LLM, num_requests: int, prompt: int, steps: int, rounds: int) -> float:
    """Seconds of the fastest of `rounds`."""
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    times = []
    for turn in range(rounds):
        prompts = [
            {"prompt_token_ids": [3 + (turn + 7 * index + 5 * request) % 250 for index in range(prompt)]}
            for request in range(num_requests)
        ]
        start_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - start_s)
    return min(times)


def main() -> None:
    """Print a line for each number of requests, and one for prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    architecture, changes = FAMILIES[args.family]
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder), architecture, **enlarged(changes, args.layers, args.hidden))
        with LLM(
            str(path), dtype="bfloat16", max_model_len=1024, enable_prefix_caching=False, spec_method="none"
        ) as llm:
            best_s(llm, 1, 8, 8, 1)
            for count in args.requests:
                # Of both, what comes before the second token is the same.
                took_s = best_s(llm, count, 8, STEPS + 1, args.rounds) - best_s(llm, count, 8, 1, args.rounds)
                print(f"{args.family}, {count} requests: {STEPS / took_s:.0f} steps/s")
            print(
                f"{args.family}, a prompt of {PROMPT}: {PROMPT / best_s(llm, 1, PROMPT, 1, args.rounds):.0f} tokens/s"
            )


if __name__ == "__main__":
    main()
