"""Mamba: layers with states and nothing else, so that a request takes the same memory however long it is."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.loading.weight_map import WeightMap
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.mixers import Mamba, MambaSizes, MixerLayer

MAMBA_WEIGHTS = WeightMap(
    stack={
        "mixer.gated_norm": ("norm",),
        "input_layernorm": ("norm",),
        "norm": ("norm_f",),
        "embed_tokens": ("embeddings",),
    },
    strip_prefix="backbone.",
)


class MambaForCausalLM(CausalLM):
    """Mamba."""

    only: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    weights = MAMBA_WEIGHTS
    plans_natively = False
    ties_by_default = True

    def rope_kinds(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {}

    def make_norm(self, ctx: LayerContext) -> RMSNorm:
        return RMSNorm(self.hidden_size, self.config["layer_norm_eps"], ctx=ctx)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        sizes = MambaSizes(
            size=self.hidden_size,
            inner_size=config.get("intermediate_size") or config["expand"] * self.hidden_size,
            state_size=config["state_size"],
            rank=config["time_step_rank"],
            conv_size=config["conv_kernel"],
            bias=bool(config.get("use_bias")),
            conv_bias=bool(config.get("use_conv_bias", True)),
        )
        return MixerLayer(Mamba(sizes, ctx=ctx.child("mixer")), config["layer_norm_eps"], ctx=ctx)
