"""Comparing with Hugging Face transformers on the same float32 weights. Heavy; tests only."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch


def load_gguf_reference(path: Path) -> Any:
    """The model of a GGUF file, dequantized to float32."""
    import gguf
    from transformers import AutoModelForCausalLM, GgufConfig

    # transformers reads the file for its configuration and again for its tensors; each time takes many seconds.
    with mock.patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)):
        return AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        ).eval()


@dataclass(frozen=True)
class Difference:
    """Where two greedy continuations part, and how close the reference's two best logits are there."""

    position: int
    ours: int
    theirs: int
    gap: float

    def __str__(self) -> str:
        return f"token {self.position}: ours {self.ours}, reference {self.theirs}, logit gap {self.gap:.2e}"


TIE_GAP = 2e-3
"""Logits this close are a tie: float32 sums in another order differ by as much."""


@torch.inference_mode()
def compare_greedy(model: Any, prompt_ids: list[int], ours: list[int]) -> Difference | None:
    """The first place where `ours` is not the reference's greedy choice given the same tokens before it."""
    ids = torch.tensor([prompt_ids + ours])
    logits = model(ids).logits[0, len(prompt_ids) - 1 : -1]
    best = logits.argmax(-1)
    wrong = (best != torch.tensor(ours)).nonzero()
    if not len(wrong):
        return None
    at = int(wrong[0])
    gap = float(logits[at, best[at]] - logits[at, ours[at]])
    return Difference(at, ours[at], int(best[at]), gap)
