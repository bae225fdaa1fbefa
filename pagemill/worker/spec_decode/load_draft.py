"""`load_draft`: the model that proposes drafts, loaded beside the one that verifies them."""

from dataclasses import dataclass, replace

from pagemill.catalog.heads import HEADS
from pagemill.config.draft import DraftModel
from pagemill.config.sections import CacheSettings
from pagemill.errors import ConfigError, ModelError
from pagemill.model.attention.layer import Attention
from pagemill.model.attention.state_layer import StateLayer
from pagemill.model.distributed.group import SoloGroup
from pagemill.model.distributed.parallel_groups import ParallelGroups
from pagemill.model.factory import load_model
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.draft_head import DraftHead, flag
from pagemill.model.models.row_heads import RowHeads
from pagemill.platforms.interface import Platform
from pagemill.utils.timing import PhaseTimer

PREFIX = "draft."
"""Before the names of its layers, by which the plan of the KV cache tells them from the model's."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A model that proposes."""

    model: CausalLM
    max_model_len: int
    """Tokens of a request beyond which it computes nothing."""


def reads_embeddings(draft: DraftModel | None) -> bool:
    """Whether what proposes is a head without embeddings of its own, which takes the model's."""
    if draft is None or draft.facts.architecture not in HEADS:
        return False
    is_head = issubclass(HEADS.resolve(draft.facts.architecture), DraftHead)
    return is_head and not flag(draft.facts.hf_config, "own_embeddings")


def load_draft(
    draft: DraftModel,
    verifier: CausalLM,
    platform: Platform,
    timer: PhaseTimer,
    groups: ParallelGroups,
    cache: CacheSettings,
) -> LoadedDraft:
    """Split over the tensor-parallel ranks as `verifier` is, from which heads take what they have not themselves; all
    of its layers are on the stage that loads it, the last one. Raises ModelError or ConfigError that names the setting,
    for files that do not fit, for sizes that cannot be split, and for layers that keep a state."""
    groups = replace(groups, pp=SoloGroup())
    try:
        model = load_model(draft.facts, draft.model, platform, timer, groups, cache)
        own = list(model.modules())
        states = [layer.name for layer in own if isinstance(layer, StateLayer)]
        if states:
            raise ConfigError(f"layer {states[0]!r} keeps a state, from which no guess can be taken back")
        if isinstance(model, (DraftHead, RowHeads)):
            model.share(verifier)
    except (ConfigError, ModelError) as error:
        raise type(error)(f"speculative_config: model={draft.facts.name!r}: {error}") from error
    for layer in own:
        if isinstance(layer, Attention):
            layer.name = PREFIX + layer.name
            if layer.kv_owner is not None:
                layer.kv_owner = PREFIX + layer.kv_owner
    return LoadedDraft(model, draft.model.max_model_len)
