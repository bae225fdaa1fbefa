"""The layer of Qwen3-Next that predicts one token more: `mtp.*` in the checkpoint of the model itself, with which it
shares embedding and output head."""

import dataclasses

from pagemill.config.facts import ModelFacts
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import Linear
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.models.draft_head import DraftHead
from pagemill.model.models.qwen3_next import QWEN3_NEXT_WEIGHTS, Qwen3NextForCausalLM
from pagemill.model.network.operations import Network, Value

_FULL = "full_attention"


class Qwen3NextMTPHead(DraftHead, Qwen3NextForCausalLM):
    """The first of such layers, if there are several: it guesses one token after another. It attends, whatever the
    model's layers do."""

    weights = dataclasses.replace(QWEN3_NEXT_WEIGHTS, strip_prefix="mtp.")

    def __init__(self, facts: ModelFacts, max_model_len: int, ctx: LayerContext) -> None:
        config = {**facts.hf_config, "num_hidden_layers": 1, "layer_types": [_FULL]}
        facts = dataclasses.replace(facts, hf_config=type(facts.hf_config)(config))
        super().__init__(facts, max_model_len, ctx, own_embeddings=False, own_head=False)

    def make_embeddings(self, ctx: LayerContext) -> None:
        size = self.hidden_size
        eps = self.config["rms_norm_eps"]

        def norm(name: str) -> RMSNorm:
            return RMSNorm(size, eps, ctx=ctx.child(name), offset=self.norm_offset)

        self.pre_fc_norm_embedding = norm("pre_fc_norm_embedding")
        self.pre_fc_norm_hidden = norm("pre_fc_norm_hidden")
        self.fc = Linear(2 * size, (size,), bias=False, ctx=ctx.child("fc"))

    def make_end(self, ctx: LayerContext) -> None:
        self.norm = self.make_norm(ctx.child("norm"))

    def embed(self, net: Network) -> Value:
        embeddings, hidden = net.split(net.inputs, self.hidden_size, self.hidden_size)
        both = net.join(net.norm(embeddings, self.pre_fc_norm_embedding), net.norm(hidden, self.pre_fc_norm_hidden))
        return net.linear(both, self.fc)

    def elsewhere(self, layer: str) -> bool:
        """All but what is called mtp is the model's."""
        return layer.startswith(("model.", "lm_head"))
