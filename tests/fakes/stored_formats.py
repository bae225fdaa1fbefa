"""Tiny checkpoints in the formats of other libraries: a weight goes in, what a checkpoint stores of it and the same
weight dequantized come out. Written from the formats' descriptions, with nothing of what reads them."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.compressed_checkpoint import edit_config

Stored = tuple[dict[str, Tensor], Tensor]
"""(what a checkpoint holds of a weight, by kind; the weight dequantized)"""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output lies where in a word, from the lowest bits."""
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def store(
    folder: Path, to: Path, config: dict[str, Any], quantize: Callable[[Tensor], Stored], only: str = ""
) -> tuple[Path, Path]:
    """(stored, dequantized): two copies of a checkpoint, every linear layer but head and routers in the format, of
    those in whose name the pattern `only` is found."""
    packed, plain = (Path(shutil.copytree(folder, to / name)) for name in ("packed", "plain"))
    stored = {}
    dequantized = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if (
            weight.dim() != 2
            or not re.search(only, name)
            or re.search(r"embed_tokens|lm_head|\.mlp\.gate\.|\.router\.", name)
        ):
            stored[name] = dequantized[name] = weight
            continue
        tensors, values = quantize(weight)
        dequantized[name] = values.float()
        stored |= {f"{module}.{kind}": tensor.clone().contiguous() for kind, tensor in tensors.items()}
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(dequantized, plain / "model.safetensors", {"format": "pt"})
    edit_config(packed, quantization_config=config)
    return packed, plain


