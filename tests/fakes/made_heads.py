"""Tiny models and heads that propose drafts for them, each pair written once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.tiny_checkpoint import make_checkpoint


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
