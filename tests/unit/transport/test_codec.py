import contextlib
import dataclasses
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.errors import TransportError
from pagemill.messages.block_copies import BlockCopies, BlockCopy
from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, Finish, FinishReason
from pagemill.messages.extensions import SamplingPayloads, StepPayloads
from pagemill.messages.grammar_masks import GrammarMasks
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import ModelRunnerOutput, NewRequest, SchedulerOutput, SlotBlocks
from pagemill.transport.codec import ARRAY_TYPES, INLINE_BYTES, Codec, Limits
from pagemill.transport.worker_protocol import SampleTokens, command_codec

STEP = Codec(SchedulerOutput)


class Holder(msgspec.Struct):
    array: np.ndarray[Any, Any]


HOLDER = Codec(Holder)


def step(num_slots=3):
    return SchedulerOutput(
        7,
        np.arange(num_slots, dtype=np.int32),
        np.ones(num_slots, np.int32),
        new=[
            NewRequest(
                "a", 0, np.array([1, 2, 3], np.int32), 3, 0, ([1], []), SamplingParams(stop=["x"], seed=2**64 - 1)
            )
        ],
        grown=[SlotBlocks(1, ([], [4, 5]))],
        released=[2],
    )


def _plain(new):
    return dataclasses.replace(new, token_ids=new.token_ids.tolist())


def same(left, right):
    return (
        np.array_equal(left.slots, right.slots)
        and np.array_equal(left.num_tokens, right.num_tokens)
        and [_plain(new) for new in left.new] == [_plain(new) for new in right.new]
        and (left.step_id, left.grown, left.released) == (right.step_id, right.grown, right.released)
    )


@pytest.mark.parametrize("num_slots", [0, 3, INLINE_BYTES // 4, INLINE_BYTES // 4 + 1, 100_000])
def test_a_step_survives_the_journey(num_slots):
    frames = STEP.encode(step(num_slots))
    assert len(frames) == (3 if num_slots * 4 > INLINE_BYTES else 1)
    decoded = STEP.decode([bytes(frame) for frame in frames])
    assert same(decoded, step(num_slots))
    decoded.slots[:] = 0  # the receiver may write


def test_requests_and_outputs_survive_the_journey():
    request = EngineCoreRequest(
        request_id="a", prompt_token_ids=[1, 2], params=SamplingParams(seed=1), arrival_time=1.5, emitted_token_ids=[9]
    )
    codec = Codec(EngineCoreRequest)
    assert codec.decode(codec.encode(request)) == request
    outputs = EngineCoreOutputs(
        request_ids=["b"],
        token_ids=[3],
        outputs=[EngineCoreOutput(request_id="a", new_token_ids=[1], finish=Finish(FinishReason.STOP, 1))],
    )
    codec = Codec(EngineCoreOutputs)
    assert codec.decode(codec.encode(outputs)) == outputs


class Numbers(msgspec.Struct, frozen=True):
    values: npt.NDArray[np.int32]
    places: tuple[int, ...] = ()


def type_of(name):
    return {"numbers": Numbers, "copies": BlockCopies}[name]


def with_payloads(**payloads):
    return dataclasses.replace(step(), extensions=StepPayloads(payloads))


@pytest.mark.parametrize("count", [3, INLINE_BYTES])
def test_payloads_are_decoded_as_their_names_say(count):
    codec = Codec(SchedulerOutput, named={StepPayloads: type_of})
    sent = with_payloads(copies=BlockCopies([BlockCopy(1, 2)]), numbers=Numbers(np.arange(count, dtype=np.int32), (4,)))
    frames = codec.encode(sent)
    assert len(frames) == (2 if count == INLINE_BYTES else 1)
    found = codec.decode(frames).extensions
    assert isinstance(found, StepPayloads)
    assert list(found) == ["copies", "numbers"]
    assert found["copies"] == sent.extensions["copies"]
    assert found["numbers"].places == (4,)
    assert np.array_equal(found["numbers"].values, np.arange(count))


@pytest.mark.parametrize(
    "payloads", [{"unknown": 1}, {"numbers": 1}, {"numbers": Numbers(np.zeros(2))}, {"copies": [[1, 2]]}]
)
def test_payloads_that_are_not_what_their_names_say_are_refused(payloads):
    codec = Codec(SchedulerOutput, named={StepPayloads: type_of})
    with pytest.raises(TransportError):
        codec.decode(codec.encode(with_payloads(**payloads)))
    with pytest.raises(TransportError):
        STEP.decode(STEP.encode(with_payloads(**payloads)))


def test_what_goes_with_the_call_that_samples_is_decoded_by_its_name():
    masks = GrammarMasks([3, 1], np.arange(2 * INLINE_BYTES, dtype=np.int32).reshape(2, -1))
    codec = command_codec()
    sent = SampleTokens(SamplingPayloads(grammar_masks=masks))
    frames = codec.encode(sent)
    assert len(frames) == 2
    found = codec.decode(frames).payloads
    assert isinstance(found, SamplingPayloads)
    assert found["grammar_masks"].slots == [3, 1]
    assert np.array_equal(found["grammar_masks"].masks, masks.masks)
    assert codec.decode(codec.encode(SampleTokens())).payloads is None
    with pytest.raises(TransportError):  # it says nothing there
        codec.decode(codec.encode(SampleTokens(SamplingPayloads(block_copies=BlockCopies([])))))


def test_large_arrays_are_not_copied():
    array = np.arange(10_000, dtype=np.int64)
    frames = HOLDER.encode(Holder(array))
    assert np.shares_memory(np.frombuffer(frames[1], np.int64), array)
    buffer = bytearray(frames[1])
    assert np.shares_memory(HOLDER.decode([frames[0], buffer]).array, np.frombuffer(buffer, np.int64))


@pytest.mark.parametrize("name", sorted(ARRAY_TYPES))
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (40, 50, 3)])
def test_every_allowed_type_and_shape(name, shape):
    array = (np.arange(np.prod(shape)) % 2).astype(name).reshape(shape)
    decoded = HOLDER.decode(HOLDER.encode(Holder(array))).array
    assert decoded.dtype == array.dtype and decoded.shape == shape and np.array_equal(decoded, array)