def dense_words(integers: Tensor, bits: int) -> Tensor:
    """[n, count] of 0 and up -> [n, words] int32: one long integer of each row, the first in its lowest bits."""
    if 32 % bits == 0 and integers.shape[1] * bits % 32 == 0:  # many at a time, for weights of real models
        wide = integers.long().reshape(len(integers), -1, 32 // bits)
        return (wide << bits * torch.arange(32 // bits)).sum(-1).to(torch.int32)
    rows = []
    for row in integers.tolist():
        number = sum(int(value) << bits * index for index, value in enumerate(row))
        num_words = -(-len(row) * bits // 32)
        rows.append([number >> 32 * word & 0xFFFFFFFF for word in range(num_words)])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def asymmetric(weight: Tensor, bits: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [out, in] from 0 up, scales and zero points [out, groups]."""
    groups = weight.view(len(weight), -1, size)
    low = groups.amin(-1).clamp(max=0)
    high = groups.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-4).half().float()
    zeros = (-low / scales).round().clamp(0, 2**bits - 1)
    integers = (groups / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, 2**bits - 1)
    return integers.flatten(1), scales, zeros


def gptq(
    weight: Tensor, bits: int, size: int, *, ordered: bool = False, v2: bool = False, seed: int | None = None
) -> Stored:
    """AutoGPTQ's layout. `ordered`: inputs are dealt out over groups at random, in layers of the same width alike
    unless `seed` differs."""
    width = weight.shape[1]
    generator = torch.Generator().manual_seed(width if seed is None else seed)
    order = torch.randperm(width, generator=generator) if ordered else torch.arange(width)
    integers, scales, zeros = asymmetric(weight[:, order], bits, size)
    zeros = zeros if v2 else zeros.clamp(min=1)
    places = order.argsort()
    groups = (torch.arange(width) // size)[places]
    values = (integers[:, places] - zeros[:, groups]) * scales[:, groups]
    tensors = {
        "qweight": dense_words(integers[:, places], bits).t(),
        "qzeros": dense_words((zeros if v2 else zeros - 1).t(), bits),
        "scales": scales.t().half(),
        "g_idx": groups.to(torch.int32),
    }
    return tensors, values


def awq(weight: Tensor, size: int) -> Stored:
    """AutoAWQ's layout of version gemm."""
    integers, scales, zeros = asymmetric(weight, 4, size)

    def words(by_input: Tensor) -> Tensor:
        return dense_words(by_input.reshape(len(by_input), -1, 8)[..., list(AWQ_ORDER)].flatten(1), 4)

    values = (integers - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)
    return {"qweight": words(integers.t()), "qzeros": words(zeros.t()), "scales": scales.t().half()}, values


def fp8(weight: Tensor, block: tuple[int, int] | None, name: str) -> Stored:
    """8-bit floats, with a scale for each block, or one."""
    rows, columns = block or tuple(weight.shape)
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -len(weight) % rows))
    grid = padded.reshape(len(padded) // rows, rows, padded.shape[1] // columns, columns)
    scales = (grid.abs().amax((1, 3)) / 448).clamp(min=1e-8)
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: len(weight), : weight.shape[1]]
    values = (weight / spread).to(torch.float8_e4m3fn)
    stored = {"weight": values, name: scales if block else scales.reshape(())}
    return stored | ({} if block else {"input_scale": torch.tensor(0.5)}), values.float() * spread


def nvfp4(weight: Tensor) -> Stored:
    """ModelOpt's layout: groups of 16 with 8-bit scales, and one scale of these."""
    groups = weight.reshape(len(weight), -1, 16)
    largest = weight.abs().max() / (6 * 448)
    scales = (groups.abs().amax(-1) / 6 / largest).to(torch.float8_e4m3fn)
    steps = (scales.float() * largest).unsqueeze(-1)
    codes = ((groups / steps.clamp(min=1e-12)).unsqueeze(-1) - E2M1).abs().argmin(-1)
    packed = (codes.flatten(1)[:, ::2] | codes.flatten(1)[:, 1::2] << 4).to(torch.uint8)
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": largest, "input_scale": torch.tensor(1.0)}
    return tensors, (E2M1[codes] * steps).flatten(1)


def llm_int8(weight: Tensor) -> Stored:
    """bitsandbytes' LLM.int8()."""
    largest = weight.abs().amax(1)
    values = (weight * 127 / largest[:, None]).round().to(torch.int8)
    format_ = torch.tensor(0, dtype=torch.uint8)
    return {"weight": values, "SCB": largest, "weight_format": format_}, values * largest[:, None] / 127


def table_4bit(weight: Tensor, table: Tensor, kind: str, nested: bool) -> Stored:
    """bitsandbytes' blocks of 64 over all rows, whose scales may be indices of a table in blocks of 256."""
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    absmax = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors: dict[str, Tensor] = {}
    if nested:
        of_scales = torch.linspace(-1, 1, 256)
        offset = float(absmax.mean())
        grid = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        largest = grid.abs().amax(1)
        codes = (grid / largest[:, None]).unsqueeze(-1).sub(of_scales).abs().argmin(-1).flatten()[: len(absmax)]
        absmax = of_scales[codes] * largest.repeat_interleave(256)[: len(absmax)] + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {"weight.nested_absmax": largest, "weight.nested_quant_map": of_scales}
    indices = (blocks / absmax[:, None]).unsqueeze(-1).sub(table).abs().argmin(-1).flatten()
    tensors |= {
        "weight": (indices[::2] << 4 | indices[1::2]).to(torch.uint8).unsqueeze(1),
        "weight.absmax": codes.to(torch.uint8) if nested else absmax,
        "weight.quant_map": table,
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    values = (table[indices] * absmax.repeat_interleave(64))[: weight.numel()]
    return tensors, values.view(weight.shape)


def torchao_rows(weight: Tensor, dtype: torch.dtype) -> Stored:
    """torchao's Int8Tensor and Float8Tensor with a scale per output."""
    top = 127 if dtype is torch.int8 else 448
    scales = weight.abs().amax(1, keepdim=True) / top
    values = (weight / scales).round().to(dtype) if dtype is torch.int8 else (weight / scales).to(dtype)
    tensors = {"_weight_qdata": values, "_weight_scale": scales}
    if dtype is torch.int8:
        tensors["_weight_zero_point"] = torch.zeros(len(weight), 1, dtype=torch.int8)
    return tensors, values.float() * scales


def torchao_pairs(weight: Tensor, size: int) -> Stored:
    """torchao's Int4Tensor: signed integers in pairs, and what is added to their products."""
    integers, scales, zeros = asymmetric(weight, 4, size)
    offsets = (8 - zeros) * scales
    signed = (integers - 8).to(torch.int8).view(torch.uint8) & 15
    tensors = {
        "_weight_qdata": signed[:, ::2] | signed[:, 1::2] << 4,
        "_weight_scale": scales.t(),
        "_weight_zero_point": offsets.t(),
    }
    spread = scales.repeat_interleave(size, 1), offsets.repeat_interleave(size, 1)
    return tensors, (integers - 8) * spread[0] + spread[1]


def mxfp4_experts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [N, in, out] as gpt-oss publishes them: blocks [N, out, in / 32, 16] and scales [N, out, in / 32]."""
    groups = weight.transpose(1, 2).reshape(len(weight), weight.shape[2], -1, 32)
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    codes = ((groups / exponents.exp2().unsqueeze(-1)).unsqueeze(-1) - E2M1).abs().argmin(-1)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks.to(torch.uint8).contiguous(), (exponents + 127).to(torch.uint8).contiguous()


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """What `mxfp4_experts` makes -> [N, in, out] float32."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    return (E2M1[codes] * (scales.float() - 127).exp2().unsqueeze(-1)).flatten(2).transpose(1, 2).contiguous()


def store_gpt_oss(folder: Path, to: Path) -> tuple[Path, Path]:
    """(stored, dequantized): two copies of a checkpoint of gpt-oss, its experts as they are published."""
    packed, plain = (Path(shutil.copytree(folder, to / name)) for name in ("packed", "plain"))
    stored = {}
    dequantized = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.dim() != 3:
            stored[name] = dequantized[name] = weight
            continue
        blocks, scales = mxfp4_experts(weight)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dequantized[name] = mxfp4_values(blocks, scales)
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(dequantized, plain / "model.safetensors", {"format": "pt"})
    edit_config(packed, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return packed, plain
