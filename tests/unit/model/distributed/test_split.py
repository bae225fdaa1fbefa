"""What each rank holds: together everything, apart nothing twice, except heads that must be replicated."""

import pytest

from pagemill.errors import ConfigError
from pagemill.model.distributed.split import even_split, padded_split, split_heads, stage_layers


def joined(parts):
    return [index for part in parts for index in part]


def test_an_even_split_covers_everything_once():
    assert joined(even_split(12, rank, 3, "x") for rank in range(3)) == list(range(12))
    with pytest.raises(ConfigError, match="intermediate_size 10 cannot be split over tensor_parallel_size=4"):
        even_split(10, 0, 4, "intermediate_size")


@pytest.mark.parametrize(("size", "count"), [(10, 4), (9, 2), (3, 4), (8, 2), (5, 4)])
def test_a_padded_split_covers_everything_once_and_parts_begin_at_multiples(size, count):
    parts = [padded_split(size, rank, count) for rank in range(count)]
    assert joined(parts) == list(range(size))
    assert all(part.start == min(rank * len(parts[0]), size) for rank, part in enumerate(parts))


def test_heads_are_dealt_out_and_few_key_heads_replicated():
    four = [split_heads(8, 4, rank, 2) for rank in range(2)]
    assert [(list(part.query), list(part.kv)) for part in four] == [([0, 1, 2, 3], [0, 1]), ([4, 5, 6, 7], [2, 3])]
    two = [split_heads(8, 2, rank, 4) for rank in range(4)]
    assert joined(part.query for part in two) == list(range(8))
    assert [list(part.kv) for part in two] == [[0], [0], [1], [1]]


@pytest.mark.parametrize(("heads", "kv_heads", "count"), [(32, 8, 16), (14, 2, 2), (16, 1, 8), (12, 12, 3)])
def test_every_rank_has_the_key_heads_of_its_query_heads(heads, kv_heads, count):
    group = heads // kv_heads
    for rank in range(count):
        part = split_heads(heads, kv_heads, rank, count)
        assert {head // group for head in part.query} == set(part.kv)
        assert len(part.query) % len(part.kv) == 0


@pytest.mark.parametrize(("heads", "kv_heads", "count"), [(9, 3, 2), (12, 6, 4), (12, 4, 6)])
def test_heads_that_do_not_divide_are_refused(heads, kv_heads, count):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={count}"):
        split_heads(heads, kv_heads, 0, count)


@pytest.mark.parametrize(("layers", "count"), [(30, 4), (7, 3), (4, 4), (5, 1)])
def test_stages_are_consecutive_and_the_first_take_the_rest(layers, count):
    parts = [stage_layers(layers, stage, count) for stage in range(count)]
    assert joined(parts) == list(range(layers))
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="pipeline_parallel_size=5 is more than the model's 4 layers"):
        stage_layers(4, 0, 5)
