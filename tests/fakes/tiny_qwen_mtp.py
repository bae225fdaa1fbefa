"""A tiny Qwen3-Next whose checkpoint has the layer that predicts one token more; and what that layer guesses, computed
with the layers of transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3NextForCausalLM

from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_mtp import run_layer
from tests.fakes.tiny_states import DELTA

ONE = {"layer_types": ["full_attention"], "num_hidden_layers": 1, "mlp_only_layers": []}


def make_qwen_mtp(folder: Path, seed: int = 0) -> Path:
    """As published: `mtp.*`, whose layer attends and has experts."""
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


class ReferenceQwenMTP:
    """What the layer guesses, computed for the whole text each time."""

    def __init__(self, folder: Path) -> None:
        model: Any = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()
        one: Any = Qwen3NextForCausalLM.from_pretrained(
            _apart(folder), dtype=torch.float32, attn_implementation="eager"
        )
        self.one = one.eval().model
        weights = load_file(folder / "model.safetensors")
        self.weights = {name.removeprefix("mtp."): t for name, t in weights.items() if name.startswith("mtp.")}
        self.eps = one.config.rms_norm_eps

    @torch.inference_mode()
    def logits(self, text: list[int], drafts: list[int]) -> list[Tensor]:
        """[V] of each guess after the text, the tokens `drafts` taken for those before."""
        hidden = self.model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
        tokens = text[1:]
        found = []
        for place in range(len(drafts)):
            embedded = self.model.get_input_embeddings()(torch.tensor(tokens))
            both = torch.cat(
                (self._norm(embedded, "pre_fc_norm_embedding"), self._norm(hidden, "pre_fc_norm_hidden")), -1
            )
            result = self._norm(
                run_layer(self.one.layers[0], self.one.rotary_emb, both @ self.weights["fc.weight"].T), "norm"
            )
            found.append(self.model.lm_head(result[-1]))
            hidden = torch.cat((hidden, result[-1:]))
            tokens = [*tokens, drafts[place]]
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return normed * (1 + self.weights[f"{name}.weight"])
