"""Tiny models and heads that propose drafts for them, each pair written once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.tiny_block_heads import make_block_head
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_heads import make_head
from tests.fakes.tiny_mtp import make_mtp, make_qwen_mtp
from tests.fakes.tiny_parallel_heads import make_parallel_head
from tests.fakes.tiny_row_heads import make_medusa, make_mlp_speculator

HEADS: dict[str, Callable[[Path, int], Path]] = {
    "eagle": lambda folder, seed: make_head(folder, "eagle", seed),
    "eagle3": lambda folder, seed: make_head(folder, "eagle3", seed, draft_vocab_size=100),
    "peagle": lambda folder, seed: make_parallel_head(folder, seed, draft_vocab_size=100),
    "dflash": lambda folder, seed: make_block_head(folder, seed, draft_vocab_size=100),
    "medusa": make_medusa,
    "mlp_speculator": make_mlp_speculator,
    "draft_model": lambda folder, seed: make_checkpoint(folder, "LlamaForCausalLM", seed, num_hidden_layers=2),
}
"""What proposes for a tiny Llama, by kind."""
OWN_LAYERS: dict[str, Callable[[Path, int], Path]] = {"deepseek_mtp": make_mtp, "qwen3_next_mtp": make_qwen_mtp}
"""Models with a head of their own."""


class MadeHeads:
    """`make_head(folder, kind, seed, **changes)` saves heads of a kind; the model is a Llama."""

    def __init__(self, factory: pytest.TempPathFactory, make_head: Callable[..., Path]) -> None:
        self._factory = factory
        self._make_head = make_head
        self._found: dict[tuple[object, ...], tuple[str, str]] = {}

    def __call__(self, kind: str, seed: int = 0, **changes: object) -> tuple[str, str]:
        """The folder of a model, and that of heads for it, with fields of their configuration changed."""
        key = (kind, seed, *sorted(changes.items()))
        if key not in self._found:
            folder = self._factory.mktemp("tiny")
            target = make_checkpoint(folder / "model", "LlamaForCausalLM", seed)
            self._found[key] = str(target), str(self._make_head(folder / "heads", kind, seed, **changes))
        return self._found[key]
