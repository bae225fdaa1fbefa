"""What clients can learn of each other's prompts: nothing across keys, and no more than whole blocks without."""

import msgspec
import pytest

from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.http.responses import told_cached_tokens
from pagemill.serve.http.salts import KeySalts
from tests.fakes.fake_core import FakeCore
from tests.unit.serve.http.conftest import Connect

PATH = "/v1/completions"
REQUEST = EngineCoreRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(), arrival_time=0.0)


async def salts_of(connect: Connect, requests: list[tuple[str, str | None]], **server: object) -> list[str | None]:
    """What the engine got for (key, salt of the request)."""
    core = FakeCore()
    client = await connect(core, **server)
    for key, salt in requests:
        body = {"prompt": "a", "cache_salt": salt, "max_tokens": 1}
        answer = await client.post(PATH, json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
    return [request.cache_salt for request in core.seen]


async def test_each_of_several_keys_has_a_salt_of_its_own(connect: Connect) -> None:
    requests = [("one", None), ("two", None), ("one", None), ("one", "x"), ("two", "x")]
    salts = await salts_of(connect, requests, api_key=("one", "two"))
    assert salts[0] == salts[2]
    assert len(set(salts)) == 4 and None not in salts
    assert not any("one" in str(salt) or "two" in str(salt) for salt in salts)


@pytest.mark.parametrize("server", [{"api_key": ("one", "two"), "share_prefix_cache": True}, {"api_key": ("one",)}])
async def test_keys_may_share_and_one_key_has_nobody_to_hide_from(connect: Connect, server: dict[str, object]) -> None:
    assert await salts_of(connect, [("one", None), ("one", "x")], **server) == [None, "x"]


def test_salts_are_those_of_the_deployment() -> None:
    def salt(secret: str, key: bytes, own: str | None = None) -> str | None:
        request = msgspec.structs.replace(REQUEST, cache_salt=own)
        return KeySalts(secret).salted(request, {"api_key": key}).cache_salt

    assert salt("s", b"k") == salt("s", b"k") != salt("t", b"k")
    assert salt("", b"k") != salt("", b"k"), "nobody shares it"
    assert len({salt("s", key, own) for key in (b"k", b"l") for own in (None, "a", "b")}) == 6
    assert KeySalts("s").salted(REQUEST, {}).cache_salt is None


@pytest.mark.parametrize(("num_cached", "told"), [(0, 0), (15, 0), (16, 16), (47, 32)])
def test_cached_tokens_are_told_in_whole_blocks_unless_the_request_is_salted(num_cached: int, told: int) -> None:
    assert told_cached_tokens(REQUEST, num_cached, 16) == told
    assert told_cached_tokens(msgspec.structs.replace(REQUEST, cache_salt="x"), num_cached, 16) == num_cached
