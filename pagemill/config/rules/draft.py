"""Rules of a model that proposes drafts: which one it is, and whether it goes with the model that verifies them."""

from dataclasses import dataclass, replace
from typing import Final

from pagemill.catalog.heads import DFLASH, EAGLE, EAGLE3, HEADS, MTP, PEAGLE, ROW_HEADS
from pagemill.config.decisions import Decisions
from pagemill.config.draft import DraftModel
from pagemill.config.facts import DeviceFacts, ModelFacts
from pagemill.config.rules.speculation import DRAFT_MODEL, merged
from pagemill.config.sections import ModelConfig, ParallelConfig
from pagemill.config.speculation import SpeculationSettings
from pagemill.errors import ConfigError

_AS_FOUND: Final = ("auto", "dummy")
"""Load formats that mean the same for every model."""


@dataclass(frozen=True)
class DraftSource:
    """Where the files of a draft model are looked for."""

    name: str
    """Alias, path or hub id."""
    revision: str | None


def draft_source(asked: SpeculationSettings) -> DraftSource | None:
    """The model that settings want drafts from; None where they want none from a model of its own. Raises ConfigError
    for a method that needs a model which is not named."""
    wanted = merged(asked)
    if wanted.method not in (DRAFT_MODEL, DFLASH, EAGLE, EAGLE3, PEAGLE, *ROW_HEADS):
        return None
    if not wanted.model:
        raise ConfigError(
            f"speculative_config: method={wanted.method!r} needs model, the one that proposes (--spec-model)"
        )
    return DraftSource(wanted.model, wanted.revision)


def resolve_draft(
    asked: SpeculationSettings,
    draft: ModelFacts | None,
    facts: ModelFacts,
    model: ModelConfig,
    parallel: ParallelConfig,
    device: DeviceFacts,
    decisions: Decisions,
) -> DraftModel | None:
    """How the draft model runs, of which `draft` says what it is; None without one. Raises ConfigError where it does
    not go with the model, or cannot run here."""
    wanted = merged(asked)
    if draft is None:
        return None
    what = f"speculative_config: model={draft.name!r}"
    if draft.architecture in HEADS:
        _check_head(what, draft, facts)
    elif not draft.has_head or draft.is_encoder:
        raise ConfigError(f"{what} has no output head, and can propose no token")
    elif draft.vocab_size != facts.vocab_size:
        raise ConfigError(_other_vocabulary(what, draft.vocab_size, facts))
    ranks = wanted.draft_tensor_parallel_size
    if ranks not in (None, parallel.tensor_parallel_size):
        raise ConfigError(
            f"speculative_config: draft_tensor_parallel_size={ranks} is not supported: a draft model is split as the "
            f"model is, tensor_parallel_size={parallel.tensor_parallel_size}; leave it out"
        )
    longest = min(draft.max_position, model.max_model_len)
    if wanted.max_model_len is not None and wanted.max_model_len > longest:
        raise ConfigError(
            f"speculative_config: max_model_len={wanted.max_model_len} is more than the {longest} tokens that "
            f"{draft.name} and the model have room for"
        )
    length = wanted.max_model_len
    if length is None:
        length = decisions.note("speculative_config.max_model_len", longest, "as long as both models can")
    return DraftModel(
        draft,
        replace(
            model,
            model=draft.name,
            revision=wanted.revision,
            quantization=model.quantization if wanted.method == MTP else wanted.quantization,
            load_format=model.load_format if model.load_format in _AS_FOUND else "auto",
            model_loader_extra_config={},
            hf_overrides={},
            max_model_len=length,
        ),
    )


def _check_head(what: str, draft: ModelFacts, facts: ModelFacts) -> None:
    """Raise ConfigError for a head that was made for another model."""
    config = draft.hf_config
    size = config.get("target_hidden_size") or config.get("hidden_size")
    if size != facts.hf_config.get("hidden_size"):
        raise ConfigError(
            f"{what} is a head for models of hidden size {size}, and {facts.name} has "
            f"{facts.hf_config.get('hidden_size')}"
        )
    if config.get("own_embeddings") is False and config.get("hidden_size") != facts.hf_config.get("hidden_size"):
        raise ConfigError(
            f"{what} has no embeddings of its own, and its hidden_size={config.get('hidden_size')} is not that of "
            f"{facts.name}, {facts.hf_config.get('hidden_size')}"
        )
    if config.get("vocab_size") != facts.hf_config.get("vocab_size"):
        raise ConfigError(_other_vocabulary(what, config.get("vocab_size"), facts))


def _other_vocabulary(what: str, found: int | None, facts: ModelFacts) -> str:
    return (
        f"{what} has a vocabulary of {found} tokens, and {facts.name} one of {facts.vocab_size}: drafts must be of the "
        "same vocabulary"
    )
