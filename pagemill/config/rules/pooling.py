"""Rules of pooling: what is made of hidden states, and of which."""

from pagemill.config.choices import Convert, Runner
from pagemill.config.decisions import Decisions
from pagemill.config.facts import ModelFacts
from pagemill.config.pooler_config import PoolerConfig, PoolerSettings
from pagemill.config.pooling_facts import Activation, HeadFacts
from pagemill.errors import ConfigError
from pagemill.messages.pooling_params import PoolingTask, PoolingType


def resolve_convert(asked: Convert, runner: Runner, facts: ModelFacts, decisions: Decisions) -> Convert:
    """embed, classify or reward; none for a model that generates. Raises ConfigError for what the model has no head
    for."""
    open_ones = (Convert.AUTO, Convert.NONE)
    if runner is not Runner.POOLING:
        if asked not in open_ones:
            raise ConfigError(f"convert={asked} has no effect on a model that generates text; use --runner pooling")
        return Convert.NONE
    head = facts.head
    classifies = head is not None and not head.embeds
    if asked in open_ones:
        if not classifies:
            return Convert.EMBED
        judges = head is not None and head.per_token and head.activation is Activation.NONE
        found = Convert.REWARD if judges else Convert.CLASSIFY
        return decisions.note("convert", found, "the checkpoint has a head for it")
    if asked is Convert.CLASSIFY and not classifies:
        raise ConfigError(
            f"convert='classify' needs a head that classifies, and {facts.name} has none; name the tokens that stand "
            'for the classes instead: --hf-overrides \'{"classifier_from_token": ["no", "yes"]}\''
        )
    return asked


def resolve_pooler(
    asked: PoolerSettings, convert: Convert, runner: Runner, facts: ModelFacts, decisions: Decisions
) -> PoolerConfig:
    """The section, complete. Raises ConfigError for settings that go with something else."""
    if runner is not Runner.POOLING and asked != PoolerSettings():
        raise ConfigError("pooler_config has no effect on a model that generates text; use --runner pooling")
    head = None if convert is Convert.EMBED and not _embeds(facts.head) else facts.head
    pooling_type = PoolingType(asked.pooling_type or _pooling_type(convert, head, facts))
    pooler = PoolerConfig(
        pooling_type=pooling_type,
        normalize=facts.normalizes if asked.normalize is None else asked.normalize,
        use_activation=True if asked.use_activation is None else asked.use_activation,
        dimensions=asked.dimensions,
        step_tag_id=asked.step_tag_id,
        returned_token_ids=asked.returned_token_ids,
        enable_chunked_processing=asked.enable_chunked_processing,
        max_embed_len=asked.max_embed_len,
        task=_task(convert, pooling_type),
        num_outputs=0 if head is None else head.num_outputs,
        activation=Activation.NONE if head is None or convert is Convert.REWARD else head.activation,
        labels=() if head is None else head.labels,
        pairs=convert is Convert.CLASSIFY and head is not None and head.num_outputs == 1,
    )
    _check(pooler, runner, facts)
    if runner is Runner.POOLING:
        decisions.note("pooler_config", pooler, "what is not given is the model's")
    return pooler


def _embeds(head: HeadFacts | None) -> bool:
    return head is not None and head.embeds


def _pooling_type(convert: Convert, head: HeadFacts | None, facts: ModelFacts) -> PoolingType:
    if convert is Convert.REWARD:
        return PoolingType.ALL
    if head is None and facts.head is not None and facts.pooling_type is PoolingType.ALL:
        return PoolingType.LAST  # what is given up with the head for each token
    return facts.pooling_type or PoolingType.LAST


def _task(convert: Convert, pooling_type: PoolingType) -> PoolingTask:
    if convert is Convert.REWARD:
        return PoolingTask.REWARD
    if convert is Convert.CLASSIFY:
        return PoolingTask.TOKEN_CLASSIFY if pooling_type.per_token else PoolingTask.CLASSIFY
    return PoolingTask.TOKEN_EMBED if pooling_type.per_token else PoolingTask.EMBED


def _check(pooler: PoolerConfig, runner: Runner, facts: ModelFacts) -> None:
    """Raise ConfigError for settings that cannot be met."""
    if runner is not Runner.POOLING:
        return
    size = pooler.num_outputs or int(facts.hf_config.get("hidden_size") or 0)
    if (pooler.dimensions or 0) > size:
        raise ConfigError(f"pooler_config.dimensions={pooler.dimensions} is not allowed: 1 to {size}")
    wrong = next((item for item in pooler.returned_token_ids if not 0 <= item < size), None)
    if wrong is not None:
        raise ConfigError(f"pooler_config.returned_token_ids holds {wrong}; there are 0 to {size - 1}")
    if pooler.enable_chunked_processing and (pooler.task is not PoolingTask.EMBED):
        raise ConfigError(
            "pooler_config.enable_chunked_processing=true takes the mean of vectors of whole texts, and this model "
            f"does something else (task {pooler.task})"
        )
