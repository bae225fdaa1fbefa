"""Tiny DFlash heads: their checkpoints as they are published, and what they guess, in plain PyTorch."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.fakes import tiny_heads

BLOCK = 6
MASK_TOKEN = 318
TARGET_LAYERS = [0, 2]
"""Those of the model whose results are read."""
HEAD: dict[str, Any] = tiny_heads.HEAD | {"model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": False}
_OF_LAYERS = (*HEAD, "layer_types", "sliding_window")


def make_block_head(folder: Path, seed: int = 0, speculators: str | None = None, **changes: Any) -> Path:
    """Save a random one; `speculators`: in that format, for the model of this name. `changes`: of its config, those of
    `dflash_config` among them."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = {"mask_token_id": MASK_TOKEN, "target_layer_ids": TARGET_LAYERS} | changes.pop("dflash_config", {})
    config = HEAD | {"block_size": BLOCK} | changes
    torch.manual_seed(seed)
    save_file(_tensors(config, len(inner["target_layer_ids"] or TARGET_LAYERS)), folder / "model.safetensors")
    if speculators is None:
        config |= {"architectures": ["DFlashDraftModel"], "dflash_config": inner}
    else:
        methods = [{"proposal_type": "greedy", "speculative_tokens": config["block_size"] - 1}]
        config = {name: value for name, value in config.items() if name not in _OF_LAYERS} | {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "mask_token_id": inner["mask_token_id"],
            "aux_hidden_state_layer_ids": [index + 1 for index in inner["target_layer_ids"]],
            "transformer_layer_config": {name: config[name] for name in _OF_LAYERS if name in config},
            "speculators_config": {
                "algorithm": "dflash",
                "default_proposal_method": "greedy",
                "proposal_methods": methods,
                "verifier": {"name_or_path": speculators, "architectures": ["LlamaForCausalLM"]},
            },
        }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _tensors(config: dict[str, Any], num_read: int) -> dict[str, Tensor]:
    size, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    read = config.get("target_hidden_size") or size

    def norm(count: int) -> Tensor:
        return 1 + torch.randn(count) * 0.1

    def linear(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns) * 0.12

    found = {"fc.weight": linear(size, num_read * read), "hidden_norm.weight": norm(size), "norm.weight": norm(size)}
    for index in range(config["num_hidden_layers"]):
        found |= {
            f"layers.{index}.{name}.weight": tensor
            for name, tensor in {
                "input_layernorm": norm(size),
                "post_attention_layernorm": norm(size),
                "self_attn.q_proj": linear(query, size),
                "self_attn.k_proj": linear(key, size),
                "self_attn.v_proj": linear(key, size),
                "self_attn.o_proj": linear(size, query),
                "self_attn.q_norm": norm(head),
                "self_attn.k_norm": norm(head),
                "mlp.gate_proj": linear(inner, size),
                "mlp.up_proj": linear(inner, size),
                "mlp.down_proj": linear(size, inner),
            }.items()
        }
        if config["attention_bias"]:
            rows = {"q": query, "k": key, "v": key, "o": size}
            found |= {
                f"layers.{index}.self_attn.{name}_proj.bias": torch.randn(count) * 0.1 for name, count in rows.items()
            }
    if config.get("own_embeddings"):
        found["embed_tokens.weight"] = linear(config["vocab_size"], size)
    rows = config.get("draft_vocab_size") or config["vocab_size"]
    if rows != config["vocab_size"]:
        used = torch.randperm(config["vocab_size"])[:rows].sort().values
        found |= {"lm_head.weight": linear(rows, size), "d2t": used - torch.arange(rows)}
        found["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
        found["t2d"][used] = True
    return found


class ReferenceBlockHead:
    """What a head guesses after a text, computed for the whole text each time. `model`: of transformers, which it
    guesses for."""

    def __init__(self, folder: Path, model: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.config = config.get("transformer_layer_config", {}) | config | config.get("dflash_config", {})
        self.weights = load_file(folder / "model.safetensors")
        self.model = model
        ids = self.config.get("aux_hidden_state_layer_ids")
        self.read = ids or [index + 1 for index in self.config["target_layer_ids"]]

    @torch.inference_mode()
    def logits(self, text: list[int], count: int) -> Tensor:
        """[count, V]: of each of so many tokens after the text, none of which is known."""
        out = self.model(torch.tensor([text]), output_hidden_states=True)
        read = torch.cat([out.hidden_states[index][0, :-1] for index in self.read], -1)
        context = self._norm(read @ self.weights["fc.weight"].T, "hidden_norm")
        table = self.weights.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        x = table[torch.tensor([text[-1], *[self.config["mask_token_id"]] * count])]
        x = x * self.config.get("input_embedding_scale", 1.0)
        for index in range(self.config["num_hidden_layers"]):
            x = self._layer(index, x, context)
        x = self._norm(x[1:], "norm")
        head: Tensor = self.weights.get("lm_head.weight", self.model.get_output_embeddings().weight)
        own = x @ head.T
        if "d2t" not in self.weights:
            return own
        logits = torch.full((count, self.config["vocab_size"]), -torch.inf)
        logits[:, torch.arange(own.shape[1]) + self.weights["d2t"]] = own
        return logits

    def _layer(self, index: int, x: Tensor, context: Tensor) -> Tensor:
        name = f"layers.{index}"
        x = x + self._attention(index, self._norm(x, f"{name}.input_layernorm"), context)
        normed = self._norm(x, f"{name}.post_attention_layernorm")
        gate, up = (self._linear(normed, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        return x + self._linear(functional.silu(gate) * up, f"{name}.mlp.down_proj")

    def _attention(self, index: int, x: Tensor, context: Tensor) -> Tensor:
        name = f"layers.{index}.self_attn"
        size = self.config["head_dim"]
        both = torch.cat((context, x))
        query, key, value = (
            self._linear(part, f"{name}.{letter}_proj").view(len(part), -1, size)
            for letter, part in (("q", x), ("k", both), ("v", both))
        )
        places = torch.arange(len(both))
        query = self._turned(self._norm(query, f"{name}.q_norm"), places[len(context) :])
        key = self._turned(self._norm(key, f"{name}.k_norm"), places)
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * size**-0.5
        scores = scores.masked_fill(self._hidden(index, len(context), len(x)), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        return self._linear(attended.reshape(len(x), -1), f"{name}.o_proj")

    def _hidden(self, index: int, before: int, count: int) -> Tensor:
        """[count, before + count]: what tokens of the block do not see."""
        kinds = self.config.get("layer_types") or ["full_attention"] * (index + 1)
        slides = kinds[index] == "sliding_attention"
        distance = torch.arange(before, before + count)[:, None] - torch.arange(before + count)
        causal = self.config.get("is_causal", self.config.get("causal", slides))
        hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
        return hidden | (distance >= self.config["sliding_window"]) if slides else hidden

    def _turned(self, heads: Tensor, places: Tensor) -> Tensor:
        size = heads.shape[-1]
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angles = (places[:, None] * frequencies)[:, None]
        cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat((-second, first), -1) * sin

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        product = x @ self.weights[f"{name}.weight"].T
        return product if bias is None else product + bias

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weights[f"{name}.weight"], self.config["rms_norm_eps"])
