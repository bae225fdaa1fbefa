"""`TransformersForCausalLM`: a model that transformers computes. Its attention, its linear layers and the loading of
its weights are those of here; everything else is the library's code, one operation of torch after the other."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pagemill.artifacts.transformers_config import hf_config_of
from pagemill.config.facts import ModelFacts
from pagemill.errors import ConfigError, ModelError, PagemillError
from pagemill.log import get_logger
from pagemill.model.attention.interface import CacheLayer
from pagemill.model.attention.layer import Attention
from pagemill.model.layers.context import LayerContext
from pagemill.model.loading.stored import LoadableLayer
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.hosted import attention, probe
from pagemill.model.models.hosted.linear import HostedLinear, style_of
from pagemill.model.models.hosted.names import HostedNames
from pagemill.model.models.hosted.weights import Converted, Holder, Parameters, make_buffers
from pagemill.model.network.operations import Network, Value
from pagemill.utils.reasons import reason

logger = get_logger(__name__)


class Passthrough(nn.Module):
    """In the place of a model without its head: gives what it is given, so that what comes after can be computed."""

    @property
    def decoder(self) -> nn.Module:
        """Some models pass their own outer part by."""
        return self

    def forward(self, *others: Any, inputs_embeds: Tensor, **other: Any) -> Any:
        """[1, L, E] -> the same, as a model's output."""
        from transformers.modeling_outputs import MoeModelOutputWithPast  # optional: transformers

        output = MoeModelOutputWithPast(last_hidden_state=inputs_embeds)
        output.cross_attentions = None  # a field that some heads pass on, and this kind of output lacks
        return output


