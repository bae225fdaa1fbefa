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
MATRIX_SCALE = 0.5
"""Of the matrices of tests.fakes.tiny_checkpoint, which are for a hidden size of 64."""
EMBEDDING_SCALE = {"Gemma3ForCausalLM": 0.02}
"""Of embeddings, where they would outweigh the layers: the model would repeat its input, whatever attention does."""
LATENT = {"num_key_value_heads": 4, "head_dim": 32, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "v_head_dim": 48}
SPECIFIC = {
    "Gemma3ForCausalLM": {"sliding_window": 24, "query_pre_attn_scalar": 64},
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder needs a GPU. Those of memory come first: the engines of the others leave some behind,
    which an engine in the same process cannot tell from its own."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    items.sort(key=lambda item: HERE not in item.path.parents or "test_memory" not in item.nodeid)


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
            calm_weights(folder, EMBEDDING_SCALE.get(architecture, MATRIX_SCALE))
        return str(folder)

    def reference(self, architecture: str) -> Reference:
        """The model in transformers, in float32."""
        if architecture not in self._references:
            self._references[architecture] = Reference(self.path(architecture))
        return self._references[architecture]


def calm_weights(folder: Path, embedding_scale: float) -> None:
    """Make matrices of a saved model so small that no layer amplifies rounding errors, and round all weights to
    bfloat16; they stay float32 numbers."""
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        weights = {}
        for name, tensor in load_file(file).items():
            scale = embedding_scale if "embed" in name else MATRIX_SCALE if tensor.dim() > 1 else 1.0
            weights[name] = (tensor * scale).bfloat16().float()
        save_file(weights, file, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def checkpoints(gpu: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Random models by architecture; skips without transformers, which makes them."""
    pytest.importorskip("transformers")
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
