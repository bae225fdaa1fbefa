import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.errors import HandshakeError
from pagemill.transport.handshake import (
    MAGIC,
    MAX_HELLO_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Role,
    check_hello,
    check_reply,
    hello_frames,
    is_hello,
    new_secret,
    reply_frames,
)

SECRET = new_secret()


def hello(**changes):
    return Hello(**({"secret": SECRET, "role": Role.API_SERVER, "index": 2} | changes))


def test_a_process_of_the_deployment_is_accepted():
    frames = hello_frames(hello())
    assert is_hello(frames)
    assert check_hello(frames, SECRET, [Role.API_SERVER]) == hello()
    check_reply(reply_frames())


def test_secrets_are_long_and_new():
    assert len(bytes.fromhex(SECRET)) == 32
    assert new_secret() != SECRET


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"secret": "other"}, "secret is wrong"),
        ({"secret": "\N{SNOWMAN}"}, "secret is wrong"),
        ({"secret": ""}, "secret is wrong"),
        ({"version": PROTOCOL_VERSION + 1}, f"version {PROTOCOL_VERSION + 1}, this process {PROTOCOL_VERSION}"),
        ({"role": Role.WORKER}, "'worker' is not accepted here; allowed: api server"),
        ({"index": -1}, "index -1 is not allowed"),
    ],
)
def test_a_mismatch_is_told_on_both_sides(changes, says):
    with pytest.raises(HandshakeError, match=says) as here:
        check_hello(hello_frames(hello(**changes)), SECRET, [Role.API_SERVER])
    assert SECRET not in str(here.value)
    with pytest.raises(HandshakeError, match=says):
        check_reply(reply_frames(str(here.value)))


def test_another_version_is_recognised_whatever_else_it_says():
    body = msgspec.msgpack.encode({"version": 99, "passport": [1, 2]})
    with pytest.raises(HandshakeError, match="version 99"):
        check_hello([MAGIC, body], SECRET, [Role.API_SERVER])


def test_a_hello_is_short():
    with pytest.raises(HandshakeError):
        check_hello(hello_frames(hello(secret="x" * MAX_HELLO_BYTES)), SECRET, [Role.API_SERVER])


@given(st.lists(st.binary(max_size=64), max_size=3), st.booleans())
def test_noise_is_a_handshake_error(frames, starts_right):
    frames = [MAGIC, *frames] if starts_right else frames
    with pytest.raises(HandshakeError):
        check_hello(frames, SECRET, list(Role))
