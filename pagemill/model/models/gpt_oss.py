"""gpt-oss: experts with biases and a clamped gate, attention sinks, layers with and without a window in turn."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from pagemill.model.distributed.split import split_heads
from pagemill.model.kernels.moe import ExpertForm
from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.moe.merged_experts import MergedExperts, MergedForm
from pagemill.model.loading.part import Part
from pagemill.model.loading.stored import LayerTensor, StoredTensor
from pagemill.model.loading.weight_map import WeightMap
from pagemill.model.models.causal_lm import DECODER_WEIGHTS, CausalLM
from pagemill.model.models.decoder import (
    AttentionTraits,
    DecoderAttention,
    MixtureOfExperts,
    NormedLayer,
    layer_window,
    rms_norms,
)

_ALPHA = 1.702
_LIMIT = 7.0


class SinkAttention(DecoderAttention):
    """The usual attention, and a learnt logit for each head."""

    def __init__(self, config: Mapping[str, Any], traits: AttentionTraits, *, ctx: LayerContext) -> None:
        super().__init__(config, traits, ctx=ctx)
        tp = ctx.groups.tp
        self._heads = split_heads(traits.num_heads, traits.num_kv_heads, tp.rank, tp.size).query

    def checkpoint_tensors(self) -> Iterator[LayerTensor]:
        """The sinks of this rank's heads."""
        part = Part(0, self._heads.start, self._heads.stop)
        yield LayerTensor(StoredTensor("sinks", (self.traits.num_heads,)), 0, part)

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Give the attention layer this rank's sinks, [H]."""
        self.attn.take_sinks(tensor)


class GptOssForCausalLM(CausalLM):
    """A softmax router with biases, over the chosen experts."""

    rope_defaults: ClassVar[Mapping[str, Any]] = {
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }
    weights = WeightMap(
        stack={"qkv_proj": DECODER_WEIGHTS.stack["qkv_proj"], "gate": ("router",)},
        strip_prefix="model.",
        ignore=DECODER_WEIGHTS.ignore,
    )

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        bias = bool(config.get("attention_bias", True))
        traits = AttentionTraits.of(
            config, qkv_bias=bias, out_bias=bias, sinks=True, window=layer_window(config, index, period=2)
        )
        attention = SinkAttention(config, traits, ctx=ctx.child("self_attn"))
        return NormedLayer(attention, self._experts(ctx.child("mlp")), rms_norms(config), ctx=ctx)

    def _experts(self, ctx: LayerContext) -> MixtureOfExperts:
        config = self.config
        sizes = (self.hidden_size, config["intermediate_size"], self.num_experts)
        clamp = config.get("swiglu_alpha") or _ALPHA, config.get("swiglu_limit") or _LIMIT
        form = MergedForm(ExpertForm(clamp=clamp), pairs=True, biases=True)
        routing = Routing(config["num_experts_per_tok"], renormalize=True)
        experts = MergedExperts(sizes, form, ctx=ctx.child("experts"))
        return MixtureOfExperts(sizes, routing, "silu", ctx=ctx, experts=experts, router_bias=True)
