"""A tiny checkpoint in the layout of compressed-tensors' pack-quantized format, and the same with its weights
dequantized: made here from the format's description, bit by bit, with nothing of what reads it."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

IGNORED = ["lm_head", r"re:.*mlp\.gate$", "re:.*block_sparse_moe.gate$"]


@dataclass(frozen=True)
class Layout:
    """How every linear layer of a checkpoint is stored."""

    bits: int = 4
    group_size: int | None = 32
    """None: a scale for each output."""
    ordered: bool = False
    """Whether inputs are dealt out over groups at random, and each names its own."""
    ignore: tuple[str, ...] = tuple(IGNORED)
    scale_dtype: torch.dtype = torch.bfloat16

    def config(self) -> dict[str, Any]:
        """The quantization_config."""
        weights = {"num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False, "observer": "minmax"}
        weights |= {"strategy": "channel"} if self.group_size is None else {"strategy": "group"}
        weights |= {"group_size": self.group_size, "actorder": "group" if self.ordered else None}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": list(self.ignore),
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
        }


def compress(folder: Path, to: Path, layout: Layout) -> tuple[Path, Path]:
    """(compressed, dequantized): two copies of a checkpoint in `to`."""
    packed, plain = (Path(shutil.copytree(folder, to / name)) for name in ("packed", "plain"))
    stored, dequantized = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if weight.dim() != 2 or "embed_tokens" in name or _is_ignored(module, layout):
            stored[name] = dequantized[name] = weight
            continue
        tensors, dequantized[name] = _quantized(weight, layout)
        stored |= {f"{module}.{kind}": tensor for kind, tensor in tensors.items()}
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(dequantized, plain / "model.safetensors", {"format": "pt"})
    edit_config(packed, quantization_config=layout.config())
    return packed, plain


def edit_config(folder: Path, **changes: Any) -> None:
    """Change values of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _is_ignored(module: str, layout: Layout) -> bool:
    return any(re.match(one[3:], module) if one.startswith("re:") else one == module for one in layout.ignore)


def _quantized(weight: Tensor, layout: Layout) -> tuple[dict[str, Tensor], Tensor]:
    rows, width = weight.shape
    size = layout.group_size or width
    largest = 2 ** (layout.bits - 1)
    groups = torch.arange(width) // size
    if layout.ordered:
        groups = groups[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
    num_groups = int(groups.max()) + 1
    scales = torch.stack([weight[:, groups == group].abs().amax(1) for group in range(num_groups)], 1) / largest
    scales = scales.to(layout.scale_dtype)
    spread = scales.float()[:, groups]
    integers = (weight / spread).round().clamp(-largest, largest - 1).to(torch.int64)
    tensors = {
        "weight_packed": _packed((integers + largest).numpy(), layout.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, width]),
    }
    if layout.ordered:
        tensors["weight_g_idx"] = groups.to(torch.int32)
    return tensors, integers * spread


def _packed(integers: np.ndarray, bits: int) -> Tensor:
    """Integers from 0 up, [out, in] -> [out, ceil(in * bits / 32)] int32: the first in the lowest bits."""
    per_word = 32 // bits
    words = np.zeros((len(integers), -(-integers.shape[1] // per_word)), np.uint32)
    for column in range(integers.shape[1]):
        words[:, column // per_word] |= (integers[:, column] << bits * (column % per_word)).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))
