"""Gemma 3n, text: four streams of hidden states, of which each layer computes one and corrects the others; vectors of
each token for each layer; MLPs of which most is 0; the last layers read the keys and values of earlier ones."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from pagemill.artifacts.config_fields import changed
from pagemill.errors import ConfigError, ModelError
from pagemill.model.kernels.streams import (
    AddedToOthers,
    Bounded,
    CorrectedStreams,
    MeanOfStreams,
    MixedStreams,
    OneOfStreams,
    SideBySide,
    SparseGate,
)
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.embedding import Embedding, FirstTokens
from pagemill.model.layers.linear import Linear
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.layers.weight_reader import WeightReader
from pagemill.model.loading.stored import LayerTensor, WeightPart
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
from pagemill.model.models.gemma3 import Gemma3ForCausalLM
from pagemill.model.network.operations import Network, Value
from pagemill.model.quantization.interface import Role
from pagemill.model.quantization.unquantized import Unquantized
from pagemill.utils.text import shown


class Coefficients(Linear):
    """A linear layer of a few outputs, which is whole on every rank and never quantized."""

    def __init__(self, in_size: int, out_size: int, *, ctx: LayerContext) -> None:
        super().__init__(in_size, (out_size,), bias=False, ctx=ctx)

    def _make_reader(self, parts: Sequence[WeightPart]) -> WeightReader:
        return WeightReader(self._ctx, parts, Role.ROUTER, held=Unquantized())


class AltUp(nn.Module):
    """Alternating updates (Baykal et al., 2023): a layer's input is predicted from all streams, and what it computes of
    the active one corrects them all. S streams, [T, S, E] together."""

    def __init__(self, config: Mapping[str, Any], *, ctx: LayerContext) -> None:
        super().__init__()
        size = config["hidden_size"]
        streams = config["altup_num_inputs"]
        self.name = ctx.name
        self.active = int(config.get("altup_active_idx") or 0)
        self.modality_router = Coefficients(size, streams, ctx=ctx.child("modality_router"))
        self.router_norm = RMSNorm(size, config["rms_norm_eps"], ctx=ctx.child("router_norm"))
        self.prediction_coefs = Coefficients(streams, streams**2, ctx=ctx.child("prediction_coefs"))
        self.correction_coefs = Coefficients(streams, streams, ctx=ctx.child("correction_coefs"))
        self.scale = torch.empty(0)
        self.count = streams
        self._size = size
        self._scales = config.get("altup_correct_scale") is not False
        self._dtype = ctx.dtype

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        """What belongs to no layer within."""
        return (LayerTensor.whole("correct_output_scale", (self._size,)),)

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take the checkpoint tensor."""
        self.scale = tensor.to(self._dtype)

    def predict(self, net: Network, streams: Value) -> tuple[Value, Value]:
        """The predictions of all streams, [T, S, E], and the active one, [T, E]."""
        one = OneOfStreams(self.count, self.active)
        coefficients = net.linear(self._modalities(net, net.call(one, streams, by_rows=True)), self.prediction_coefs)
        predictions = net.call(MixedStreams(self.count), streams, coefficients, by_rows=True)
        return predictions, net.call(one, predictions, by_rows=True)

    def correct(self, net: Network, predictions: Value, computed: Value) -> Value:
        """The streams after a layer has computed the active one, [T, E]."""
        coefficients = net.linear(self._modalities(net, computed), self.correction_coefs)
        corrected = CorrectedStreams(self.count, self.active)
        return net.call(corrected, predictions, computed, coefficients, by_rows=True)

    def first(self, net: Network, streams: Value) -> Value:
        """The active stream, [T, E], scaled."""
        one = OneOfStreams(self.count, self.active, lambda: self.scale if self._scales else None)
        return net.call(one, streams, by_rows=True)

    def _modalities(self, net: Network, x: Value) -> Value:
        routed = net.linear(net.norm(x, self.router_norm), self.modality_router)
        return net.call(Bounded(float(self._size)), routed, by_rows=True)


