"""What a test knows of a message beyond its declared type."""

from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.sampling_params import SamplingParams


def sampling_of(request: EngineCoreRequest) -> SamplingParams:
    """How a request for text is sampled."""
    assert isinstance(request.params, SamplingParams)
    return request.params


def pooling_of(request: EngineCoreRequest) -> PoolingParams:
    """What a request for a vector asks for."""
    assert isinstance(request.params, PoolingParams)
    return request.params


def max_tokens_of(request: EngineCoreRequest) -> int:
    """How many tokens a request for text wants, which engines are always told."""
    limit = sampling_of(request).max_tokens
    assert limit is not None
    return limit
