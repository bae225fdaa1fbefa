"""The feed of events: what a front end is told that subscribes late, or again."""

import pytest

from pagemill.fleet.event_feed import SUBSCRIBE, EventFeed
from pagemill.messages.engine_io import EngineReady
from pagemill.messages.fleet import EngineDown, EngineStalled, EngineUp, FrontEndMessage
from pagemill.transport.addresses import PrivateDirectory
from pagemill.transport.codec import Codec
from pagemill.transport.handshake import Hello, Role, new_secret
from pagemill.transport.sockets import ClientSocket

SECRET = new_secret()
PATIENCE_S = 120
UP = EngineUp(0, 1, "ipc:///nowhere", EngineReady(max_model_len=64, vocab_size=8, num_blocks=9, block_size=16))


@pytest.fixture
def feed(tmp_path):
    folder = PrivateDirectory(tmp_path)
    feed = EventFeed(folder.ipc("feed"), SECRET)
    yield feed
    feed.close()


def told(feed, last, index=0):
    """What a new subscriber is told, up to an event."""
    codec: Codec[FrontEndMessage] = Codec(FrontEndMessage)
    hello = Hello(secret=SECRET, role=Role.API_SERVER, index=index)
    socket = ClientSocket(feed.address, hello, timeout_s=60)
    socket.send(SUBSCRIBE)
    events = []
    while last not in events:
        frames = socket.receive(PATIENCE_S)
        assert frames is not None, f"{last} did not come after {events}"
        events.append(codec.decode(frames))
    socket.close()
    return events


@pytest.mark.parametrize("stalled", [True, False])
def test_who_subscribes_is_told_whether_an_engine_stalls(feed, stalled):
    feed.publish(UP)
    feed.publish(EngineStalled(0, 1, not stalled))
    feed.publish(EngineStalled(0, 1, stalled))
    told(feed, EngineStalled(0, 1, stalled), index=1)  # by now, the feed has taken note of all of it
    assert told(feed, EngineStalled(0, 1, stalled)) == [UP, EngineStalled(0, 1, stalled)]


def test_of_an_engine_that_is_gone_no_stall_is_told(feed):
    feed.publish(UP)
    feed.publish(EngineStalled(0, 1, True))
    down = EngineDown(0, 1, "it hung and was killed")
    feed.publish(down)
    told(feed, down, index=1)
    assert told(feed, down) == [down]
