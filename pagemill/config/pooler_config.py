"""How prompts become vectors: `PoolerSettings`, as users ask for it, and `PoolerConfig`, as it runs."""

from dataclasses import dataclass, field

from pagemill.config.fields import setting
from pagemill.config.pooling_facts import Activation
from pagemill.messages.pooling_params import PoolingTask, PoolingType


@dataclass(frozen=True)
class PoolerSettings:
    """How a prompt becomes a vector, where a request does not say."""

    pooling_type: PoolingType | None = setting(
        None,
        "which hidden states are read: LAST, CLS (the first), MEAN, ALL (each by itself) or STEP (each that ends a "
        "step) (default: the model's, or LAST)",
        choices=tuple(PoolingType),
    )
    normalize: bool | None = setting(None, "scale vectors to length 1 (default: the model's, or true)")
    use_activation: bool | None = setting(
        None, "make probabilities of the logits of classes, as the model says (default: true)"
    )
    dimensions: int | None = setting(
        None, "only the first so many numbers of a vector, where a request does not say (default: all)", low=1
    )
    step_tag_id: int | None = setting(None, "the token that ends a step (STEP)", low=0)
    returned_token_ids: tuple[int, ...] = setting((), "of classes, only these, by their numbers (default: all)")
    enable_chunked_processing: bool = setting(
        False,
        "split texts that are longer than the model's context, and take the mean of their parts' vectors, weighted by "
        "their tokens",
    )
    max_embed_len: int | None = setting(
        None, "most tokens of a text that is split (default: 64 times the model's context)", low=1
    )


@dataclass(frozen=True, kw_only=True)
class PoolerConfig(PoolerSettings):
    """How vectors are made, as it runs: `PoolerSettings` with every field decided."""

    pooling_type: PoolingType = field()
    normalize: bool = field()
    use_activation: bool = field(default=True)
    task: PoolingTask = field(default=PoolingTask.EMBED)
    """What the model does."""
    num_outputs: int = field(default=0)
    """Numbers of a row; 0: those of a hidden state."""
    activation: Activation = field(default=Activation.NONE)
    """What `use_activation` stands for."""
    labels: tuple[str, ...] = field(default=())
    """Names of the classes, where it tells them apart."""
    pairs: bool = field(default=False)
    """Whether two texts are scored together, by one class; otherwise their vectors are compared."""
