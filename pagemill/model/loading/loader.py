"""`load_model`: build the architecture, stream the weights in, and check that every one arrived exactly once."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pagemill.catalog.models import MODELS
from pagemill.catalog.weights import WEIGHTS
from pagemill.config.facts import ModelFacts
from pagemill.config.sections import ModelConfig
from pagemill.errors import ModelError
from pagemill.model.attention.selector import choose
from pagemill.model.layers.context import LayerContext
from pagemill.model.loading.weight_map import Target
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.quantization.unquantized import Unquantized
from pagemill.platforms.interface import Platform
from pagemill.utils.timing import PhaseTimer

_SHOWN = 5


def load_model(facts: ModelFacts, config: ModelConfig, platform: Platform, timer: PhaseTimer) -> CausalLM:
    """A model ready to run, in config.dtype. Raises ModelError for files that do not fit the architecture."""
    with timer.phase("build"):
        model = build_model(facts, config, platform)
    with timer.phase("weights"):
        name = "dummy" if config.load_format == "dummy" else facts.weights_format
        source = WEIGHTS.resolve(name)
        load_weights(model, source(facts, getattr(torch, config.dtype), config.seed))
    return model.eval()


def build_model(facts: ModelFacts, config: ModelConfig, platform: Platform) -> CausalLM:
    """The architecture without weights."""
    if facts.architecture not in MODELS:
        raise ModelError(
            f"architecture {facts.architecture!r} is not supported; supported: {', '.join(sorted(MODELS))}"
        )
    attention = partial(
        choose,
        device=platform.torch_device(),
        dtype=config.dtype,
        requested=config.attention_backend,
        order=platform.attention_order(),
    )
    ctx = LayerContext(getattr(torch, config.dtype), Unquantized(), attention)
    model: CausalLM = MODELS.resolve(facts.architecture)(facts, config.max_model_len or facts.max_position, ctx)
    return model


def load_weights(model: CausalLM, tensors: Any) -> None:
    """Hand every (name, tensor) to its layer. Raises ModelError that names missing and unexpected tensors."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "expected")}
    wanted = _expected(model, layers)
    seen: set[Target] = set()
    unexpected = []
    for name, tensor in tensors:
        target = model.weights.target(name)
        if target is None or (model.tied and target.layer == "lm_head"):
            continue
        if target not in wanted or target in seen:
            unexpected.append(name)
            continue
        _load(layers[target.layer], target, name, tensor)
        seen.add(target)
    if unexpected:
        raise ModelError(f"the checkpoint has tensors that the architecture does not use: {_some(unexpected)}")
    missing = sorted(model.weights.source_name(target) for target in wanted - seen)
    if missing:
        raise ModelError(f"the checkpoint lacks tensors of the architecture: {_some(missing)}")
    model.finish_loading()


def _load(layer: Any, target: Target, name: str, tensor: Tensor) -> None:
    try:
        layer.load(target.kind, target.shard, tensor)
    except ModelError as error:
        raise ModelError(f"tensor {name}: {error}") from error


def _expected(model: CausalLM, layers: dict[str, nn.Module]) -> set[Target]:
    wanted = set()
    for name, layer in layers.items():
        if model.tied and name == "lm_head":
            continue
        kinds: Any = layer.expected()  # type: ignore[operator]
        shards: Any = layer.shards
        wanted |= {Target(name, kind, shard) for kind in kinds for shard in range(len(shards))}
    return wanted


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
