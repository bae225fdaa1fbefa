"""Gemma 4, text: sliding-window layers, and full ones with wider heads, of which a quarter is turned, and where keys
may be values too; experts beside an MLP in some sizes, vectors of each token for each layer in others."""

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from pagemill.artifacts.config_fields import changed
from pagemill.errors import ModelError
from pagemill.model.kernels.native_experts import NativeRouting
from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.moe.router import Router
from pagemill.model.layers.moe.stacked_experts import StackedExperts
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.layers.rotary import rope_settings, turned_size
from pagemill.model.loading.stored import LayerTensor
from pagemill.model.models.decoder import (
    FULL,
    SLIDING,
    AttentionTraits,
    DecoderAttention,
    GatedMLP,
    layer_window,
    norm_of_each_head,
    rms_norms,
)
from pagemill.model.models.gemma3n import VectorLayer, VectorsForLayers
from pagemill.model.network.operations import Network, Value
from pagemill.utils.text import shown

_ACTIVATION = "gelu_pytorch_tanh"
_PERIOD = 6
_FULL_HEAD = 512
_ROPE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    }
)


def _with_kinds(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the kind of every layer: all but each sixth slide, where it does not say; the last never does."""
    count = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [FULL if (index + 1) % _PERIOD == 0 else SLIDING for index in range(count)]
    complete = cast(dict[str, Any], copy.copy(config))  # of the same class, which names a field that is missing
    complete["layer_types"] = [*kinds[: count - 1], FULL]
    return complete


def _sizes(config: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """The config with the sizes of one layer's heads."""
    listed = config.get("per_layer_config")
    if listed is not None:
        # Of ten layers and more, the library writes their numbers with leading zeros.
        own = (sizes for layer, sizes in listed.items() if int(layer) == index)
        return changed(config, **next(own, {}))
    if config["layer_types"][index] != FULL:
        return changed(config)
    sizes = {"head_dim": config.get("global_head_dim") or _FULL_HEAD}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        sizes["num_key_value_heads"] = config["num_global_key_value_heads"]
    return changed(config, **sizes)


class ScaledRouter(Router):
    """The weights of a token's experts add up to 1, and are then multiplied by a number of each expert."""

    def __init__(self, size: int, num_experts: int, routing: Routing, *, ctx: LayerContext) -> None:
        super().__init__(size, num_experts, routing, ctx=ctx)
        self.scales = torch.empty(0)
        """[X] float32."""

    def native_routing(self) -> NativeRouting:
        """How native code chooses, by the logits that `native` gives."""
        return NativeRouting.of(self.routing, self.shards[0], self.correction, self.scales)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights, as `Router.choose` gives them."""
        chosen, weights = super().choose(x)
        return chosen, weights * self.scales[chosen.long()]


class NormedRouter(nn.Module):
    """A norm and a router behind it; a checkpoint has the norm's weight and the experts' scales without layers of their
    own."""

    def __init__(self, config: Mapping[str, Any], num_experts: int, *, ctx: LayerContext) -> None:
        super().__init__()
        size = config["hidden_size"]
        routing = Routing(config["top_k_experts"], renormalize=True)
        self.name = ctx.name
        self.proj = ScaledRouter(size, num_experts, routing, ctx=ctx.child("proj"))
        self._norm = RMSNorm(size, config["rms_norm_eps"], ctx=ctx.child("norm"), weighted=False)
        self._shapes = {"scale": (size,), "per_expert_scale": (num_experts,)}

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        """What belongs to no layer within."""
        return tuple(LayerTensor.whole(kind, shape) for kind, shape in self._shapes.items())

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take a checkpoint tensor."""
        if kind == "scale":
            self._norm.load("weight", 0, tensor)
        else:
            self.proj.scales = tensor.float()

    def normed(self, net: Network, x: Value) -> Value:
        """What the router reads, [T, E]."""
        return net.scaled(net.norm(x, self._norm), self._norm.size**-0.5)


class Gemma4Layer(VectorLayer):
    """Attention and an MLP, beside which experts may be, and what is made of the layer's vector, where it has one; the
    sum is scaled by a number of the layer."""

    def __init__(
        self,
        config: Mapping[str, Any],
        attention: DecoderAttention,
        mlp: GatedMLP,
        num_experts: int,
        *,
        ctx: LayerContext,
    ) -> None:
        """`num_experts`: 0 for none."""
        super().__init__(config, attention, mlp, ctx=ctx)
        self.name = ctx.name
        self.scalar = torch.empty(0)
        self.experts: StackedExperts | None = None
        if num_experts:
            make_norm = rms_norms(config)
            sizes = (config["hidden_size"], config["moe_intermediate_size"], num_experts)
            kinds = "gate_up_proj", "down_proj"
            self.router = NormedRouter(config, num_experts, ctx=ctx.child("router"))
            self.experts = StackedExperts(*sizes, _ACTIVATION, ctx=ctx.child("experts"), kinds=kinds)
            self.post_feedforward_layernorm_1 = make_norm(ctx.child("post_feedforward_layernorm_1"))
            self.pre_feedforward_layernorm_2 = make_norm(ctx.child("pre_feedforward_layernorm_2"))
            self.post_feedforward_layernorm_2 = make_norm(ctx.child("post_feedforward_layernorm_2"))

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        """What belongs to no layer within."""
        return (LayerTensor.whole("layer_scalar", (1,)),)

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take the checkpoint tensor."""
        self.scalar = tensor.to(self.input_layernorm.dtype)

    def operations(self, net: Network, x: Value, vector: Value | None) -> Value:
        """[T, E], and [T, P] where layers have vectors -> [T, E]."""
        attended = self.self_attn.operations(net, net.norm(x, self.input_layernorm))
        x = x + net.norm(attended, self.post_attention_layernorm)
        inner = self.mlp.operations(net, net.norm(x, self.pre_feedforward_layernorm))
        if self.experts is not None:
            inner = net.norm(inner, self.post_feedforward_layernorm_1) + self._mixed(net, x, self.experts)
        x = x + net.norm(inner, self.post_feedforward_layernorm)
        if vector is not None:
            x = x + self.of_vector(net, x, vector)
        return net.scaled(x, lambda: self.scalar)

    def _mixed(self, net: Network, x: Value, experts: StackedExperts) -> Value:
        own = net.norm(x, self.pre_feedforward_layernorm_2)
        mixed = net.experts(own, self.router.proj, experts, routed_by=self.router.normed(net, x))
        return net.norm(mixed, self.post_feedforward_layernorm_2)


class Gemma4ForCausalLM(VectorsForLayers):
    """The text model of Gemma 4."""

    only: ClassVar[Mapping[str, Any]] = {"hidden_activation": _ACTIVATION}

    def make_parts(self, layers: range, max_model_len: int, ctx: LayerContext) -> None:
        """Raises ConfigError for pipeline stages that cannot be, ModelError for attention in both directions."""
        if self.config.get("use_bidirectional_attention") in ("all", True):
            raise ModelError(
                "use_bidirectional_attention='all' is not supported for Gemma4ForCausalLM: it is to be 'vision' or null"
            )
        self.config = _with_kinds(self.config)
        super().make_parts(layers, max_model_len, ctx)

    def rope_kinds(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        kinds = config["layer_types"]
        found = {}
        for kind in dict.fromkeys(kinds):
            sizes = {_sizes(config, index)["head_dim"] for index, one in enumerate(kinds) if one == kind}
            if len(sizes) > 1 or kind not in _ROPE:
                raise ModelError(
                    f"layers of the kind {shown(kind)}, with head_dim of {sorted(sizes)}, are not supported"
                )
            settings = rope_settings(config, kind) if config.get("rope_parameters") else dict(_ROPE[kind])
            found[kind] = settings | {"head_dim": sizes.pop()}
        return found

    @staticmethod
    def rotary_size(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
        return turned_size(settings["head_dim"], settings)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        bias = bool(config.get("attention_bias"))
        eps = config["rms_norm_eps"]
        window = layer_window(config, index, period=_PERIOD)
        owner = self.kv_owner(index)
        traits = AttentionTraits.of(
            _sizes(config, index),
            scale=1.0,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm_of_each_head(eps),
            v_norm=lambda heads, ctx: RMSNorm(heads.size, eps, ctx=ctx, weighted=False),
            window=window,
            rope=config["layer_types"][index],
            kv_owner=owner,
            key_is_value=bool(config.get("attention_k_eq_v")) and config["layer_types"][index] == FULL,
        )
        attention = DecoderAttention(config, traits, ctx=ctx.child("self_attn"))
        wide = 2 if config.get("use_double_wide_mlp") and owner is not None else 1
        inner = changed(config, hidden_act=_ACTIVATION, intermediate_size=wide * config["intermediate_size"])
        num_experts = self.num_experts if config.get("enable_moe_block") else 0
        return Gemma4Layer(config, attention, GatedMLP(inner, ctx=ctx.child("mlp")), num_experts, ctx=ctx)

    def run_layers(self, net: Network, x: Value) -> Value:
        layers = [cast(Gemma4Layer, layer) for layer in self.layers.values()]
        vectors = self.vectors(net, x) if self.vector_size else [None] * len(layers)
        for index, layer, vector in zip(self.layers, layers, vectors, strict=True):
            net.layer_inputs.mark(int(index), x)
            x = layer.operations(net, x, vector)
        if self.is_last:
            net.layer_inputs.mark(self.config["num_hidden_layers"], x)
        return x
