"""Granite 4: Granite's factors; Mamba-2 and attention mixed, or attention alone, with or without rotary embedding; an
MLP, and in some models experts beside it."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.artifacts.config_fields import changed
from pagemill.errors import ModelError
from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.moe.stacked_experts import StackedExperts
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.layers.rotary import rope_settings
from pagemill.model.loading.weight_map import WeightMap
from pagemill.model.models.bamba import mamba2_sizes
from pagemill.model.models.causal_lm import DECODER_WEIGHTS
from pagemill.model.models.decoder import AttentionTraits, DecoderAttention, GatedMLP, MixtureOfExperts
from pagemill.model.models.granite import GraniteForCausalLM
from pagemill.model.models.mixers import Mamba2
from pagemill.model.network.operations import Network, Value

ATTENTION = ("attention", "full_attention")
"""What layer_types calls layers that attend; the others are Mamba-2's."""


class GraniteHybridLayer(nn.Module):
    """Attention or Mamba-2, then an MLP and experts of the same input, or one of these, each behind a norm, times a
    factor."""

    def __init__(
        self,
        config: Mapping[str, Any],
        mixer: Mamba2 | DecoderAttention,
        shared_mlp: GatedMLP | None,
        experts: MixtureOfExperts | None,
        *,
        ctx: LayerContext,
    ) -> None:
        super().__init__()
        size = config["hidden_size"]
        eps = config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(size, eps, ctx=ctx.child("input_layernorm"))
        self.post_attention_layernorm = RMSNorm(size, eps, ctx=ctx.child("post_attention_layernorm"))
        self.add_module("self_attn" if isinstance(mixer, DecoderAttention) else "mamba", mixer)
        self._mixer = (mixer,)
        self.shared_mlp = shared_mlp
        self.mlp = experts
        self.multiplier = config.get("residual_multiplier")

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        mixed = self._mixer[0].operations(net, net.norm(x, self.input_layernorm))
        x = x + net.scaled(mixed, self.multiplier)
        normed = net.norm(x, self.post_attention_layernorm)
        parts = [part.operations(net, normed) for part in (self.mlp, self.shared_mlp) if part is not None]
        inner = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return x + net.scaled(inner, self.multiplier)


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """layer_types says which layers attend; position_embedding_type, whether rotary embedding does."""

    plans_natively = False
    only: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    weights = WeightMap(
        stack={
            "qkv_proj": DECODER_WEIGHTS.stack["qkv_proj"],
            "mamba.gated_norm": ("norm",),
            "mlp.gate": ("router.layer",),
            "mlp.experts": ("input_linear", "output_linear"),
            "shared_mlp.gate_up_proj": ("input_linear",),
            "shared_mlp.down_proj": ("output_linear",),
        },
        strip_prefix="model.",
        ignore=DECODER_WEIGHTS.ignore,
        parents={"mlp": "block_sparse_moe"},
    )

    def rope_kinds(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {"default": rope_settings(config)} if config.get("position_embedding_type") == "rope" else {}

    def traits(self) -> AttentionTraits:
        config = self.config
        return AttentionTraits.of(
            config,
            scale=float(config.get("attention_multiplier") or 1.0),
            qkv_bias=bool(config.get("attention_bias")),
            out_bias=bool(config.get("attention_bias")),
            rope="default" if self.rope_kinds(config) else None,
        )

    def attends(self, index: int) -> bool:
        """Whether a layer is attention, not Mamba-2."""
        kinds = self.config.get("layer_types") or self.config.get("layers_block_type") or ()
        return len(kinds) > 0 and kinds[index] in ATTENTION

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        mixer: Mamba2 | DecoderAttention
        if self.attends(index):
            mixer = DecoderAttention(config, self.traits(), ctx=ctx.child("self_attn"))
        else:
            mixer = Mamba2(mamba2_sizes(config), ctx=ctx.child("mamba"))
        return GraniteHybridLayer(config, mixer, self._shared_mlp(ctx), self._experts(ctx.child("mlp")), ctx=ctx)

    def _shared_mlp(self, ctx: LayerContext) -> GatedMLP | None:
        config = self.config
        inner_size = config.get("shared_intermediate_size")
        if not inner_size and self.num_experts:
            return None
        if not inner_size:
            raise ModelError("shared_intermediate_size is to be at least 1 in a model without experts")
        inner = changed(config, intermediate_size=inner_size)
        return GatedMLP(inner, ctx=ctx.child("shared_mlp"), joined=True)

    def _experts(self, ctx: LayerContext) -> MixtureOfExperts | None:
        config = self.config
        if not self.num_experts:
            return None
        sizes = (self.hidden_size, config["intermediate_size"], self.num_experts)
        activation = config.get("hidden_act") or "silu"
        experts = StackedExperts(*sizes, activation, ctx=ctx.child("experts"))
        routing = Routing(config["num_experts_per_tok"], renormalize=True)
        return MixtureOfExperts(sizes, routing, activation, ctx=ctx, experts=experts)
