import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.errors import PeerGoneError, TransportError
from pagemill.transport.codec import Limits
from pagemill.transport.shm_queue import QueueReader, QueueWriter, create_queue, wait_any
from pagemill.transport.shm_ring import FIRST, LAST, Ring
from tests.examples import examples

CHILD = """
import sys, json
from pagemill.transport.shm_queue import QueueEnd, QueueReader, QueueWriter
ends = [QueueEnd(*end) for end in json.loads(sys.argv[1])]
reader, writer = QueueReader(ends[0]), QueueWriter(ends[1])
while True:
    frames = reader.get(30)
    if frames is not None:
        writer.put(frames, 30)
"""


@contextlib.contextmanager
def queue(num_readers=1, **sizes):
    writer_end, reader_ends = create_queue(num_readers, **sizes)
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(contextlib.closing(QueueWriter(writer_end)))
        yield writer, [stack.enter_context(contextlib.closing(QueueReader(end))) for end in reader_ends]


@contextlib.contextmanager
def echo_processes(count, **sizes):
    """Processes that read a common queue, and send back what they read over one each."""
    import json

    writer_end, reader_ends = create_queue(count, **sizes)
    children, backs = [], []
    for end in reader_ends:
        back_writer, (back_reader,) = create_queue(1, **sizes)
        ends = [[e.memory_fd, e.socket_fds, e.index] for e in (end, back_writer)]
        arguments = [sys.executable, "-c", CHILD, json.dumps(ends)]
        children.append(subprocess.Popen(arguments, pass_fds=end.fds() + back_writer.fds(), stderr=subprocess.DEVNULL))
        end.close()
        back_writer.close()
        backs.append(QueueReader(back_reader))
    writer = QueueWriter(writer_end)
    try:
        yield writer, backs, children
    finally:
        for closing in (writer, *backs):
            closing.close()
        for child in children:
            child.kill()
            child.wait()


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = open_descriptors()
    yield
    assert list(Path("/dev/shm").glob("*pagemill*")) == []
    assert open_descriptors() <= before  # fewer, when ZMQ has just closed what other tests left to it


def plain(frames):
    return frames and [bytes(frame) for frame in frames]


def test_every_reader_gets_every_message():
    with queue(3) as (writer, readers):
        for number in range(100):
            message = [b"%d" % number, bytes(number), b""]
            writer.put(message, 60)
            for reader in readers:
                assert plain(reader.get(60)) == message
        assert [reader.get(0) for reader in readers] == [None] * 3


def test_frames_belong_to_the_reader():
    with queue(num_slots=1) as (writer, (reader,)):
        writer.put([b"first"], 60)
        frames = reader.get(60)
        writer.put([b"other"], 60)
        assert bytes(frames[0]) == b"first" and not frames[0].readonly


@given(st.lists(st.lists(st.binary(max_size=600), min_size=1, max_size=4), max_size=12), st.integers(1, 4))
@settings(max_examples=examples(30), deadline=None)
def test_messages_of_any_size_arrive_in_order(messages, num_slots):
    with queue(2, num_slots=num_slots, slot_bytes=64) as (writer, readers):
        received = [[], []]

        def read(index):
            while len(received[index]) < len(messages):
                received[index].append(plain(readers[index].get(60)))

        threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for message in messages:
            writer.put(message, 60)
        for thread in threads:
            thread.join()
        assert received == [messages, messages]


def test_a_full_queue_times_out_and_names_the_slow_reader():
    with queue(2, num_slots=2) as (writer, (fast, slow)):
        for _ in range(2):
            writer.put([b"x"], 60)
        fast.get(60)
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="reader 1"):
            writer.put([b"lost"], 0.05)
        assert time.monotonic() - started < 60
        for _ in range(2):
            slow.get(60)
        fast.get(60)
        writer.put([b"later"], 60)
        assert plain(fast.get(60)) == plain(slow.get(60)) == [b"later"]


def test_a_message_cut_off_half_way_is_dropped_by_the_readers():
    with queue(num_slots=2, slot_bytes=64) as (writer, (reader,)):
        with pytest.raises(TimeoutError):
            writer.put([bytes(1000)], 0.01)
        assert reader.get(0.01) is None
        writer.put([b"whole"], 60)
        assert plain(reader.get(60)) == [b"whole"]


