"""Steps with heads and draft models on a CPU: how long one takes, from tokens to tokens, its guesses included.

    PYTHONPATH=. python benchmarks/cpu_heads.py --model FOLDER [--draft FILE] [--ways plain eagle3 medusa draft]
        [--requests 1 8] [--drafts 4] [--max-tokens 96] [--turns 3] [--dtype bfloat16]

Heads are of random weights and of the model's sizes: an EAGLE-3 head (draft_vocab_size 32,000), and Medusa heads of one
layer with the model's output head. How many drafts are accepted is left to chance (`synthetic`): three tokens a step in
the mean, the one behind the drafts included; texts mean nothing. `draft`: a model that proposes, DRAFT, whose guesses
are verified as ever. Each way is an engine in a process of its own; they take turns. Printed are medians.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from speculation import Engine, Job, prompts_of

LENGTH = 3.0
DRAFT_VOCABULARY = 32_000


def save_eagle3(folder: Path, model: dict[str, Any]) -> str:
    """A random EAGLE-3 head for a model of this configuration."""
    size, inner, width = model["hidden_size"], model["intermediate_size"], model["head_dim"]
    rows = {"q": model["num_attention_heads"], "k": model["num_key_value_heads"], "v": model["num_key_value_heads"]}
    shapes = {f"midlayer.self_attn.{name}_proj": (count * width, 2 * size) for name, count in rows.items()}
    shapes |= {"midlayer.self_attn.o_proj": (size, rows["q"] * width), "fc": (size, 3 * size)}
    shapes |= {f"midlayer.mlp.{name}_proj": (inner, size) for name in ("gate", "up")}
    shapes |= {"midlayer.mlp.down_proj": (size, inner), "lm_head": (DRAFT_VOCABULARY, size)}
    tensors = {f"{name}.weight": torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": torch.ones(size) for name in norms}
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    tensors["d2t"] = torch.arange(DRAFT_VOCABULARY) % (model["vocab_size"] - DRAFT_VOCABULARY + 1) // 2
    count = model["num_hidden_layers"]
    config = {name: value for name, value in model.items() if name not in ("_model_name_or_path", "architectures")}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "tie_word_embeddings": False}
    config |= {"draft_vocab_size": DRAFT_VOCABULARY}
    config |= {"eagle_aux_hidden_state_layer_ids": [2, count // 2, count - 3]}
    return _saved(folder / "eagle3", config, tensors, "model.safetensors")


def save_medusa(folder: Path, model: dict[str, Any], count: int) -> str:
    """Random Medusa heads for a model of this configuration, which has the output head."""
    size = model["hidden_size"]
    tensors = {f"{head}.0.linear.weight": torch.randn(size, size).bfloat16() * 0.02 for head in range(count)}
    tensors |= {f"{head}.0.linear.bias": torch.zeros(size).bfloat16() for head in range(count)}
    config = {"medusa_num_heads": count, "medusa_num_layers": 1, "base_model_name_or_path": "random"}
    return _saved(folder / "medusa", config, tensors, "medusa_lm_head.safetensors")


def _saved(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str) -> str:
    folder.mkdir()
    save_file(tensors, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def engines_of(args: argparse.Namespace, folder: Path) -> list[Engine]:
    """One for each way."""
    torch.manual_seed(0)
    model = json.loads((Path(args.model) / "config.json").read_text())
    common: dict[str, Any] = {
        "model": args.model,
        "dtype": args.dtype,
        "max_model_len": 2048,
        "max_num_seqs": max(args.requests),
        "kv_cache_memory_bytes": 1 << 30,
        "disable_log_stats": False,
    }
    chance = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": LENGTH}
    makers = {
        "plain": lambda: {"method": "none"},
        "eagle3": lambda: chance | {"method": "eagle3", "model": save_eagle3(folder, model)},
        "medusa": lambda: chance | {"method": "medusa", "model": save_medusa(folder, model, args.drafts)},
        "draft": lambda: {"method": "draft_model", "model": args.draft, "adaptive": False},
    }
    engines = []
    for way in args.ways:
        asked = makers[way]()
        if way != "plain":
            asked["num_speculative_tokens"] = args.drafts
        engines.append(Engine(way, common | {"speculative_config": asked}))
    return engines


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", default="smollm2")
    parser.add_argument("--ways", nargs="+", default=["plain", "eagle3", "medusa", "draft"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    print("| way | requests | ms a step | tokens a step and request | tokens/s |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        engines = engines_of(args, Path(folder))
        for count in args.requests:
            job = Job(prompts_of("editing", count), 0.0, args.max_tokens, False)
            for engine in engines:  # prompts into the prefix cache
                engine.run(job._replace(max_tokens=4))
                engine.answers.clear()
            for _ in range(args.turns):
                for engine in engines:
                    engine.run(job)
            for engine in engines:
                found = []
                for answer in engine.answers:
                    num_tokens = sum(map(len, answer.outputs))
                    guesses = answer.num_drafts or num_tokens
                    found.append(
                        (1e3 * answer.seconds * count / guesses, num_tokens / guesses, num_tokens / answer.seconds)
                    )
                step, length, speed = (median(values) for values in zip(*found, strict=True))
                print(f"| {engine.name} | {count} | {step:.2f} | {length:.2f} | {speed:.0f} |", flush=True)
        for engine in engines:
            engine.end()


if __name__ == "__main__":
    main()
