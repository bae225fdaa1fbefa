"""Qwen3-Next: gated delta nets, and gated attention in every fourth layer, with experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagemill.artifacts.config_fields import changed
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.layer import Attention
from pagemill.model.distributed.split import split_heads
from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import Linear, RowLinear
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.models.causal_lm import DECODER_WEIGHTS, CausalLM
from pagemill.model.models.decoder import AttentionTraits, GatedMLP, MixtureOfExperts, has_experts
from pagemill.model.models.mixers import DeltaNet, DeltaSizes
from pagemill.model.network.operations import Layer, Network, Value

LINEAR = "linear_attention"
_EXPERTS = DECODER_WEIGHTS.with_experts("gate_proj", "up_proj", "down_proj")
QWEN3_NEXT_WEIGHTS = dataclasses.replace(
    _EXPERTS,
    stack={"gate_up_proj": ("gate_proj", "up_proj"), "linear_attn.gated_norm": ("norm",)},
    parents={**_EXPERTS.parents, "shared_experts": "shared_expert"},
    ignore=(*_EXPERTS.ignore,),
)


class GatedAttention(nn.Module):
    """Attention whose result is multiplied by a gate, which is projected beside the query."""

    def __init__(self, config: Mapping[str, Any], *, ctx: LayerContext) -> None:
        super().__init__()
        traits = AttentionTraits.of(config)
        tp = ctx.groups.tp
        here = split_heads(traits.num_heads, traits.num_kv_heads, tp.rank, tp.size)
        self.num_heads = len(here.query)
        self.num_kv_heads = len(here.kv)
        self.head_size = traits.head_size
        size = config["hidden_size"]
        dim = traits.head_size
        bias = bool(config.get("attention_bias"))
        eps = config["rms_norm_eps"]

        def linear(name: str, num_heads: int, mine: range, width: int) -> Linear:
            rows = [range(mine.start * width, mine.stop * width)]
            return Linear(size, (num_heads * width,), bias=bias, ctx=ctx.child(name), rows=rows)

        self.q_proj = linear("q_proj", traits.num_heads, here.query, 2 * dim)
        self.k_proj = linear("k_proj", traits.num_kv_heads, here.kv, dim)
        self.v_proj = linear("v_proj", traits.num_kv_heads, here.kv, dim)
        self.o_proj = RowLinear(
            traits.num_heads * dim, size, bias=bias, ctx=ctx.child("o_proj"), what="num_attention_heads"
        )
        self.q_norm = RMSNorm(dim, eps, ctx=ctx.child("q_norm"), offset=1.0)
        self.k_norm = RMSNorm(dim, eps, ctx=ctx.child("k_norm"), offset=1.0)
        spec = AttentionLayerSpec(self.num_heads, self.num_kv_heads, dim, traits.scale)
        name = ctx.child("attn").name
        self.attn = Attention(spec, name=name, backend=ctx.attention(spec, name))

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        kv_heads = self.num_kv_heads
        both = net.linear(x, self.q_proj)
        query = net.rotary(net.norm(net.call(self._query, both, by_rows=True), self.q_norm), "default")
        key = net.norm(net.per_head(net.linear(x, self.k_proj), kv_heads), self.k_norm)
        value = net.per_head(net.linear(x, self.v_proj), kv_heads)
        attended = net.attend(query, net.rotary(key, "default"), value, self.attn)
        return net.linear(net.call(self._gated, attended, both, by_rows=True), self.o_proj)

    def _query(self, both: Tensor) -> Tensor:
        return both.view(len(both), self.num_heads, -1)[:, :, : self.head_size].contiguous()

    def _gated(self, attended: Tensor, both: Tensor) -> Tensor:
        gate = both.view(len(both), self.num_heads, -1)[:, :, self.head_size :]
        return attended * torch.sigmoid(gate.reshape(attended.shape))


class Qwen3NextLayer(nn.Module):
    """Attention or a delta net, and experts or an MLP, each behind a norm."""

    def __init__(
        self, config: Mapping[str, Any], mixer: DeltaNet | GatedAttention, mlp: Layer, *, ctx: LayerContext
    ) -> None:
        super().__init__()
        size = config["hidden_size"]
        eps = config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(size, eps, ctx=ctx.child("input_layernorm"), offset=1.0)
        after = ctx.child("post_attention_layernorm")
        self.post_attention_layernorm = RMSNorm(size, eps, ctx=after, offset=1.0)
        if isinstance(mixer, DeltaNet):
            self.linear_attn = mixer
        else:
            self.self_attn = mixer
        self.mlp = mlp

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        mixer = self.self_attn if hasattr(self, "self_attn") else self.linear_attn
        x = x + mixer.operations(net, net.norm(x, self.input_layernorm))
        return x + self.mlp.operations(net, net.norm(x, self.post_attention_layernorm))


class Qwen3NextForCausalLM(CausalLM):
    """layer_types, or else every full_attention_interval-th layer, says which layers attend. What a checkpoint has for
    predicting several tokens (mtp) is not used."""

    rope_defaults: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.25}
    only: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    weights = QWEN3_NEXT_WEIGHTS
    norm_offset = 1.0
    plans_natively = False

    def elsewhere(self, layer: str) -> bool:
        return layer.startswith("mtp.") or super().elsewhere(layer)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        kinds = config.get("layer_types")
        period = config.get("full_attention_interval") or 4
        is_linear = kinds[index] == LINEAR if kinds else (index + 1) % period != 0
        mixer: DeltaNet | GatedAttention
        if is_linear:
            mixer = DeltaNet(self._sizes(), ctx=ctx.child("linear_attn"))
        else:
            mixer = GatedAttention(config, ctx=ctx.child("self_attn"))
        return Qwen3NextLayer(config, mixer, self._mlp(index, ctx.child("mlp")), ctx=ctx)

    def _sizes(self) -> DeltaSizes:
        config = self.config
        return DeltaSizes(
            size=self.hidden_size,
            num_key_heads=config["linear_num_key_heads"],
            num_heads=config["linear_num_value_heads"],
            key_size=config["linear_key_head_dim"],
            value_size=config["linear_value_head_dim"],
            conv_size=config["linear_conv_kernel_dim"],
            eps=config["rms_norm_eps"],
        )

    def _mlp(self, index: int, ctx: LayerContext) -> Layer:
        config = self.config
        if not has_experts(config, self.num_experts, index):
            return GatedMLP(config, ctx=ctx)
        routing = Routing(config["num_experts_per_tok"], renormalize=bool(config.get("norm_topk_prob", True)))
        sizes = (self.hidden_size, config["moe_intermediate_size"], self.num_experts)
        inner = changed(config, intermediate_size=config["shared_expert_intermediate_size"])
        shared = GatedMLP(inner, ctx=ctx.child("shared_experts"))
        activation = config.get("hidden_act", "silu")
        return MixtureOfExperts(sizes, routing, activation, ctx=ctx, shared=shared, gates_shared=True)
