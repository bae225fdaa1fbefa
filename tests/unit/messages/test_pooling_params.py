"""Parameters of vectors: what is allowed."""

import msgspec
import pytest

from pagemill.errors import RequestError
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [("pooling_type", "SUM"), ("dimensions", 0), ("dimensions", True), ("dimensions", 2**31), ("normalize", 1)],
)
def test_refused(field, value):
    with pytest.raises(RequestError, match=f"{field}={value!r}") as raised:
        PoolingParams(**{field: value})
    assert raised.value.field == field


def test_who_reads_all_tokens():
    assert [PoolingParams(pooling_type=kind).reads_all_tokens for kind in (None, "LAST", "CLS", "MEAN")] == [
        *(False, False, True, True)
    ]


@pytest.mark.parametrize("params", [PoolingParams(dimensions=3, pooling_type="CLS"), SamplingParams(seed=1)])
def test_they_travel_beside_sampling_parameters(params):
    wire = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(wire, type=SamplingParams | PoolingParams) == params
