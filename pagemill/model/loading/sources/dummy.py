"""Random weights without files, for measuring: small normal numbers, the same for the same seed and name, so that
ranks which need different tensors agree about them."""

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pagemill.config.facts import ModelFacts
from pagemill.model.loading.expert_shapes import expert_shapes
from pagemill.model.loading.latent_shapes import latent_shapes
from pagemill.model.loading.part import Select, whole

_SCALE = 0.02
CPU = torch.device("cpu")


def iterate(
    facts: ModelFacts, dtype: torch.dtype, seed: int, select: Select = whole, *, device: torch.device = CPU
) -> Iterator[tuple[str, Tensor]]:
    """(name, selected part) as a checkpoint of the architecture would have them, made on `device`. Devices of different
    kinds make different numbers."""
    generator = torch.Generator(device)
    for name, shape in shapes(facts):
        part = select(name, shape)
        if part is None:
            continue
        if name.endswith("norm.weight"):
            yield name, part.of(torch.ones(shape, dtype=dtype, device=device))
        else:
            generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            tensor = torch.empty(shape, dtype=dtype, device=device).normal_(0, _SCALE, generator=generator)
            # A view would keep the whole tensor in memory.
            yield name, tensor if part.covers(shape) else part.of(tensor).clone()


def shapes(facts: ModelFacts) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that the decoders here have."""
    config, size = facts.hf_config, facts.hf_config["hidden_size"]
    yield "model.embed_tokens.weight", (facts.vocab_size, size)
    yield "model.norm.weight", (size,)
    yield "lm_head.weight", (facts.vocab_size, size)
    for index in range(config["num_hidden_layers"]):
        mixed = expert_shapes(facts, index)
        for name, shape in (*mixed, *_layer_shapes(facts.architecture, config, dense=not mixed)):
            yield f"model.layers.{index}.{name}", shape


def _layer_shapes(architecture: str, config: dict[str, Any], dense: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    size, inner = config["hidden_size"], config["intermediate_size"]
    yield from latent_shapes(config) or _attention_shapes(architecture, config)
    mlp = (("gate_proj", (inner, size)), ("up_proj", (inner, size)), ("down_proj", (size, inner))) if dense else ()
    for name, shape in mlp:
        yield f"mlp.{name}.weight", shape
        if config.get("mlp_bias"):
            yield f"mlp.{name}.bias", shape[:1]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if architecture.startswith("Gemma3"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in norms:
        yield f"{name}.weight", (size,)


def _attention_shapes(architecture: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    size, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or size // heads
    outs = {"q_proj": heads * head_size}
    outs["k_proj"] = outs["v_proj"] = (config.get("num_key_value_heads") or heads) * head_size
    for name, out in outs.items():
        yield f"self_attn.{name}.weight", (out, size)
        if architecture.startswith("Qwen2") or config.get("attention_bias"):
            yield f"self_attn.{name}.bias", (out,)
    yield "self_attn.o_proj.weight", (size, outs["q_proj"])
    if config.get("attention_bias") and not architecture.startswith("Qwen2"):
        yield "self_attn.o_proj.bias", (size,)
    if architecture.startswith(("Qwen3", "Gemma3")):
        yield "self_attn.q_norm.weight", (head_size,)
        yield "self_attn.k_norm.weight", (head_size,)
