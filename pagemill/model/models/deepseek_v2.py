"""DeepSeek-V2 and V3: multi-head latent attention, and experts of which some are shared by all tokens, after some
layers without."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from pagemill.artifacts.config_fields import changed
from pagemill.errors import ModelError
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.layer import Attention
from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import Linear, RowLinear
from pagemill.model.layers.mla import AbsorbedLinear, LatentLinear, QueryLinear
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.layers.rotary import rope_settings, yarn_magnitude
from pagemill.model.models.causal_lm import DECODER_WEIGHTS, CausalLM
from pagemill.model.models.decoder import GatedMLP, MixtureOfExperts, NormedLayer, rms_norms
from pagemill.model.network.operations import Layer, Network, Value
from pagemill.utils.text import index_of

LATENT_EPS = 1e-6
"""Of the norms of latent vectors, whatever the configuration says of the others."""


class LatentAttention(nn.Module):
    """Of each token one vector is kept: a key part that is turned by its position, and a latent vector. Queries are
    brought to its space and results back, so that nothing else is read."""

    def __init__(self, config: Mapping[str, Any], *, ctx: LayerContext) -> None:
        super().__init__()
        size = config["hidden_size"]
        heads = config["num_attention_heads"]
        latent = config["kv_lora_rank"]
        plain = config["qk_nope_head_dim"]
        turned = config["qk_rope_head_dim"]
        value = config["v_head_dim"]
        interleaved = bool(config.get("rope_interleave", True))
        bias = bool(config.get("attention_bias"))
        rank = config.get("q_lora_rank")
        self.kept_sizes = (turned, latent)
        self.q_a_proj = self.q_a_layernorm = None
        if rank is not None:
            self.q_a_proj = Linear(size, (rank,), bias=bias, ctx=ctx.child("q_a_proj"))
            self.q_a_layernorm = RMSNorm(rank, LATENT_EPS, ctx=ctx.child("q_a_layernorm"))
        name = "q_proj" if rank is None else "q_b_proj"
        query = QueryLinear(rank or size, heads, (plain, turned), interleaved=interleaved, ctx=ctx.child(name))
        self.add_module(name, query)
        self._query = (query,)  # not as a second module
        self.kv_a_proj_with_mqa = LatentLinear(
            size, (latent, turned), interleaved=interleaved, bias=bias, ctx=ctx.child("kv_a_proj_with_mqa")
        )
        self.kv_a_layernorm = RMSNorm(latent, LATENT_EPS, ctx=ctx.child("kv_a_layernorm"))
        self.kv_b_proj = AbsorbedLinear(latent, heads, (plain, value), ctx=ctx.child("kv_b_proj"))
        self.o_proj = RowLinear(
            heads * value, size, bias=bias, ctx=ctx.child("o_proj"), what="size of the attention heads"
        )
        num_heads = heads // ctx.groups.tp.size
        scale = (plain + turned) ** -0.5 * _magnitude(config) ** 2
        spec = AttentionLayerSpec(
            num_heads, 1, turned + latent, scale, latent_size=latent, expanded_sizes=(plain, value)
        )
        name = ctx.child("attn").name
        self.attn = Attention(spec, name=name, backend=ctx.attention(spec, name))

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        compressed = x
        if self.q_a_proj is not None and self.q_a_layernorm is not None:
            compressed = net.norm(net.linear(x, self.q_a_proj), self.q_a_layernorm)
        query = net.per_head(net.linear(compressed, self._query[0]), self.attn.spec.num_heads)
        turned, latent = net.split(net.linear(x, self.kv_a_proj_with_mqa), *self.kept_sizes)
        kept = net.per_head(net.join(turned, net.norm(latent, self.kv_a_layernorm)), 1)
        query = net.rotary(query, "default")
        kept = net.rotary(kept, "default")
        attended = net.attend(net.absorb(query, self.kv_b_proj), kept, kept, self.attn)
        return net.linear(net.expand(attended, self.kv_b_proj), self.o_proj)


def _magnitude(config: Mapping[str, Any]) -> float:
    """What YaRN multiplies query and key by, as far as cos and sin do not."""
    settings = rope_settings(config)
    whole = settings.get("mscale_all_dim")
    return yarn_magnitude(settings["factor"], whole) if settings["rope_type"] != "default" and whole else 1.0


class DeepseekV2ForCausalLM(CausalLM):
    """A softmax router, which may choose the best groups of experts first."""

    weights = dataclasses.replace(
        DECODER_WEIGHTS.with_experts("gate_proj", "up_proj", "down_proj"),
        stack={"gate_up_proj": DECODER_WEIGHTS.stack["gate_up_proj"]},
    )
    corrects_router = False

    @staticmethod
    def rotary_size(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
        return int(config["qk_rope_head_dim"])

    def elsewhere(self, layer: str) -> bool:
        """Layers that predict further tokens come after the last one, and are not needed."""
        head, _, rest = layer.partition(".")
        index = index_of(rest.partition(".")[0])
        last = self.config["num_hidden_layers"]
        extra = range(last, last + int(self.config.get("num_nextn_predict_layers") or 0))
        return super().elsewhere(layer) or (head == "layers" and index in extra)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        step = self.config.get("moe_layer_freq") or 1
        first = self.config.get("first_k_dense_replace") or 0
        mixes = self.num_experts > 0 and index >= first and index % step == 0
        inner = ctx.child("mlp")
        mlp = self._experts(inner) if mixes else GatedMLP(self.config, ctx=inner)
        return NormedLayer(self.attention(ctx.child("self_attn")), mlp, rms_norms(self.config), ctx=ctx)

    def attention(self, ctx: LayerContext) -> Layer:
        """That of a layer."""
        return LatentAttention(self.config, ctx=ctx)

    def routing(self) -> Routing:
        """How experts are chosen. Raises ModelError for a way that is not known."""
        config = self.config
        method = self.config.get("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise ModelError(f"topk_method={method!r} is not supported; known: greedy, group_limited_greedy")
        routing = Routing(config["num_experts_per_tok"], scale=config.get("routed_scaling_factor", 1.0))
        return routing if method == "greedy" else self.grouped(routing)

    def grouped(self, routing: Routing, **changes: Any) -> Routing:
        """The same within the best groups."""
        groups = self.config.get("n_group") or 1
        top = self.config.get("topk_group") or 1
        return dataclasses.replace(routing, num_groups=groups, top_groups=top, **changes)

    def _experts(self, ctx: LayerContext) -> MixtureOfExperts:
        config = self.config
        inner = config["moe_intermediate_size"]
        num_shared = config.get("n_shared_experts") or 0
        shared = None
        if num_shared:
            sizes = changed(config, intermediate_size=inner * num_shared)
            shared = GatedMLP(sizes, ctx=ctx.child("shared_experts"))
        return MixtureOfExperts(
            (config["hidden_size"], inner, self.num_experts),
            self.routing(),
            config.get("hidden_act", "silu"),
            ctx=ctx,
            shared=shared,
            corrected=self.corrects_router,
        )


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """A sigmoid router with a correction for each expert, and groups that are as good as their best two experts."""

    corrects_router = True

    def routing(self) -> Routing:
        config = self.config
        plain = Routing(config["num_experts_per_tok"], sigmoid=True, scale=config.get("routed_scaling_factor", 1.0))
        return self.grouped(plain, renormalize=bool(config.get("norm_topk_prob", True)), group_by_two=True)
