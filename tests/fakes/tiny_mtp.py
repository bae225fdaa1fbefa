"""A tiny DeepSeek-V3 whose checkpoint has the layer that predicts one token more; and what that layer guesses, computed
with the layers of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV3ForCausalLM

from tests.fakes.tiny_checkpoint import make_checkpoint

NUM_LAYERS = 4


def make_mtp(folder: Path, seed: int = 0) -> Path:
    """As published: the layer behind the last one, with its norms and its projection."""
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


class ReferenceMTP:
    """What the layer guesses, computed for the whole text each time."""

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

    @torch.inference_mode()
    def logits(self, text: list[int], drafts: list[int]) -> list[Tensor]:
        """[V] of each guess after the text, the tokens `drafts` taken for those before."""
        hidden = self.model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
        tokens = text[1:]
        found = []
        for place in range(len(drafts)):
            embedded = self.model.get_input_embeddings()(torch.tensor(tokens))
            both = torch.cat((self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")), -1)
            result = self._run(both @ self.weights["eh_proj.weight"].T)
            found.append(self.model.lm_head(self._norm(result[-1], "shared_head.norm")))
            hidden = torch.cat((hidden, result[-1:]))
            tokens = [*tokens, drafts[place]]
        return found

    def _run(self, x: Tensor) -> Tensor:
        return run_layer(self.layer, self.model.model.rotary_emb, x)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weights[f"{name}.weight"], self.eps)


def run_layer(layer: Any, rotary: Any, x: Tensor) -> Tensor:
    """[T, E] -> [T, E]: a decoder layer of transformers that attends, on a whole text."""
    count = len(x)
    positions = torch.arange(count)[None]
    mask = torch.full((1, 1, count, count), -torch.inf).triu(1)
    tables = rotary(x[None], positions)
    out = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=tables)
    found: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
    return found
