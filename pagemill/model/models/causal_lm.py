"""`CausalLM`: what every decoder has in common - embedding, layers, final norm, output head, rotary tables."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError
from pagemill.log import get_logger
from pagemill.model.attention.interface import CacheLayer
from pagemill.model.attention.layer import Attention
from pagemill.model.attention.state_layer import StateLayer
from pagemill.model.distributed.split import stage_layers
from pagemill.model.forward_context import current_forward
from pagemill.model.kernels.layer_plan import LayerPlan, NativeNetwork
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.embedding import Embedding, OutputHead
from pagemill.model.layers.norm import AnyNorm, RMSNorm
from pagemill.model.layers.pooling_head import HeadLayer, PoolingHead, TokenChoiceHead
from pagemill.model.layers.rotary import Rotary, make_rotary, rope_settings, turned_size
from pagemill.model.loading.stored import LoadableLayer
from pagemill.model.loading.weight_map import WeightMap
from pagemill.model.network.native_plan import NotPlannable, make_plan, plan_source
from pagemill.model.network.operations import Network, Value
from pagemill.model.network.program import Program, fused
from pagemill.model.network.rewrite import Graph, include_gates
from pagemill.utils.text import index_of, shown

logger = get_logger(__name__)

DECODER_WEIGHTS = WeightMap(
    stack={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    strip_prefix="model.",
    ignore=("rotary_emb.inv_freq",),
)


class GivesHidden(nn.Module):
    """A network that may give what its layers read, beside its result."""

    config: Mapping[str, Any]
    network: Network
    is_last: bool
    _graph: Graph
    _program: Program | None
    _plan: LayerPlan | None
    _plan_was_tried: bool

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """From now on `forward` also gives what these layers read, of a pipeline stage those that it has; the number of
        layers stands for what the last one gives. Asked again, it is to be for the same. Raises ModelError for layers
        that there are not, and where a model has no such thing to give."""
        inputs = self.network.layer_inputs
        if not inputs.known:
            raise ModelError(f"{type(self).__name__} gives no hidden states of its layers")
        last = self.config["num_hidden_layers"]
        for index in layers:
            if not 0 <= index <= last:
                raise ModelError(f"the model gives hidden states before layers 0 to {last}, not {index}")
        here = tuple(index for index in layers if index in inputs.known)
        if inputs.layers == here:
            return
        inputs.keep(here)
        self._plan_was_tried = False
        self._plan = None
        self._graph = fused(self.network, selects=self.is_last)
        if self._program is not None:
            self._program = Program(self.network, self._graph)


def is_of_other_stage(layer: str, num_layers: int, here: nn.ModuleDict) -> bool:
    """Whether a checkpoint layer is one of so many numbered layers, or part of one, that is not `here`."""
    head, _, rest = layer.partition(".")
    name = rest.partition(".")[0]
    index = index_of(name)
    return head == "layers" and index is not None and index < num_layers and name not in here


class CausalLM(GivesHidden):
    """A decoder that predicts the next token. Subclasses say how a layer is made and what differs.

    Of a pipeline stage, it is consecutive layers; the first stage has the embedding too, the last one the final norm
    and the output head, and the embedding again where a head reads it there. What passes between stages is the sum of
    hidden states and residual, [T, E].

    Letters in shapes: T tokens, L sampled rows, E hidden size, V vocabulary, D head size.
    """

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS
    norm_offset: ClassVar[float] = 0.0
    rope_defaults: ClassVar[Mapping[str, Any]] = {}
    """Rotary settings of a config that does not say them."""

    def __init__(self, facts: ModelFacts, max_model_len: int, ctx: LayerContext) -> None:
        super().__init__()
        ctx = dataclasses.replace(ctx, names=self.weights)
        config = facts.hf_config
        for name, value in self.only.items():
            if config.get(name) is not None and config[name] != value:
                raise ModelError(
                    f"{name}={shown(config[name])} is not supported for {facts.architecture}: it is to be {value!r}"
                )
        self.config = config
        self.tied = bool(config.get("tie_word_embeddings", self.ties_by_default))
        self.hidden_size = int(config["hidden_size"])
        self.vocab_size = facts.vocab_size
        self.num_experts = facts.num_experts
        self.weights_format = facts.weights_format
        self.dtype = ctx.dtype
        stage = ctx.groups.pp.rank
        num_stages = ctx.groups.pp.size
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        self.has_embedding = self.is_first or (self.is_last and ctx.embeds_at_end)
        self.has_head = self.is_last and self.predicts
        self.pooling_head: PoolingHead | TokenChoiceHead | None = None
        """What follows pooling, where the model classifies: given to it before anything is loaded."""
        self.rotaries: dict[str, Rotary] = {}
        self.make_parts(stage_layers(config["num_hidden_layers"], stage, num_stages), max_model_len, ctx)

        self.network = self._write_network()
        self._graph = fused(self.network, selects=self.is_last)  # now: while weights are on their way
        self._logits = _logits_network(self) if self.has_head else None
        self._num_kv_scales = 0
        self._program: Program | None = None
        self._head_program: Program | None = None
        self._plan: LayerPlan | None = None
        self._plan_was_tried = False
        self._no_plan = ""

    ties_by_default: ClassVar[bool] = False
    plans_natively: ClassVar[bool] = True
    """Whether all layers are one native call on a CPU in bfloat16, for the documentation: operations decide it."""
    predicts: ClassVar[bool] = True
    """Whether there is an output head."""
    head_bias: ClassVar[bool] = False
    only: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Fields of a config that may be left out, and otherwise have one value: nothing else is computed here."""
    ends: ClassVar[tuple[str, ...]] = ("embed_tokens", "embed_positions", "norm")
    """Layers that only the first stage has, or the last one, beside the output head."""

    def make_parts(self, layers: range, max_model_len: int, ctx: LayerContext) -> None:
        """Make what the model computes with: of this stage, which has `layers`."""
        config = self.config
        if self.is_first:
            self.make_embeddings(ctx)
        elif self.has_embedding:
            CausalLM.make_embeddings(self, ctx)  # of tokens alone, whatever a subclass adds to them
        self.layers = nn.ModuleDict(
            {str(index): self.make_layer(index, ctx.child(f"layers.{index}")) for index in layers}
        )
        if self.is_last:
            self.make_end(ctx)
        for kind, settings in self.rope_kinds(config).items():
            self.rotaries[kind] = make_rotary(settings, self.rotary_size(config, settings), max_model_len, ctx.dtype)

    @staticmethod
    def rotary_size(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
        """So many elements of a head are turned. Raises ModelError where that is no even number."""
        head_size = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        return turned_size(head_size, settings)

    def embedding_scale(self, size: int) -> float | None:
        """Factor on embeddings; None for none."""
        return None

    def make_embeddings(self, ctx: LayerContext) -> None:
        """Make what `embed` needs; on the first stage."""
        size = self.hidden_size
        scale = self.embedding_scale(size)
        self.embed_tokens = Embedding(self.vocab_size, size, ctx=ctx.child("embed_tokens"), scale=scale)

    def embed(self, net: Network) -> Value:
        """The operations on token ids and positions that give what the first layer reads, [T, E]."""
        return net.embed(net.inputs, self.embed_tokens)

    def run_layers(self, net: Network, x: Value) -> Value:
        """The operations of this stage's layers on [T, E], one after the other: [T, E]."""
        for index, layer in self.layers.items():
            net.layer_inputs.mark(int(index), x)
            x = net.layer(layer, x)
        if self.is_last:
            net.layer_inputs.mark(self.config["num_hidden_layers"], x)
        return x

    def make_end(self, ctx: LayerContext) -> None:
        """Make what `end` needs, and the output head; on the last stage."""
        self.norm = self.make_norm(ctx.child("norm"))
        embedding = ctx.child("embed_tokens") if self.tied else None
        self.lm_head = OutputHead(
            self.hidden_size, self.vocab_size, ctx=ctx.child("lm_head"), embedding=embedding, bias=self.head_bias
        )

    def end(self, net: Network, x: Value) -> Value:
        """The operations on what the last layer gives, [T, E]: the norm after it."""
        return net.norm(x, self.norm)

    def head_layers(self, num_labels: int, per_token: bool) -> Sequence[HeadLayer]:
        """What a checkpoint of this architecture has after pooling where it tells classes apart: of whole prompts, or
        of each token."""
        return (HeadLayer("score", num_labels, bias=per_token),)

    def make_norm(self, ctx: LayerContext) -> AnyNorm:
        """The norm after the last layer."""
        return RMSNorm(self.hidden_size, self.config["rms_norm_eps"], ctx=ctx, offset=self.norm_offset)

    def rope_kinds(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Name -> rotary settings, for every setting that some layer uses."""
        return {"default": rope_settings(config, defaults=self.rope_defaults)}

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        """A decoder layer: one that has `operations`, as those of decoder.py, or any module, (x, positions) -> x."""
        raise TypeError(f"{type(self).__name__} does not say how its layers are made")

    def _write_network(self) -> Network:
        net = Network(self.rotaries)
        x = self.embed(net) if self.is_first else net.inputs
        for kind in self.rotaries:
            net.cos_sin(kind)  # looked up before the layers, where nothing waits for it
        x = self.run_layers(net, x)
        net.result = self.end(net, x) if self.is_last else x
        include_gates(net)
        return net

    def logits(self, net: Network, x: Value) -> Value:
        """The operations on the network's result, [L, E], that give logits, [L, V] float32."""
        return net.head(x, self.lm_head)

    def cache_layers(self) -> dict[str, CacheLayer]:
        """Every layer that keeps something of a request, by name, in layer order."""
        return {module.name: module for module in self.modules() if isinstance(module, (Attention, StateLayer))}

    def loadable(self) -> dict[str, LoadableLayer]:
        """Checkpoint layer -> the layer that takes its tensors. A tied head is loaded from the embedding's, or takes
        the embedding's weight when both are here."""
        layers: dict[str, Any] = {
            name: module for name, module in self.named_modules() if hasattr(module, "checkpoint_tensors")
        }
        if self.tied and self.has_head:
            layers.setdefault("embed_tokens", layers.pop("lm_head"))
        return layers if self.pooling_head is None else layers | self.pooling_head.parts

    def elsewhere(self, layer: str) -> bool:
        """Whether a checkpoint layer belongs to another stage, or is a head that is not needed."""
        if layer in self.ends:
            return True
        if layer == "lm_head":
            return self.tied or not self.has_head
        if layer == "score":
            return self.pooling_head is None
        return is_of_other_stage(layer, self.config["num_hidden_layers"], self.layers)

    def take_kv_scale(self, layer: str, which: str, scale: float) -> None:
        """Of the keys (k) or values (v) of a layer's attention, for a cache of 8-bit floats. Raises ModelError."""
        parts = self.get_submodule(layer).modules() if layer in dict(self.named_modules()) else ()
        found = [part for part in parts if isinstance(part, Attention)]
        if not found:
            raise ModelError(f"the checkpoint has a scale of the KV cache for {layer}, which keeps no keys and values")
        for part in found:
            part.stored_scales[which] = scale
        self._num_kv_scales += 1

    def drop_head(self) -> None:
        """Do without an output head: only hidden states are asked for. Before anything is loaded."""
        if self.has_head:
            self.has_head = False
            self._logits = None
            del self.lm_head

    def finish_loading(self) -> None:
        """Called once, after the last weight: the head takes the embedding's weight when they are tied, and the network
        becomes a program."""
        if self._num_kv_scales:
            logger.info(
                "the checkpoint has %d scales of keys and values: they are used with --kv-cache-dtype fp8 only",
                self._num_kv_scales,
            )
        if self.tied and self.has_embedding and self.has_head and self.embed_tokens.weight is not None:
            self.lm_head.share(self.embed_tokens)
        self._program = Program(self.network, self._graph)
        self._head_program = None if self._logits is None else Program(self._logits)

    def forward(
        self, inputs: Tensor, positions: Tensor, rows: Tensor | None = None
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
        """[T] int64 token ids, on a later stage [T, E] from the stage before it; [T] int64 -> [T, E], for the next
        stage or, from the last one, for `compute_logits`. Of the last stage `rows`, [L], ascending, may be asked
        for, [L, E]: the last layer computes nothing for the others once it has attended to them. Where layers are kept
        (`keep_hidden`), (that, what they read, [T, E] each)."""
        # Asked for on a GPU, the CPU kernels would be compiled at the first start.
        plan = self._native_plan() if inputs.is_cpu and not torch.compiler.is_compiling() else None
        if plan is None:
            if self._program is None:
                raise ModelError("the model has no weights yet")
            if self.network.layer_inputs.layers:
                return self._program.run_and_keep(inputs, positions, rows)
            return self._program.run(inputs, positions, rows)
        metadata = current_forward().attention
        steps = [metadata[name] for name in plan.groups]
        if plan.keeps_nothing:
            plan.reserve_keys(steps[0].num_blocks, steps[0].common.block_size)
        source = plan_source(self.network, inputs, positions)
        looked_up = [look_up(inputs) for look_up in plan.look_ups.values()]
        hidden = plan.run(source, positions, [step.address for step in steps], rows, looked_up)
        result = hidden if rows is None else hidden.index_select(0, rows)
        if not plan.places.given:
            return result
        return result, plan.given(len(positions), source if isinstance(source, Tensor) else None)

    def _native_plan(self) -> LayerPlan | None:
        """All layers as one native call, where every part has a native form. Made at the first step, when the cache
        is there."""
        if not self._plan_was_tried:
            self._plan_was_tried = True
            try:
                self._plan = make_plan(self.network, self._logits, self.dtype)
            except NotPlannable as reason:
                self._no_plan = str(reason)
                logger.debug("operations run one by one: %s", reason)
        return self._plan

    def native_network(self) -> NativeNetwork:
        """Embedding, layers and head as native code takes them. Asked for when the cache is there. Raises NotPlannable
        where some part has no such form."""
        plan = self._native_plan()
        if plan is None:
            raise NotPlannable(self._no_plan)
        if plan.places.logits is None:
            raise NotPlannable("the output head has no native form")
        embedding = self.embed_tokens.native()
        if embedding is None:
            raise NotPlannable("the embedding has no native form")
        scale = self.embed_tokens.scale
        tables = {buffer: look_up.native() for buffer, look_up in plan.look_ups.items()}
        found = {buffer: table for buffer, table in tables.items() if table is not None}
        if len(found) < len(tables):
            raise NotPlannable("what tokens have beside their embeddings has no native form")
        return NativeNetwork(plan, embedding, 1.0 if scale is None else float(scale), found)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, E] -> [L, V] float32, the same on every tensor-parallel rank. The last stage only."""
        if self._head_program is None:
            raise ModelError("the model has no output head here, or no weights yet")
        return self._head_program.run(hidden)


def _logits_network(model: CausalLM) -> Network:
    net = Network()
    net.result = model.logits(net, net.inputs)
    return net
