"""GPT-NeoX and Pythia: attention and a plain MLP of the same input, each behind a LayerNorm."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from pagemill.errors import ModelError
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.norm import LayerNorm
from pagemill.model.layers.rotary import rope_settings
from pagemill.model.loading.weight_map import WeightMap
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.decoder import MLP, AttentionTraits, DecoderAttention
from pagemill.model.network.operations import Network, Value


class GPTNeoXLayer(nn.Module):
    """Attention and MLP, both added to what they were computed from; or one after the other."""

    def __init__(self, config: Mapping[str, Any], *, ctx: LayerContext) -> None:
        super().__init__()
        size = config["hidden_size"]
        bias = bool(config.get("attention_bias", True))
        traits = AttentionTraits.of(config, qkv_bias=bias, out_bias=bias, headwise=True)
        self.parallel = bool(config.get("use_parallel_residual", True))
        self.input_layernorm = LayerNorm(size, config["layer_norm_eps"], ctx=ctx.child("input_layernorm"))
        self.post_attention_layernorm = LayerNorm(
            size, config["layer_norm_eps"], ctx=ctx.child("post_attention_layernorm")
        )
        self.attention = DecoderAttention(config, traits, ctx=ctx.child("attention"))
        act = config.get("hidden_act") or "gelu"
        self.mlp = MLP(size, config["intermediate_size"], act, bias=True, ctx=ctx.child("mlp"))

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        attended = x + self.attention.operations(net, net.norm(x, self.input_layernorm))
        source = x if self.parallel else attended
        return attended + self.mlp.operations(net, net.norm(source, self.post_attention_layernorm))


class GPTNeoXForCausalLM(CausalLM):
    """Biases everywhere but in the output head, which is not tied."""

    weights = WeightMap(
        stack={
            "embed_tokens": ("embed_in",),
            "qkv_proj": ("query_key_value",),
            "o_proj": ("dense",),
            "up_proj": ("dense_h_to_4h",),
            "down_proj": ("dense_4h_to_h",),
            "norm": ("final_layer_norm",),
            "lm_head": ("embed_out",),
        },
        strip_prefix="gpt_neox.",
        ignore=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    )

    @staticmethod
    def head_size(config: Mapping[str, Any]) -> int:
        """Of what is turned by position. Raises ModelError where that is no even number."""
        settings = rope_settings(config)
        part = settings.get("partial_rotary_factor") or config.get("rotary_pct") or 0.25
        size = int(CausalLM.head_size(config) * part)
        if size < 2 or size % 2:
            raise ModelError(f"rotary_pct={part} turns {size} elements of a head: it is to be an even number from 2")
        return size

    def rope_kinds(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {"default": rope_settings({"rope_theta": config.get("rotary_emb_base") or 10_000.0} | dict(config))}

    def make_norm(self, ctx: LayerContext) -> LayerNorm:
        return LayerNorm(self.hidden_size, self.config["layer_norm_eps"], ctx=ctx)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        return GPTNeoXLayer(self.config, ctx=ctx)