class TransformersForCausalLM(CausalLM):
    """Any decoder of transformers whose attention goes through its AttentionInterface. Raises ModelError, with the
    reason, for one that cannot run so: when it is built, or tried out with its weights."""

    def __init__(self, facts: ModelFacts, max_model_len: int, ctx: LayerContext) -> None:
        self._facts = facts
        self._max_model_len = max_model_len
        super().__init__(facts, max_model_len, ctx)

    def make_parts(self, layers: range, max_model_len: int, ctx: LayerContext) -> None:
        """Have transformers build the model, without weights, and take over its linear layers."""
        name = f"{self._facts.name} ({self._facts.architecture} of transformers)"
        attention.register()
        try:
            hosted = _build(name, self._facts, ctx.dtype)
            self.weights: HostedNames = HostedNames.of(hosted)  # type: ignore[misc]
        except PagemillError:
            raise
        except Exception as error:  # whatever the library's code runs into is the model's fault
            raise ModelError(f"{name} cannot be built: {reason(error)}") from error
        self.hosted = hosted
        self.tied = False  # what is tied, is so in there
        self._name = name
        self._attend_to: list[probe.Attending] = []
        self._ctx = LayerContext(ctx.dtype, ctx.quantization, ctx.attention, ctx.groups, names=self.weights)
        place = _place_of_base(name, hosted)
        self.base: nn.Module = getattr(hosted, place)
        self._take_over_linear_layers()
        # A copy that shares all modules but one, and is no module of this one: nothing is loaded twice.
        after = copy.copy(hosted)
        after._modules = dict(hosted._modules) | {place: Passthrough()}
        self._after = (after,)

    def _take_over_linear_layers(self) -> None:
        tp = self._ctx.groups.tp.size
        plan = dict(getattr(self.hosted, "tp_plan", None) or {}) if tp > 1 else {}
        if tp > 1:
            check_plan(self._name, plan, self.config, tp)
        tied = set(self.weights.aliases) | set(self.weights.aliases.values())
        made_of_several = {key.rpartition(".")[0] for key in self.weights.converted}
        head = self.hosted.get_output_embeddings()
        for name, module in list(self.hosted.named_modules()):
            if type(module) is not nn.Linear or f"{name}.weight" in tied:
                continue
            if name in made_of_several and tp > 1:
                raise ConfigError(f"tensor_parallel_size={tp}: {name} of {self._name} is converted from other tensors")
            parent, _, leaf = name.rpartition(".")
            ctx = self._ctx.child(name)
            taken = HostedLinear(module, style_of(name, plan), ctx=ctx, head=module is head)
            setattr(self.hosted.get_submodule(parent), leaf, taken)

    def _write_network(self) -> Network:
        net = Network()
        net.result = net.call(self.compute_hidden, net.inputs, net.positions)
        return net

    def logits(self, net: Network, x: Value) -> Value:
        return net.call(self._compute_logits, x)

    def compute_hidden(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """[T], [T] -> [T, E]: everything but the output head."""
        out = self.base(input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, E] -> [L, V] float32: the head, and what the model does to logits."""
        logits: Tensor = self._after[0](inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits.float()

    def cache_layers(self) -> dict[str, CacheLayer]:
        """Of every attention module, its layer."""
        layers = [module for module in self.hosted.modules() if isinstance(module, Attention)]
        return {layer.name: attention.UncapturedAttention(layer) for layer in layers}

    def loadable(self) -> dict[str, LoadableLayer]:
        """Every module that has parameters of its own, and every conversion, by its first parameter."""
        holder = Holder(self.hosted, self.dtype)
        layers: dict[str, LoadableLayer] = {}
        for key in self.weights.direct:
            name, _, kind = key.rpartition(".")
            module = self.hosted.get_submodule(name)
            if isinstance(module, HostedLinear):
                layers[name] = module.inner
            else:
                own = layers.setdefault(name, Parameters(name, holder))
                if isinstance(own, Parameters):
                    own.add(kind, self.weights.direct[key].shape)
        for key in self.weights.converted:
            layers[key] = Converted(key, self.weights, holder)
        return layers

    def elsewhere(self, layer: str) -> bool:
        """Every rank has every layer; only a head may be missing."""
        return not self.has_head and layer == "lm_head"

    def drop_head(self) -> None:
        """Do without the output head."""
        self.has_head = False
        self._logits = None
        head = self.hosted.get_output_embeddings()
        for name, module in list(self.hosted.named_children()):
            if module is head:
                setattr(self.hosted, name, None)
                self.weights.direct.pop(f"{name}.weight", None)
                self.weights.direct.pop(f"{name}.bias", None)

    def finish_loading(self) -> None:
        """Make what no checkpoint has, try the model out, and give its attention modules their layers."""
        device = next(self.hosted.parameters()).device
        try:
            make_buffers(self.hosted, self.weights.aliases, device)
            self.hosted.eval()
            self._make_attention_layers(device)
        except PagemillError as error:
            if isinstance(error, ModelError):
                raise ModelError(f"{self._name} cannot run here: {error}") from error
            raise
        except Exception as error:  # as above
            raise ModelError(f"{self._name} cannot run here: {reason(error)}") from error
        logger.info(
            "%s is computed by transformers, with attention of this engine: slower than an implementation made for it",
            self._facts.architecture,
        )
        super().finish_loading()

    def _make_attention_layers(self, device: torch.device) -> None:
        _set_attention(self.hosted, probe.NAME)
        with torch.inference_mode():
            found = probe.try_out(self.compute_hidden, self.vocab_size, self._max_model_len, device)
        _set_attention(self.hosted, attention.NAME)
        names = {module: name for name, module in self.hosted.named_modules()}
        for one in found:
            name = f"{names[one.module]}.{attention.PLACE}"
            layer = Attention(one.spec, name=name, backend=self._ctx.attention(one.spec, name))
            if one.sinks is not None:
                layer.take_sinks(one.sinks)
            setattr(one.module, attention.PLACE, layer)


def check_plan(name: str, plan: dict[str, str], config: Mapping[str, Any], tp: int) -> None:
    """Raise ConfigError unless a plan of transformers, pattern of a module's name -> style, can be followed here."""
    if not plan:
        raise ConfigError(
            f"tensor_parallel_size={tp}: transformers has no plan to split {name}; use --tensor-parallel-size 1"
        )
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    if heads % tp:
        raise ConfigError(f"tensor_parallel_size={tp} does not divide num_key_value_heads={heads} of {name}")
    for pattern in plan:
        style_of(pattern.replace("*", "0"), plan)


def _build(name: str, facts: ModelFacts, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM  # optional: transformers

    config = hf_config_of(name, facts.hf_config)
    for field in ("quantization_config", "compression_config"):
        if getattr(config, field, None) is not None:
            delattr(config, field)  # weights are loaded here
    config.use_cache = False
    with torch.device("meta"):
        make: Callable[..., Any] = AutoModelForCausalLM.from_config  # which has no types
        model = make(config, attn_implementation=attention.NAME, dtype=dtype, trust_remote_code=False)
    return model.requires_grad_(False)


def _set_attention(model: Any, name: str) -> None:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def _place_of_base(name: str, model: Any) -> str:
    """The attribute that has the model without its head. Raises ModelError where there is none that can be told where
    tokens are."""
    place = next((place for place in (model.base_model_prefix, "model") if hasattr(model, place)), None)
    if place is None:
        raise ModelError(f"{name} cannot run here: it is not a model and a head")
    if "position_ids" not in inspect.signature(getattr(model, place).forward).parameters:
        raise ModelError(f"{name} cannot run here: it takes no position_ids, and so one request at a time")
    return str(place)
