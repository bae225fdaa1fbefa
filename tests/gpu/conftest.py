"""Tests on a real GPU. They run where there is one: `make test-gpu`, with plain python and PYTHONPATH."""

from pathlib import Path

import pytest
import torch

from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.gpu.engines import Reference

HERE = Path(__file__).parent
LARGER = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
"""Sizes that every backend's kernels take, still tiny."""
SPECIFIC = {"Gemma3ForCausalLM": {"sliding_window": 24, "query_pre_attn_scalar": 64}}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder needs a GPU."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def gpu() -> torch.device:
    """The GPU; skips where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


class Checkpoints:
    """Random models, made on first use, whose weights are exact in bfloat16, and their references."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[str, Reference] = {}

    def path(self, architecture: str) -> str:
        """Folder of the model."""
        folder = self._folder / architecture
        if not folder.exists():
            make_checkpoint(folder, architecture, **(LARGER | SPECIFIC.get(architecture, {})))
            round_weights(folder)
        return str(folder)

    def reference(self, architecture: str) -> Reference:
        """The model in transformers, in float32."""
        if architecture not in self._references:
            self._references[architecture] = Reference(self.path(architecture))
        return self._references[architecture]


def round_weights(folder: Path) -> None:
    """Round the weights of a saved model to bfloat16; they stay float32 numbers."""
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        weights = {name: tensor.bfloat16().float() for name, tensor in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def checkpoints(gpu: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Random models by architecture; skips without transformers, which makes them."""
    pytest.importorskip("transformers")
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
