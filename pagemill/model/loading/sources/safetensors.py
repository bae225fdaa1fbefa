"""Weights of a Hugging Face folder: model.safetensors, or shards with an index. Mapped, not read into memory."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError

INDEX = "model.safetensors.index.json"


def iterate(facts: ModelFacts, dtype: torch.dtype, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every file, as stored. Raises ModelError for a missing or damaged file."""
    for path in weight_files(Path(facts.path)):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path.name} cannot be read: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights. Raises ModelError for a missing one."""
    index = folder / INDEX
    if not index.exists():
        files = [folder / "model.safetensors"]
    else:
        try:
            files = sorted({folder / Path(name).name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{INDEX} is damaged: {error}") from error
    for path in files:
        if not path.exists():
            raise ModelError(f"{path.name} is missing from {folder}")
    return files
