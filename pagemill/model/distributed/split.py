"""What one rank holds of a model: ranges of rows and columns, heads, layers. Pure functions."""

from dataclasses import dataclass

from pagemill.errors import ConfigError
from pagemill.utils.math import ceil_div


def even_split(size: int, rank: int, count: int, what: str) -> range:
    """A rank's part of `size` things; `what` names them in the error. Raises ConfigError unless all parts are equal."""
    if size % count:
        raise ConfigError(f"{what} {size} cannot be split over tensor_parallel_size={count}, which must divide it")
    part = size // count
    return range(rank * part, (rank + 1) * part)


def padded_split(size: int, rank: int, count: int) -> range:
    """A rank's part of `size` rows when every part is `ceil(size / count)` long; the last ones may be cut short."""
    part = ceil_div(size, count)
    return range(min(rank * part, size), min((rank + 1) * part, size))


@dataclass(frozen=True)
class HeadSplit:
    """The attention heads of one rank."""

    query: range
    kv: range
    """Of the checkpoint's key and value heads; several ranks hold the same one when there are fewer than ranks."""


def split_heads(num_heads: int, num_kv_heads: int, rank: int, count: int) -> HeadSplit:
    """A rank's heads: query heads evenly, and with them the key and value heads that they use.

    Raises ConfigError when the query heads, or the key and value heads, cannot be dealt out evenly.
    """
    query = even_split(num_heads, rank, count, "num_attention_heads")
    if num_kv_heads >= count:
        return HeadSplit(query, even_split(num_kv_heads, rank, count, "num_key_value_heads"))
    if count % num_kv_heads:
        raise ConfigError(
            f"num_key_value_heads {num_kv_heads} cannot be replicated evenly over tensor_parallel_size={count}, "
            "which must be a multiple of it"
        )
    head = rank // (count // num_kv_heads)
    return HeadSplit(query, range(head, head + 1))


def stage_layers(num_layers: int, stage: int, count: int) -> range:
    """The consecutive layers of a pipeline stage. What does not divide goes to the first stages, one layer each: the
    last has the output head. Raises ConfigError when a stage would have none."""
    if num_layers < count:
        raise ConfigError(f"pipeline_parallel_size={count} is more than the model's {num_layers} layers")
    part, rest = divmod(num_layers, count)
    start = stage * part + min(stage, rest)
    return range(start, start + part + (stage < rest))
