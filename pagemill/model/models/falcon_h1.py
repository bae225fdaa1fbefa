"""Falcon-H1: Mamba-2 and attention side by side in every layer, of the same normed input, with factors on what goes in
and what comes out."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.models.bamba import mamba2_sizes
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.decoder import AttentionTraits, DecoderAttention, GatedMLP
from pagemill.model.models.jamba import HYBRID_WEIGHTS
from pagemill.model.models.mixers import Mamba2, Mamba2Sizes
from pagemill.model.network.operations import Network, Value

NO_FACTORS = (1.0,) * 5


def _scaled_gate(gate_up: Tensor, factor: float) -> Tensor:
    gate_up[:, : gate_up.shape[1] // 2] *= factor
    return gate_up


class ScaledMLP(GatedMLP):
    """A gated MLP with factors on gates and on what comes out."""

    def __init__(self, config: Mapping[str, Any], *, ctx: LayerContext) -> None:
        super().__init__(config, ctx=ctx)
        factors: list[float] = config.get("mlp_multipliers") or [1.0, 1.0]
        self.gate_factor = float(factors[0])
        self.factor = float(factors[1])

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        gate_up = net.linear(x, self.gate_up_proj)
        if self.gate_factor != 1.0:
            gate_up = net.call(partial(_scaled_gate, factor=self.gate_factor), gate_up, by_rows=True)
        return net.scaled(net.linear(net.gated(gate_up, self.activation), self.down_proj), self.factor)


class ParallelHybridLayer(nn.Module):
    """Mamba-2 and attention of the same input, both added to it, and an MLP, behind a norm each."""

    def __init__(
        self, config: Mapping[str, Any], mixer: Mamba2, attention: DecoderAttention, *, ctx: LayerContext
    ) -> None:
        super().__init__()
        size = config["hidden_size"]
        eps = config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(size, eps, ctx=ctx.child("input_layernorm"))
        self.pre_ff_layernorm = RMSNorm(size, eps, ctx=ctx.child("pre_ff_layernorm"))
        self.mamba = mixer
        self.self_attn = attention
        self.mlp = ScaledMLP(config, ctx=ctx.child("mlp"))
        names = ("ssm_in_multiplier", "ssm_out_multiplier", "attention_in_multiplier", "attention_out_multiplier")
        self._factors = [config.get(name) for name in names]

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        mixes, mixed, attends, attended = self._factors
        normed = net.norm(x, self.input_layernorm)
        first = net.scaled(self.mamba.operations(net, net.scaled(normed, mixes)), mixed)
        second = net.scaled(self.self_attn.operations(net, net.scaled(normed, attends)), attended)
        x = x + (first + second)
        return x + self.mlp.operations(net, net.norm(x, self.pre_ff_layernorm))


class FalconH1ForCausalLM(CausalLM):
    """key_multiplier, a factor of keys, is one of scores."""

    only: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    weights = HYBRID_WEIGHTS
    plans_natively = False

    def embedding_scale(self, size: int) -> float | None:
        return float(self.config.get("embedding_multiplier") or 1.0)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        bias = bool(config.get("attention_bias"))
        traits = AttentionTraits.of(config, qkv_bias=bias, out_bias=bias)
        traits = dataclasses.replace(traits, scale=traits.scale * float(config.get("key_multiplier") or 1.0))
        attention = DecoderAttention(config, traits, ctx=ctx.child("self_attn"))
        mixer = Mamba2(self._sizes(), ctx=ctx.child("mamba"))
        return ParallelHybridLayer(config, mixer, attention, ctx=ctx)

    def _sizes(self) -> Mamba2Sizes:
        config = self.config
        return dataclasses.replace(
            mamba2_sizes(config),
            out_bias=bool(config.get("projectors_bias")),
            normed=bool(config.get("mamba_rms_norm")),
            gates_first=not config.get("mamba_norm_before_gate", True),
            factors=tuple(config.get("ssm_multipliers") or NO_FACTORS),
        )

    def logits(self, net: Network, x: Value) -> Value:
        return net.scaled(super().logits(net, x), self.config.get("lm_head_multiplier"))
