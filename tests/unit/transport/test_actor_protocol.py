"""Messages in one piece."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.errors import TransportError
from pagemill.transport.actor_protocol import join_frames, split_frames


@given(st.lists(st.binary()))
def test_frames_come_out_as_they_went_in(frames):
    assert split_frames(join_frames([memoryview(frame) for frame in frames])) == frames


@given(st.binary())
def test_whatever_else_comes_is_a_transport_error(noise):
    try:
        assert all(isinstance(frame, memoryview) for frame in split_frames(noise))
    except TransportError:
        return


@pytest.mark.parametrize("noise", [b"", b"\x92\xc4\x01a", b"\xa1a", join_frames([b"a"]) + b"more"])
def test_a_cut_or_padded_message(noise):
    with pytest.raises(TransportError, match="not the frames of a message"):
        split_frames(noise)
