"""Texts that are longer than the context: their parts, and the mean of what these give."""

import msgspec
import numpy as np

from pagemill.messages.pooling_params import PoolingParams
from pagemill.serve.processing.long_texts import joined, parts_of
from tests.fakes.engine_setup import core_request


def pooled(name, tokens):
    return msgspec.structs.replace(core_request(name, tokens), params=PoolingParams(pooling_type="MEAN"))


def test_parts_cover_the_prompt_and_are_not_scaled():
    request = pooled("long", range(10))
    parts = parts_of(request, 4)
    assert [list(part.prompt_token_ids) for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [part.request_id for part in parts] == ["long.0", "long.1", "long.2"]
    assert not any(part.params.normalize for part in parts)
    assert [part.rank - request.rank for part in parts] == [0, 1, 2]


def test_a_text_that_fits_stays_as_it_is():
    request = pooled("short", [1, 2, 3, 4])
    assert parts_of(request, 4) == [request]


def test_the_mean_is_weighted_by_tokens():
    vectors = [np.array([1, 0], np.float32), np.array([0, 1], np.float32)]
    np.testing.assert_allclose(joined(vectors, [3, 1], normalize=False), [0.75, 0.25])
    assert np.linalg.norm(joined(vectors, [3, 1], normalize=True)) == np.float32(1)
    assert joined(vectors[:1], [3], normalize=True) is vectors[0]
