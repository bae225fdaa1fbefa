"""A worker as an actor: bytes in, bytes out, whatever the bytes."""

import os
import random

import msgspec
import pytest

from pagemill.messages.worker_rank import SOLO_RANK
from pagemill.transport.actor_protocol import ActorSpec, join_frames, split_frames
from pagemill.transport.worker_protocol import (
    CallFailed,
    CallMethod,
    Returned,
    Stop,
    WorkerCrashed,
    WorkerPulse,
    WorkerReport,
    command_codec,
    result_codec,
)
from pagemill.worker import ray_actor
from pagemill.worker.ray_actor import WorkerActor
from tests.fakes.engine_setup import engine_config
from tests.fakes.worker_processes import HERE


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(ray_actor, "PULSE_S", 0.01)


def actor(name="ProcessWorker", **options):
    made = type("Actor", (WorkerActor,), {})("pagemill: worker 0")
    config = msgspec.msgpack.encode(engine_config())
    options = {"rank": SOLO_RANK, "devices": []} | options
    made.begin(msgspec.msgpack.encode(ActorSpec(worker=f"{HERE}:{name}", config=config, **options)))
    return made


def say(actor, command):
    answer = actor.execute(join_frames(command_codec().encode(command)))
    return result_codec().decode(split_frames(answer)) if answer else None


def pulse(actor):
    return msgspec.msgpack.decode(actor.pulse(), type=WorkerReport)


def test_it_executes_commands():
    worker = actor()
    assert say(worker, CallMethod("available_kv_bytes", [])) == Returned(1 << 30)
    assert say(actor("BrokenWarmUp"), CallMethod("warm_up", [])) == CallFailed("ConfigError", "too much to warm up")
    assert pulse(worker) == WorkerPulse()


def test_a_call_that_does_not_exist_is_refused():
    assert say(actor(), CallMethod("shutdown", [])).kind == "TransportError"


@pytest.mark.parametrize(
    "noise", [b"", b"\xc1", random.Random(0).randbytes(50), join_frames([b"\x91\xa4none"]), join_frames([])]
)
def test_garbage_is_dropped(noise):
    worker = actor()
    assert worker.execute(noise) == b""
    assert say(worker, CallMethod("available_kv_bytes", [])) == Returned(1 << 30)


def test_a_worker_that_cannot_be_made_is_told_by_the_pulse():
    worker = actor("BrokenSettings")
    assert say(worker, CallMethod("available_kv_bytes", [])) is None
    crash = pulse(worker)
    assert isinstance(crash, WorkerCrashed)
    assert (crash.kind, crash.message) == ("ConfigError", "these settings cannot work")


def test_a_birth_that_cannot_be_read_is_told_too():
    worker = type("Actor", (WorkerActor,), {})("pagemill: worker 0")
    worker.begin(b"nonsense")
    assert isinstance(pulse(worker), WorkerCrashed)


def test_after_a_stop_nothing_is_executed():
    worker = actor()
    assert say(worker, Stop()) is None
    assert say(worker, CallMethod("available_kv_bytes", [])) is None


def test_it_is_called_by_its_title():
    worker = actor()
    assert repr(worker) == type(worker).__name__ == "pagemill: worker 0"


def test_devices_are_shown(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    actor()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    actor(devices=["2", "GPU-8f"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,GPU-8f"