def test_a_message_over_the_limit_is_dropped():
    writer_end, (reader_end,) = create_queue(1)
    limits = Limits(max_frames=2, max_frame_bytes=100, max_message_bytes=150)
    with (
        contextlib.closing(QueueWriter(writer_end)) as writer,
        contextlib.closing(QueueReader(reader_end, limits)) as reader,
    ):
        for message in ([b"x"] * 3, [bytes(101)], [bytes(90), bytes(90)], [bytes(1000)]):
            writer.put(message, 60)
            with pytest.raises(TransportError):
                reader.get(60)
        writer.put([b"fine"], 60)
        assert plain(reader.get(60)) == [b"fine"]


@pytest.mark.slow
@given(st.binary(max_size=100), st.integers(0, 2**64 - 1), st.integers(0, 3))
@settings(deadline=None)
def test_noise_in_the_memory_is_a_transport_error_or_a_message(noise, size, flags):
    with queue(num_slots=2, slot_bytes=128) as (writer, (reader,)):
        ring = writer._ring
        with ring.payload(0) as payload:
            payload[: len(noise)] = noise
        ring.publish(0, size, flags | FIRST | LAST)
        with contextlib.suppress(TransportError):
            reader.get(60)
        writer._next = 1
        writer.put([b"fine"], 60)
        assert plain(reader.get(60)) == [b"fine"]


def test_memory_that_is_not_a_queue():
    fd = os.memfd_create("noise")
    os.ftruncate(fd, 4096)
    with pytest.raises(TransportError, match="does not hold a queue"):
        Ring(fd)
    os.close(fd)


def test_both_sides_notice_the_end():
    with queue() as (writer, (reader,)):
        writer.put([b"last words"], 60)
        writer.close()
        assert plain(reader.get(60)) == [b"last words"]
        with pytest.raises(PeerGoneError):
            reader.get(60)
    with queue(num_slots=1) as (writer, (reader,)):
        writer.put([b"x"], 60)
        reader.close()
        with pytest.raises(PeerGoneError):
            writer.put([b"x"], 60)


def test_waiting_for_any_of_several_queues():
    with queue() as (writer, (reader,)), queue() as (other_writer, (other,)):
        assert not wait_any([reader, other], 0.01)
        timer = threading.Timer(0.05, other_writer.put, ([b"x"], 60))
        timer.start()
        assert wait_any([reader, other], 60)
        assert not reader.has_message() and other.has_message()
        timer.join()
        writer.close()
        assert plain(other.get(60)) == [b"x"]
        started = time.monotonic()
        assert not wait_any([reader, other], 300)
        assert time.monotonic() - started < 60


@pytest.mark.slow
def test_between_processes():
    with echo_processes(2, num_slots=4, slot_bytes=4096) as (writer, backs, _):
        noise = random.Random(0)
        for _ in range(200):
            message = [noise.randbytes(noise.randrange(3000)) for _ in range(noise.randrange(1, 5))]
            writer.put(message, 60)
            for back in backs:
                assert plain(back.get(60)) == message


@pytest.mark.slow
def test_a_killed_reader_is_noticed_by_who_waits_for_it():
    with echo_processes(2) as (writer, backs, children):
        writer.put([b"x"], 60)
        for back in backs:
            back.get(60)
        killer = threading.Timer(0.1, os.kill, (children[1].pid, signal.SIGKILL))
        killer.start()
        started = time.monotonic()
        with pytest.raises(PeerGoneError):
            backs[1].get(300)
        assert time.monotonic() - started < 60
        with pytest.raises(PeerGoneError):
            for _ in range(1000):
                writer.put([b"x"], 60)
                backs[0].get(60)
        killer.join()


@pytest.mark.slow
def test_waiting_costs_no_processor_time():
    with echo_processes(1) as (writer, (back,), (child,)):
        writer.put([b"x"], 60)
        back.get(60)

        def seconds():
            here = resource.getrusage(resource.RUSAGE_SELF)
            nanoseconds = int(Path(f"/proc/{child.pid}/schedstat").read_text().split()[0])
            return nanoseconds / 1e9, here.ru_utime + here.ru_stime

        before = seconds()
        assert back.get(3) is None
        used = [after - start for after, start in zip(seconds(), before, strict=True)]
        assert max(used) < 0.03, f"{used} s of processor time in 3 s of waiting"
