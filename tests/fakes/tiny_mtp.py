"""Tiny models whose checkpoints have the layer that predicts one token more, DeepSeek-V3 and Qwen3-Next; and what that
layer guesses, computed with the layers of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV3ForCausalLM, Qwen3NextForCausalLM

from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_states import DELTA

NUM_LAYERS = 4
ONE = {"layer_types": ["full_attention"], "num_hidden_layers": 1, "mlp_only_layers": []}


def make_mtp(folder: Path, seed: int = 0) -> Path:
    """A DeepSeek-V3, as published: the layer behind the last one, with its norms and its projection."""
    make_checkpoint(folder, "DeepseekV3ForCausalLM", seed, num_hidden_layers=NUM_LAYERS + 1)
    shutil.copytree(folder, _whole(folder))
    config = json.loads((folder / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types"):
        if config.get(name):
            config[name] = config[name][:NUM_LAYERS]
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    size = config["hidden_size"]
    own = f"model.layers.{NUM_LAYERS}"
    weights |= {
        f"{own}.enorm.weight": 1 + torch.randn(size) * 0.1,
        f"{own}.hnorm.weight": 1 + torch.randn(size) * 0.1,
        f"{own}.eh_proj.weight": torch.randn(size, 2 * size) * 0.12,
        f"{own}.shared_head.norm.weight": 1 + torch.randn(size) * 0.1,
        f"{own}.embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{own}.shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _whole(folder: Path) -> Path:
    """Where the layer is one of the model's: for transformers, which knows no others."""
    return folder.with_name(f"{folder.name}-whole")


def make_qwen_mtp(folder: Path, seed: int = 0) -> Path:
    """A Qwen3-Next, as published: `mtp.*`, whose layer attends and has experts."""
    make_checkpoint(folder, "Qwen3NextForCausalLM", seed, **DELTA)
    make_checkpoint(_apart(folder), "Qwen3NextForCausalLM", seed + 100, **DELTA | ONE)
    weights = load_file(folder / "model.safetensors")
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    layer = {name: t for name, t in load_file(_apart(folder) / "model.safetensors").items() if ".layers.0." in name}
    torch.manual_seed(seed)
    weights |= {name.replace("model.", "mtp.", 1): tensor for name, tensor in layer.items()}
    weights |= {
        "mtp.fc.weight": torch.randn(size, 2 * size) * 0.12,
        **{f"mtp.{name}.weight": torch.randn(size) * 0.1
           for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
    }  # fmt: skip
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _apart(folder: Path) -> Path:
    """A model of the layer alone."""
    return folder.with_name(f"{folder.name}-layer")


class _OwnLayer:
    """What the layer guesses, computed for the whole text each time."""

    names: tuple[str, str, str]
    """Of its tensors: the norms of embeddings and of hidden states, and the projection of both."""
    model: Any
    weights: dict[str, Tensor]
    eps: float

    @torch.inference_mode()
    def logits(self, text: list[int], drafts: list[int]) -> list[Tensor]:
        """[V] of each guess after the text, the tokens `drafts` taken for those before."""
        hidden = self.model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
        tokens = text[1:]
        found = []
        embedding, state, projection = self.names
        for place in range(len(drafts)):
            embedded = self.model.get_input_embeddings()(torch.tensor(tokens))
            both = torch.cat((self.norm(embedded, embedding), self.norm(hidden, state)), -1)
            result = self.run(both @ self.weights[f"{projection}.weight"].T)
            found.append(self.model.lm_head(self.end(result[-1])))
            hidden = torch.cat((hidden, result[-1:]))
            tokens = [*tokens, drafts[place]]
        return found

    def run(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E], what the next guess is given."""
        raise NotImplementedError

    def end(self, x: Tensor) -> Tensor:
        """Of that, what the output head reads."""
        return x

    def norm(self, x: Tensor, name: str) -> Tensor:
        """An RMS norm, by the name of its weight."""
        return functional.rms_norm(x, (x.shape[-1],), self.weights[f"{name}.weight"], self.eps)


class ReferenceMTP(_OwnLayer):
    """DeepSeek-V3's."""

    names = ("enorm", "hnorm", "eh_proj")

    def __init__(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        model: Any = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()
        whole: Any = DeepseekV3ForCausalLM.from_pretrained(
            _whole(folder), dtype=torch.float32, attn_implementation="eager"
        )
        self.layer = whole.eval().model.layers[NUM_LAYERS]
        own = f"model.layers.{NUM_LAYERS}."
        self.weights = {name.removeprefix(own): t for name, t in weights.items() if name.startswith(own)}
        self.eps = whole.config.rms_norm_eps

    def run(self, x: Tensor) -> Tensor:
        return _run_layer(self.layer, self.model.model.rotary_emb, x)

    def end(self, x: Tensor) -> Tensor:
        return self.norm(x, "shared_head.norm")


class ReferenceQwenMTP(_OwnLayer):
    """Qwen3-Next's, whose norms multiply by one more than their weights."""

    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc")

    def __init__(self, folder: Path) -> None:
        model: Any = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()
        one: Any = Qwen3NextForCausalLM.from_pretrained(
            _apart(folder), dtype=torch.float32, attn_implementation="eager"
        )
        self.one = one.eval().model
        weights = load_file(folder / "model.safetensors")
        self.weights = {name.removeprefix("mtp."): t for name, t in weights.items() if name.startswith("mtp.")}
        self.weights |= {name: 1 + t for name, t in self.weights.items() if t.ndim == 1}
        self.eps = one.config.rms_norm_eps

    def run(self, x: Tensor) -> Tensor:
        return self.norm(_run_layer(self.one.layers[0], self.one.rotary_emb, x), "norm")


def _run_layer(layer: Any, rotary: Any, x: Tensor) -> Tensor:
    """[T, E] -> [T, E]: a decoder layer of transformers that attends, on a whole text."""
    count = len(x)
    positions = torch.arange(count)[None]
    mask = torch.full((1, 1, count, count), -torch.inf).triu(1)
    tables = rotary(x[None], positions)
    out = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=tables)
    found: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
    return found
