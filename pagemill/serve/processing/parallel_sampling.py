"""One request for n completions as n engine requests that differ in their seeds.
Does not know how their outputs are put together again."""

import msgspec

from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.sampling_params import MAX_SEED, SamplingParams


def fan_out(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """The children of a request, one per completion; child i samples with the request's seed + i (mod 2**64).

    They share the prompt's list. Child 0 equals the request asked for one completion.
    """
    params = request.params
    if not isinstance(params, SamplingParams) or params.n == 1:
        return [request]
    seed = params.seed or 0
    return [
        msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}.{index}",
            params=params.replace(n=1, seed=(seed + index) & MAX_SEED),
        )
        for index in range(params.n)
    ]
