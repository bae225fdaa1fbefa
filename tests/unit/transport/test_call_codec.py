from typing import Any, Protocol

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.errors import TransportError
from pagemill.messages.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheSpec, SlidingWindowSpec
from pagemill.messages.sampling_params import SamplingParams
from pagemill.transport.call_codec import CallCodec
from tests.fakes.engine_setup import chunked, full, mamba, sliding


class Api(Protocol):
    """A protocol with the kinds of values that travel."""

    def plan(self, config: KVCacheConfig) -> dict[str, KVCacheSpec]: ...

    def mixed(self, count: int, names: tuple[str, ...], pair: tuple[int, str], seen: frozenset[int]) -> list[float]: ...

    def maybe(self, params: SamplingParams, spec: KVCacheSpec | None) -> KVCacheSpec | int | None: ...

    def forbidden(self) -> None: ...

    def _private(self) -> None: ...


CODEC = CallCodec(Api, excluded=["forbidden"])
GROUPS = tuple(
    KVCacheGroup((f"layer.{i}", "x"), spec) for i, spec in enumerate((full(), sliding(8), chunked(8), mamba()))
)
PLAN = KVCacheConfig(12, GROUPS)


def journey(values):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(values))


def args_journey(method, *args):
    return CODEC.unpack_args(method, journey(CODEC.pack_args(method, args)))


def test_values_keep_their_types():
    assert args_journey("plan", PLAN) == [PLAN]
    assert args_journey("mixed", 3, ("a", "b"), (1, "x"), frozenset([1, 2])) == [3, ("a", "b"), (1, "x"), {1, 2}]
    params = SamplingParams(stop=["x"], seed=2**64 - 1)
    assert args_journey("maybe", params, sliding(8)) == [params, sliding(8)]
    assert args_journey("maybe", params, None) == [params, None]


@pytest.mark.parametrize(
    ("method", "value"),
    [("plan", {"a": full(), "b": sliding(8)}), ("plan", {}), ("maybe", 3), ("maybe", None), ("maybe", full())],
)
def test_results_keep_their_types(method, value):
    back = CODEC.unpack_result(method, journey(CODEC.pack_result(value)))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize("method", ["forbidden", "_private", "__init__", "other"])
def test_methods_that_do_not_exist(method):
    with pytest.raises(ValueError, match="unknown method"):
        CODEC.pack_args(method, [])
    with pytest.raises(TransportError, match="unknown method"):
        CODEC.unpack_args(method, [])
    with pytest.raises(TransportError, match="unknown method"):
        CODEC.unpack_result(method, None)


def test_the_wrong_number_of_arguments():
    with pytest.raises(ValueError, match="takes 1 arguments, not 2"):
        CODEC.pack_args("plan", [PLAN, PLAN])
    with pytest.raises(TransportError, match="takes 1 arguments, not 0"):
        CODEC.unpack_args("plan", [])


FULL = CODEC.pack_result(full())


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        3,
        ["KVCacheSpec", {"block_size": 4}],
        ["KVCacheConfig", {"num_blocks": 1, "groups": []}],
        ["Popen", {"args": ["ls"]}],
        ["FullAttentionSpec", {}],
        ["FullAttentionSpec", FULL[1] | {"extra": 1}],
        ["FullAttentionSpec", FULL[1] | {"block_size": "4"}],
        ["FullAttentionSpec", FULL[1] | {"dtype": None}],
        [["FullAttentionSpec"], FULL[1]],
        [*FULL, 1],
    ],
)
def test_what_does_not_fit_is_a_transport_error(value):
    with pytest.raises(TransportError):
        CODEC.unpack_result("plan", {"layer": value})


def values():
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20)
    return st.recursive(
        leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=20) | st.integers(), inner)
    )


@pytest.mark.slow
@given(values(), values())
def test_noise_is_a_transport_error_or_fits(one, other):
    for method, args in (("plan", [one]), ("maybe", [one, other]), ("mixed", [one, other, one, other])):
        try:
            CODEC.unpack_args(method, args)
            CODEC.unpack_result(method, one)
        except TransportError:
            continue


def test_a_subclass_defined_elsewhere_is_known():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class OtherSpec(FullAttentionSpec):
        extra: tuple[int, ...] = ()

    spec: Any = OtherSpec(4, 1, 1, "float32", (1, 2))
    assert args_journey("maybe", SamplingParams(), spec)[1] == spec
    assert isinstance(sliding(8), SlidingWindowSpec)
