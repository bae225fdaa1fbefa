"""Tiny heads that guess from one hidden state of a tiny model: their checkpoints as they are published, and what they
guess, in plain PyTorch."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

SIZE, VOCABULARY = 64, 320


def make_medusa(folder: Path, seed: int = 0, layout: str = "numbers", size: int = SIZE, **changes: Any) -> Path:
    """Save random heads, three unless `changes` say otherwise; `layout`: numbers, as published first; numbers without
    heads: the output head is the model's; names: as engines converted it; shared: with one output head."""
    torch.manual_seed(seed)
    fields: dict[str, Any] = {"num_heads": 3, "num_layers": 2} | changes
    tensors: dict[str, Tensor] = {}
    numbers = layout.startswith("numbers")
    for head in range(fields["num_heads"]):
        for layer in range(fields["num_layers"]):
            name = f"{head}.{layer}.linear" if numbers else f"blocks.{head}.layers.{layer}"
            tensors[f"{name}.weight"] = torch.randn(size, size) * 0.15
            if numbers:
                tensors[f"{name}.bias"] = torch.randn(size) * 0.1
        if layout == "numbers" or layout == "names" or (layout == "shared" and head == 0):
            name = f"{head}.{fields['num_layers']}" if numbers else f"lm_heads.{head}"
            tensors[f"{name}.weight"] = torch.randn(VOCABULARY, size) * 0.15
    if numbers:
        config = {"medusa_num_heads": fields["num_heads"], "medusa_num_layers": fields["num_layers"]}
        config |= {"base_model_name_or_path": "somebody/model"}
    else:
        config = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": size}
        config |= {"num_heads": fields["num_heads"], "num_hidden_layers": fields["num_layers"]}
        config |= {"vocab_size": VOCABULARY, "original_lm_head": layout == "shared"}
    return _saved(folder, config, tensors, "medusa_lm_head.safetensors" if numbers else "model.safetensors")


def make_mlp_speculator(folder: Path, seed: int = 0, prefix: str = "speculator.", **changes: Any) -> Path:
    """Save a random one of three heads."""
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": SIZE,
        "inner_dim": 48,
        "n_predict": 3,
        "n_candidates": 5,
        "top_k_tokens_per_head": [5, 3, 2],
        "tie_weights": False,
        "scale_input": False,
        "vocab_size": VOCABULARY,
    } | changes
    size, inner, vocabulary = config["emb_dim"], config["inner_dim"], config["vocab_size"]
    inner = inner or size
    tensors: dict[str, Tensor] = {}
    for head in range(config["n_predict"]):
        tensors |= {
            f"emb.{head}.weight": torch.randn(vocabulary, inner) * 0.3,
            f"proj.{head}.weight": torch.randn(inner, inner if head else size) * 0.15,
            f"ln.{head}.weight": 1 + torch.randn(inner) * 0.1,
            f"ln.{head}.bias": torch.randn(inner) * 0.1,
            f"head.{head}.weight": torch.randn(vocabulary, inner) * 0.15,
        }
    if config["tie_weights"]:
        for name in list(tensors):
            kind, number, rest = name.split(".")
            first = 1 if kind == "proj" else 0
            if int(number) > first:
                tensors[name] = tensors[f"{kind}.{first}.{rest}"].clone()
    return _saved(folder, config, {prefix + name: tensor for name, tensor in tensors.items()}, "model.safetensors")


def _saved(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class ReferenceRowHeads:
    """What heads guess, one row after another. `model`: of transformers, which they guess for."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        [file] = folder.glob("*.safetensors")
        self.weights = {name.removeprefix("speculator."): tensor for name, tensor in load_file(file).items()}
        self.model = model

    @torch.inference_mode()
    def logits(self, text: list[int], drafts: list[int]) -> list[Tensor]:
        """[V] of each guess after the text, the tokens `drafts` taken for those before."""
        hidden = self.model.model(torch.tensor([text[:-1]])).last_hidden_state[0, -1]
        if "n_predict" in self.config:
            return self._mlp_speculator(hidden, [text[-1], *drafts], len(drafts))
        return [self._medusa(hidden, head) for head in range(len(drafts))]

    def _medusa(self, x: Tensor, head: int) -> Tensor:
        weights = self.weights
        layers = self.config.get("medusa_num_layers") or self.config["num_hidden_layers"]
        if "medusa_num_layers" in self.config:
            for layer in range(layers):
                name = f"{head}.{layer}.linear"
                x = x + functional.silu(x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
            of_head = weights.get(f"{head}.{layers}.weight", self.model.get_output_embeddings().weight)
        else:
            for layer in range(layers):
                x = x + functional.silu(x @ weights[f"blocks.{head}.layers.{layer}.weight"].T)
            of_head = weights["lm_heads.0.weight" if self.config["original_lm_head"] else f"lm_heads.{head}.weight"]
        logits: Tensor = of_head @ x
        return logits

    def _mlp_speculator(self, state: Tensor, tokens: list[int], count: int) -> list[Tensor]:
        weights, config = self.weights, self.config
        inner = config["inner_dim"] or config["emb_dim"]
        state_weight = 0.5 ** (0.5 / config["n_predict"])
        embedding_weight = math.sqrt((1 - state_weight**2) * (inner / 2))
        if config["scale_input"]:
            state = _normed(state) / 2**0.5
        found = []
        for head in range(count):
            embedded = weights[f"emb.{head}.weight"][tokens[head]]
            state = state @ weights[f"proj.{head}.weight"].T + embedded * (embedding_weight / state_weight)
            state = functional.gelu(_normed(state) * weights[f"ln.{head}.weight"] + weights[f"ln.{head}.bias"])
            found.append(weights[f"head.{head}.weight"] @ state)
        return found


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean() + 1e-6)
