"""Cascade attention by the kernels of GPUs, in an engine: what is written is what is written without."""

import dataclasses

import pytest

from tests.fakes.triton_interpreter import DEVICE  # isort: skip

from pagemill.catalog.attention import ATTENTION, register_backend
from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.launch import build_config
from pagemill.model.attention.backends import triton_attn
from pagemill.model.attention.backends.triton_attn import TritonBackend
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.queued_platform import QueuedPlatform
from tests.fakes.tiny_checkpoint import make_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("plain_kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu has the same on a GPU"),
]
SHARED = list(range(3, 37))


class CpuTriton(TritonBackend):
    name = "TEST_TRITON"
    capability = dataclasses.replace(TritonBackend.capability, devices=frozenset({"cpu"}))


def tokens_of(checkpoint, disable):
    settings = {"max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 40}
    config = build_config(
        EngineArgs(
            str(checkpoint), device="cpu", dtype="float32", attention_backend="TEST_TRITON",
            disable_cascade_attn=disable, **settings,
        )
    )  # fmt: skip
    worker = Worker(config, platform=QueuedPlatform(graphs=False))
    client = Client(EngineCore(config, UniprocExecutor(worker, overlap=True)))
    client.add(core_request("first", [*SHARED, 50], max_tokens=1, temperature=0))
    client.run()  # the others find its blocks
    client.add(*(core_request(str(i), [*SHARED, 60 + i], max_tokens=4, temperature=0) for i in range(3)))
    client.run()
    return client.tokens


def test_tokens_are_those_without(tmp_path, monkeypatch):
    monkeypatch.setattr(ATTENTION, "_paths", ATTENTION._paths.copy())
    register_backend("TEST_TRITON", f"{__name__}:CpuTriton")
    monkeypatch.setattr(triton_attn, "MIN_PREFIX", 32)
    monkeypatch.setattr(triton_attn, "MIN_SHARING", 3)
    prefixes, cascade = [], triton_attn.TritonBuilder._cascade

    def noted(builder, common):
        found = cascade(builder, common)
        prefixes.append(0 if found is None else found.prefix_len)
        return found

    monkeypatch.setattr(triton_attn.TritonBuilder, "_cascade", noted)
    checkpoint = make_checkpoint(tmp_path, "LlamaForCausalLM")
    without = tokens_of(checkpoint, disable=True)
    assert set(prefixes) == {0}
    assert tokens_of(checkpoint, disable=False) == without
    assert prefixes.count(32) == 3, "the steps after the first tokens"
