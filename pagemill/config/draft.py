"""`DraftModel`: a second model that proposes drafts, as its files and the settings say it is."""

from dataclasses import dataclass

from pagemill.config.facts import ModelFacts
from pagemill.config.sections import ModelConfig


@dataclass(frozen=True)
class DraftModel:
    """What a worker needs to load it beside the model whose tokens it guesses."""

    facts: ModelFacts
    model: ModelConfig
    """Its own: type and backends are those of the other model, and its length is as far as it proposes."""