def test_an_array_that_is_not_contiguous():
    array = np.arange(20_000, dtype=np.float32).reshape(100, 200)[::2, ::-1].T
    assert np.array_equal(HOLDER.decode(HOLDER.encode(Holder(array))).array, array)


@pytest.mark.parametrize("value", [object(), np.array([object()]), np.array(["x"]), np.array([1], ">i4"), print])
def test_what_cannot_travel_is_not_sent(value):
    with pytest.raises(TypeError, match="cannot travel"):
        HOLDER.encode(Holder(value))


def wire(dtype="int32", shape=(2,), data=b"12345678", **more):
    return msgspec.msgpack.encode({"array": [dtype, shape, data, *more.values()]})


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\x91" * 100_000],
        [wire(dtype="object")],
        [wire(dtype="O")],
        [wire(dtype="int32, int32")],
        [wire(shape=(3,))],
        [wire(shape=(-1,))],
        [wire(shape=(-1, -2))],
        [wire(shape=(2**62, 2**62))],
        [wire(shape=(0, 2**63))],
        [wire(shape=(1,) * 9)],
        [wire(dtype="bool", shape=(8,))],
        [wire(data=1)],
        [wire(data=-1), b"12345678"],
        [wire(data=0), b"12345678"],
        [wire(data=2), b"12345678"],
        [wire(data=1), b"1234567"],
        [wire(data=1), b"12345678", b""],
        [wire(), b"12345678"],
        [wire(data="text")],
        [wire(extra=1)],
        [msgspec.msgpack.encode({"array": None})],
        [msgspec.msgpack.encode({})],
        [msgspec.msgpack.encode({"array": 3})],
    ],
)
def test_what_is_not_a_message_is_a_transport_error(frames):
    with pytest.raises(TransportError):
        HOLDER.decode(frames)


def test_the_declared_number_type_is_enforced():
    codec, other = Codec(ModelRunnerOutput), np.zeros(2, np.int64)
    with pytest.raises(TransportError, match="int64"):
        codec.decode(codec.encode(ModelRunnerOutput(1, other, other)))


def test_values_are_checked_as_their_types_do():
    codec = Codec(SamplingParams)
    body = msgspec.msgpack.encode({"type": "sampling", "temperature": -1.0})
    with pytest.raises(TransportError, match="temperature"):
        codec.decode([body])


def test_one_frame_is_not_used_twice():
    codec, array = Codec(ModelRunnerOutput), np.zeros(10_000, np.int32)
    frames = codec.encode(ModelRunnerOutput(1, array, array))
    body = bytes(frames[0]).replace(b"\x02", b"\x01")
    with pytest.raises(TransportError, match="twice"):
        codec.decode([body, *frames[1:]])


@pytest.mark.parametrize(
    "limits", [Limits(max_frames=2), Limits(max_frame_bytes=39_999), Limits(max_message_bytes=80_000)]
)
def test_limits(limits):
    frames = STEP.encode(step(10_000))
    with pytest.raises(TransportError, match="allowed"):
        Codec(SchedulerOutput, limits).decode(frames)


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_noise_is_a_transport_error_or_a_message(frames):
    for codec in (STEP, HOLDER, Codec(EngineCoreRequest)):
        with contextlib.suppress(TransportError):
            codec.decode(frames)


@pytest.mark.slow
@given(st.data())
def test_a_damaged_message_is_a_transport_error_or_a_message(data):
    frames = [bytearray(frame) for frame in STEP.encode(step(data.draw(st.sampled_from([3, 2000]))))]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        if frame and data.draw(st.booleans()):
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
        else:
            del frame[data.draw(st.integers(0, len(frame))) :]
    try:
        decoded = STEP.decode(frames)
    except TransportError:
        return
    assert decoded.slots.dtype == decoded.num_tokens.dtype == np.int32


def test_a_failed_message_leaves_nothing_behind():
    with pytest.raises(TransportError):
        HOLDER.decode([wire(data=1), b"123"])
    assert HOLDER.decode([wire()]).array.tolist() == np.frombuffer(b"12345678", np.int32).tolist()