class Laurel(nn.Module):
    """The low-rank part of the learnt augmented residual (Menghani et al., 2024): x + norm(right(left(x)))."""

    def __init__(self, config: Mapping[str, Any], *, ctx: LayerContext) -> None:
        super().__init__()
        size = config["hidden_size"]
        rank = config["laurel_rank"]
        self.linear_left = Linear(size, (rank,), bias=False, ctx=ctx.child("linear_left"))
        self.linear_right = Linear(rank, (size,), bias=False, ctx=ctx.child("linear_right"))
        self.post_laurel_norm = RMSNorm(size, config["rms_norm_eps"], ctx=ctx.child("post_laurel_norm"))

    def low_rank(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]: right(left(x))."""
        return net.linear(net.linear(x, self.linear_left), self.linear_right)

    def added(self, net: Network, x: Value, low: Value) -> Value:
        """x and its `low_rank`, [T, E] each -> [T, E]."""
        return x + net.norm(low, self.post_laurel_norm)


class SparseMLP(GatedMLP):
    """A gated MLP whose gates count by what they are above a quantile of the token's, of a normal distribution of their
    mean and deviation."""

    def __init__(self, config: Mapping[str, Any], sparsity: float, *, ctx: LayerContext) -> None:
        """`sparsity`: the share that becomes 0."""
        super().__init__(config, ctx=ctx)
        deviations = math.sqrt(2) * float(torch.erfinv(torch.tensor(2.0 * sparsity - 1.0, dtype=torch.float64)))
        self._group = ctx.groups.tp
        self._gate = SparseGate(deviations, self._mean if self._group.size > 1 else None)

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        gated = net.call(self._gate, net.linear(x, self.gate_up_proj), by_rows=True)
        return net.linear(gated, self.down_proj)

    def _mean(self, gate: Tensor) -> Tensor:
        """Over the gates of all ranks, of which each has as many."""
        return self._group.all_reduce(gate.mean(-1, keepdim=True)) / self._group.size


class VectorLayer(nn.Module):
    """Attention and an MLP with norms around them, and what is made of the layer's own vector of each token:
    norm(projection(act(gate(x)) * vector))."""

    def __init__(
        self, config: Mapping[str, Any], attention: DecoderAttention, mlp: GatedMLP, *, ctx: LayerContext
    ) -> None:
        super().__init__()
        size = config["hidden_size"]
        own = config.get("hidden_size_per_layer_input")
        make_norm = rms_norms(config)
        self.input_layernorm = make_norm(ctx.child("input_layernorm"))
        self.post_attention_layernorm = make_norm(ctx.child("post_attention_layernorm"))
        self.pre_feedforward_layernorm = make_norm(ctx.child("pre_feedforward_layernorm"))
        self.post_feedforward_layernorm = make_norm(ctx.child("post_feedforward_layernorm"))
        self.self_attn = attention
        self.mlp = mlp
        if own:
            self.per_layer_input_gate = Linear(size, (own,), bias=False, ctx=ctx.child("per_layer_input_gate"))
            self.per_layer_projection = Linear(own, (size,), bias=False, ctx=ctx.child("per_layer_projection"))
            self.post_per_layer_input_norm = make_norm(ctx.child("post_per_layer_input_norm"))

    def of_vector(self, net: Network, x: Value, vector: Value) -> Value:
        """[T, E], [T, P] -> [T, E]."""
        gate = net.activated(net.linear(x, self.per_layer_input_gate), "gelu_tanh")
        projected = net.linear(gate * vector, self.per_layer_projection)
        return net.norm(projected, self.post_per_layer_input_norm)


class Gemma3nLayer(VectorLayer):
    """Computes the active stream, and corrects all of them."""

    def __init__(
        self, config: Mapping[str, Any], attention: DecoderAttention, mlp: GatedMLP, *, ctx: LayerContext
    ) -> None:
        super().__init__(config, attention, mlp, ctx=ctx)
        self.altup = AltUp(config, ctx=ctx.child("altup"))
        self.laurel = Laurel(config, ctx=ctx.child("laurel"))

    def operations(self, net: Network, streams: Value, vector: Value) -> Value:
        """[T, S, E], [T, P] -> [T, S, E]."""
        predictions, active = self.altup.predict(net, streams)
        normed = net.norm(active, self.input_layernorm)
        low = self.laurel.low_rank(net, normed)
        attended = net.norm(self.self_attn.operations(net, normed), self.post_attention_layernorm)
        x = active + attended
        x = net.scaled(x + self.laurel.added(net, normed, low), math.sqrt(0.5))
        inner = self.mlp.operations(net, net.norm(x, self.pre_feedforward_layernorm))
        x = x + net.norm(inner, self.post_feedforward_layernorm)
        corrected = self.altup.correct(net, predictions, x)
        more = self.of_vector(net, self.altup.first(net, corrected), vector)
        return net.call(AddedToOthers(self.altup.count), corrected, more, by_rows=True)


class VectorsForLayers(Gemma3ForCausalLM):
    """Each token has a vector for each layer, from a table of its own and from its embedding, where the config says of
    which size; the last layers read the keys and values of the last ones of their kind before them, where it says how
    many. Neither is there on two pipeline stages."""

    norm_offset = 0.0

    def make_parts(self, layers: range, max_model_len: int, ctx: LayerContext) -> None:
        """Raises ConfigError for pipeline stages that cannot be."""
        config = self.config
        shared = config.get("num_kv_shared_layers")
        self.vector_size = int(config.get("hidden_size_per_layer_input") or 0)
        if ctx.groups.pp.size > 1 and (shared or self.vector_size):
            raise ConfigError(
                f"pipeline_parallel_size={ctx.groups.pp.size}: num_kv_shared_layers={shared} and "
                f"hidden_size_per_layer_input={self.vector_size} tie all layers together; use 1"
            )
        super().make_parts(layers, max_model_len, ctx)

    def make_embeddings(self, ctx: LayerContext) -> None:
        super().make_embeddings(ctx)
        own = self.vector_size
        if not own:
            return
        config = self.config
        count = config["num_hidden_layers"]
        self._num_vectors = int(config.get("vocab_size_per_layer_input") or self.vocab_size)
        here = ctx.child("embed_tokens_per_layer")
        self.embed_tokens_per_layer = Embedding(self._num_vectors, count * own, ctx=here, scale=math.sqrt(own))
        projection = ctx.child("per_layer_model_projection")
        self.per_layer_model_projection = Linear(self.hidden_size, (count * own,), bias=False, ctx=projection)
        norm = ctx.child("per_layer_projection_norm")
        self.per_layer_projection_norm = RMSNorm(own, config["rms_norm_eps"], ctx=norm)

    def vectors(self, net: Network, embedded: Value) -> Sequence[Value]:
        """[T, E] -> for each layer [T, P]."""
        count = self.config["num_hidden_layers"]
        tokens = net.inputs
        if self._num_vectors < self.vocab_size:
            tokens = net.call(FirstTokens(self._num_vectors), tokens, by_rows=True)
        projected = net.scaled(net.linear(embedded, self.per_layer_model_projection), self.hidden_size**-0.5)
        normed = net.norm(net.per_head(projected, count), self.per_layer_projection_norm)
        both = net.scaled(net.join(normed) + net.embed(tokens, self.embed_tokens_per_layer), math.sqrt(0.5))
        return net.split(both, *[self.vector_size] * count)

    def kv_owner(self, index: int) -> str | None:
        """The attention layer whose keys and values a layer reads; None: its own. Raises ModelError where there is
        none of its kind."""
        config = self.config
        kinds = config["layer_types"]
        first = config["num_hidden_layers"] - int(config.get("num_kv_shared_layers") or 0)
        if index < first:
            return None
        owner = next((earlier for earlier in reversed(range(first)) if kinds[earlier] == kinds[index]), None)
        if owner is None:
            raise ModelError(
                f"num_kv_shared_layers={config['num_kv_shared_layers']}: no layer of the kind {shown(kinds[index])} "
                f"is before those, whose keys and values layer {index} could read"
            )
        return f"layers.{owner}.self_attn.attn"

    def make_norm(self, ctx: LayerContext) -> RMSNorm:
        return RMSNorm(self.hidden_size, self.config["rms_norm_eps"], ctx=ctx)

    def elsewhere(self, layer: str) -> bool:
        """Norms of keys may be stored of layers that have none."""
        return layer.endswith(".self_attn.k_norm") or super().elsewhere(layer)


class Gemma3nForCausalLM(VectorsForLayers):
    """The text model of Gemma 3n."""

    only: ClassVar[Mapping[str, Any]] = {**VectorsForLayers.only, "hidden_activation": "gelu_pytorch_tanh"}
    logit_cap: ClassVar[float | None] = 30.0

    def make_embeddings(self, ctx: LayerContext) -> None:
        if self.config["hidden_size_per_layer_input"] == 0:
            raise ModelError("hidden_size_per_layer_input=0 is not allowed: every layer has vectors of each token")
        super().make_embeddings(ctx)
        self.altup_projections = self._projections(ctx, "altup_projections")
        self.altup_unembed_projections = self._projections(ctx, "altup_unembed_projections")

    def _projections(self, ctx: LayerContext, name: str) -> nn.ModuleList:
        size = self.hidden_size
        others = range(self.config["altup_num_inputs"] - 1)
        return nn.ModuleList([Linear(size, (size,), bias=False, ctx=ctx.child(f"{name}.{index}")) for index in others])

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        bias = bool(config.get("attention_bias"))
        eps = config["rms_norm_eps"]
        window = layer_window(config, index, period=5)
        traits = AttentionTraits.of(
            config,
            scale=1.0,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm_of_each_head(eps),
            v_norm=lambda heads, ctx: RMSNorm(heads.size, eps, ctx=ctx, weighted=False),
            window=window,
            rope=FULL if window is None else SLIDING,
            kv_owner=self.kv_owner(index),
        )
        attention = DecoderAttention(config, traits, ctx=ctx.child("self_attn"))
        return Gemma3nLayer(config, attention, self._mlp(index, ctx.child("mlp")), ctx=ctx)

    def _mlp(self, index: int, ctx: LayerContext) -> GatedMLP:
        sizes = self.config["intermediate_size"]
        size = sizes[index] if isinstance(sizes, list) else sizes
        config = changed(self.config, intermediate_size=size, hidden_act="gelu_pytorch_tanh")
        pattern = self.config.get("activation_sparsity_pattern") or 0.0
        sparsity = pattern[index] if isinstance(pattern, list) else pattern
        return SparseMLP(config, sparsity, ctx=ctx) if sparsity else GatedMLP(config, ctx=ctx)

    def run_layers(self, net: Network, x: Value) -> Value:
        vectors = self.vectors(net, x)
        others = [net.linear(x, cast(Linear, layer)) for layer in self.altup_projections]
        count = 1 + len(others)
        streams = net.call(SideBySide(), x, *others, by_rows=True)
        for layer, vector in zip(self.layers.values(), vectors, strict=True):
            streams = cast(Gemma3nLayer, layer).operations(net, streams, vector)
        first, *parts = (net.call(OneOfStreams(count, index), streams, by_rows=True) for index in range(count))
        ends = [
            net.linear(part, cast(Linear, layer))
            for part, layer in zip(parts, self.altup_unembed_projections, strict=True)
        ]
        return net.call(MeanOfStreams(count), net.call(SideBySide(), first, *ends, by_rows=True), by_rows=True)
