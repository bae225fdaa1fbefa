"""Tiny heads that guess all tokens in one pass: their checkpoints as they are published, and what they guess, in plain
PyTorch."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.tiny_heads import HEAD, LAYER_IDS, ReferenceHead, make_head

MASK_TOKEN = 317


def make_parallel_head(folder: Path, seed: int = 0, key: str = "mask_token_id", **changes: Any) -> Path:
    """Save a random one. `key`: what it calls its token; `speculators` and other fields as for EAGLE-3."""
    head = make_head(folder, "eagle3", seed, **{key: MASK_TOKEN} | changes)
    file = head / "model.safetensors"
    torch.manual_seed(seed + 100)
    size = len(LAYER_IDS) * changes.get("hidden_size", HEAD["hidden_size"])
    save_file(load_file(file) | {"mask_hidden": torch.randn(1, 1, size)}, file)
    config = json.loads((head / "config.json").read_text())
    if "speculators_model_type" in config:
        config |= {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]}
    (head / "config.json").write_text(json.dumps(config))
    return head


class ReferenceParallelHead(ReferenceHead):
    """All guesses after a text in one pass."""

    @torch.inference_mode()
    def logits(self, text: list[int], drafts: list[int]) -> list[Tensor]:
        """[V] of each of as many guesses as there are `drafts`, which they do not depend on."""
        out = self.model(torch.tensor([text[:-1]]), output_hidden_states=True)
        read = [out.hidden_states[index][0] for index in LAYER_IDS]
        more = len(drafts) - 1
        masked = self.weights["mask_hidden"].flatten().expand(more, -1).chunk(len(LAYER_IDS), -1)
        hidden = self._fused([torch.cat(parts) for parts in zip(read, masked, strict=True)])
        result = self._layer([*text[1:], *[MASK_TOKEN] * more], hidden)
        return [self._end(row)[1] for row in result[-len(drafts) :]]
