"""Tiny heads that propose from hidden states of a tiny model: their checkpoints as they are published, and what they
guess, in plain PyTorch."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

LAYER_IDS = (1, 2, 3)
HEAD: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def make_head(folder: Path, kind: str, seed: int = 0, speculators: str | None = None, **changes: Any) -> Path:
    """Save a random head, `kind` eagle or eagle3; `speculators`: in that format, for the model of this name."""
    folder.mkdir(parents=True, exist_ok=True)
    config = HEAD | changes
    torch.manual_seed(seed)
    save_file(tensors_of(kind, config), folder / "model.safetensors")
    if kind == "eagle3" and config.get("eagle_aux_hidden_state_layer_ids") is None:
        config["eagle_aux_hidden_state_layer_ids"] = list(LAYER_IDS)
    config["architectures"] = ["LlamaForCausalLMEagle3" if kind == "eagle3" else "EagleLlamaForCausalLM"]
    if speculators is not None:
        of_layer = {name: config[name] for name in HEAD}
        own = {name: value for name, value in config.items() if name not in HEAD}
        methods = [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}]
        config = own | {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": kind,
            "torch_dtype": "float32",
            "transformer_layer_config": of_layer,
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": methods,
                "verifier": {"name_or_path": speculators, "architectures": ["LlamaForCausalLM"]},
            },
        }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(kind: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """Of a checkpoint as it is published."""
    size, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    eagle3 = kind == "eagle3"
    wide = 2 * size if eagle3 else size
    count = len(config.get("eagle_aux_hidden_state_layer_ids") or LAYER_IDS)
    read = config.get("target_hidden_size") or size
    layer = "midlayer" if eagle3 else "layers.0"
    found = {
        "fc.weight": torch.randn(size, count * read if eagle3 else 2 * size) * 0.12,
        f"{layer}.self_attn.q_proj.weight": torch.randn(query, wide) * 0.12,
        f"{layer}.self_attn.k_proj.weight": torch.randn(key, wide) * 0.12,
        f"{layer}.self_attn.v_proj.weight": torch.randn(key, wide) * 0.12,
        f"{layer}.self_attn.o_proj.weight": torch.randn(size, query) * 0.12,
        f"{layer}.mlp.gate_proj.weight": torch.randn(inner, size) * 0.12,
        f"{layer}.mlp.up_proj.weight": torch.randn(inner, size) * 0.12,
        f"{layer}.mlp.down_proj.weight": torch.randn(size, inner) * 0.12,
        f"{layer}.post_attention_layernorm.weight": 1 + torch.randn(size) * 0.1,
    }
    if config.get("own_embeddings"):
        found["embed_tokens.weight"] = torch.randn(config["vocab_size"], size) * 0.12
    if not eagle3:
        return found
    rows = config.get("draft_vocab_size") or config["vocab_size"]
    found |= {
        f"{layer}.input_layernorm.weight": 1 + torch.randn(size) * 0.1,
        f"{layer}.hidden_norm.weight": 1 + torch.randn(size) * 0.1,
        "norm.weight": 1 + torch.randn(size) * 0.1,
        "lm_head.weight": torch.randn(rows, size) * 0.12,
    }
    if config.get("norm_before_fc"):
        found["input_norm.weight"] = 1 + torch.randn(count * read) * 0.1
    if config.get("fc_norm"):
        found |= {f"fc_norm.{index}.weight": 1 + torch.randn(read) * 0.1 for index in range(count)}
    if rows != config["vocab_size"]:
        used = torch.randperm(config["vocab_size"])[:rows].sort().values
        found["d2t"] = used - torch.arange(rows)
        found["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
        found["t2d"][used] = True
    return found


class ReferenceHead:
    """What a head guesses, computed for the whole text each time. `model`: of transformers, which it guesses for."""

    def __init__(self, folder: Path, model: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.config = config | config.get("transformer_layer_config", {})
        self.weights = {
            name.replace("midlayer", "layers.0"): t for name, t in load_file(folder / "model.safetensors").items()
        }
        self.model = model
        self.eagle3 = "Eagle3" in config["architectures"][0]

    @torch.inference_mode()
    def logits(self, text: list[int], drafts: list[int]) -> list[Tensor]:
        """[V] of each guess after the text, the tokens `drafts` taken for those before."""
        out = self.model(torch.tensor([text[:-1]]), output_hidden_states=True)
        if self.eagle3:
            read = [out.hidden_states[index][0] for index in self.config["eagle_aux_hidden_state_layer_ids"]]
            hidden = self._fused(read)
        else:
            hidden = out.hidden_states[-1][0]
        tokens = text[1:]
        found = []
        for place in range(len(drafts)):
            result = self._layer(tokens, hidden)
            chained, logits = self._end(result[-1])
            found.append(logits)
            hidden = torch.cat((hidden, chained[None]))
            tokens = [*tokens, drafts[place]]
        return found

    def _fused(self, read: list[Tensor]) -> Tensor:
        weights = self.weights
        if self.config.get("fc_norm"):
            read = [self._norm(part, weights[f"fc_norm.{index}.weight"]) for index, part in enumerate(read)]
        joined = torch.cat(read, -1)
        if self.config.get("norm_before_fc"):
            joined = self._norm(joined, weights["input_norm.weight"])
        return joined @ weights["fc.weight"].T

    def _layer(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """[T, E]."""
        weights = self.weights
        table = weights.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        embedded = table[torch.tensor(tokens)]
        if self.eagle3:
            normed = self._norm(hidden, weights["layers.0.hidden_norm.weight"])
            x = torch.cat((self._norm(embedded, weights["layers.0.input_layernorm.weight"]), normed), -1)
            residual = normed if self.config.get("norm_before_residual") else hidden
        else:
            x = residual = torch.cat((embedded, hidden), -1) @ weights["fc.weight"].T
        x = residual + self._attention(x)
        normed = self._norm(x, weights["layers.0.post_attention_layernorm.weight"])
        gate, up = (normed @ weights[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (functional.silu(gate) * up) @ weights["layers.0.mlp.down_proj.weight"].T

    def _attention(self, x: Tensor) -> Tensor:
        size = self.config["head_dim"]
        query, key, value = (
            (x @ self.weights[f"layers.0.self_attn.{name}_proj.weight"].T).reshape(len(x), -1, size).transpose(0, 1)
            for name in "qkv"
        )
        query, key = self._turned(query), self._turned(key)
        group = len(query) // len(key)
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        attended = functional.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
        return attended.transpose(0, 1).flatten(1) @ self.weights["layers.0.self_attn.o_proj.weight"].T

    def _turned(self, heads: Tensor) -> Tensor:
        size = heads.shape[-1]
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(heads.shape[1])[:, None] * frequencies
        cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat((-second, first), -1) * sin

    def _end(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[E] -> what the next guess is given, and logits [V] of this one."""
        if not self.eagle3:
            return x, self.model.get_output_embeddings().weight @ x
        normed = self._norm(x, self.weights["norm.weight"])
        own = self.weights["lm_head.weight"] @ normed
        logits = own
        if "d2t" in self.weights:
            logits = torch.full((self.config["vocab_size"],), -torch.inf)
            logits[torch.arange(len(own)) + self.weights["d2t"]] = own
        return (normed if self.config.get("norm_output") else x), logits

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.config["rms_norm_eps"])
