"""Threads and CPUs of the workers, from the settings to the configuration; what an engine imports."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill import envs, launch
from pagemill.config.arguments import EngineArgs
from pagemill.config.fleet_plan import FleetPlan
from pagemill.errors import ConfigError
from pagemill.messages.engine_io import EngineReady
from pagemill.platforms import cpu
from pagemill.platforms.cpu import PREFILL_TOKENS
from pagemill.utils.timing import PhaseTimer
from tests.fakes.machines import machine
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_gguf import convert


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM"))


@pytest.fixture(autouse=True)
def sixteen_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("PAGEMILL_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    there = machine(tmp_path, 2, 8)
    monkeypatch.setattr(cpu, "read_topology", there.topology)


def placed(checkpoint, num_engines=1, headless=False, in_process=False, **settings):
    fleet = FleetPlan(num_engines, range(num_engines), headless, in_process=in_process)
    placed = launch.build_config(EngineArgs(checkpoint, device="cpu", **settings), fleet)
    threads, given = placed.cpu.cpu_threads, settings.get("max_prefill_tokens")
    if placed.parallel.distributed_executor_backend != "ray":
        assert placed.scheduler.max_prefill_tokens == (PREFILL_TOKENS * threads if given is None else given)
    return threads, placed.cpu.cpu_threads_bind


def test_engines_share_the_cores_by_node(checkpoint):
    assert placed(checkpoint) == (15, "1-15")
    assert placed(checkpoint, 2) == (8, "1-7|8-15")
    assert placed(checkpoint, 2, tensor_parallel_size=2, headless=True) == (4, "0-3|4-7|8-11|12-15")
    assert placed(checkpoint, cpu_threads_bind="nobind", headless=True) == (16, "nobind")
    assert placed(checkpoint, cpu_threads_bind="nobind", headless=True, max_prefill_tokens=99) == (16, "nobind")
    assert placed(checkpoint, in_process=True) == (16, "nobind")


def test_the_environment_says_it_where_the_flag_does_not(checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-2|8-10")
    assert placed(checkpoint, 2) == (3, "0-2|8-10")
    assert placed(checkpoint, 2, cpu_threads_bind="0|1") == (1, "0|1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-2;8-10")
    with pytest.raises(ConfigError, match="cpu_threads_bind='0-2;8-10' is not allowed"):
        placed(checkpoint, 2)


def test_as_many_lists_as_workers(checkpoint):
    with pytest.raises(ConfigError, match="has 1 lists for 4 workers"):
        placed(checkpoint, 2, tensor_parallel_size=2, cpu_threads_bind="0-7")


def test_workers_on_a_cluster_are_not_bound_from_here(checkpoint):
    assert placed(checkpoint, distributed_executor_backend="ray")[1] == "nobind"
    with pytest.raises(ConfigError, match="cpu_threads_bind='0-7' is for workers on this machine"):
        placed(checkpoint, distributed_executor_backend="ray", cpu_threads_bind="0-7")


NOT_FOR_A_START = {
    *("transformers", "fastapi", "uvicorn", "zmq", "httpx", "huggingface_hub", "ray", "triton", "sympy", "jinja2"),
    *("prometheus_client", "gguf", "safetensors", "torch._dynamo", "torch._inductor"),
    *("pagemill.engine.executor.multiproc", "pagemill.worker.forward.device", "pagemill.model.attention.op"),
}


@pytest.mark.slow
def test_an_engine_of_a_gguf_file_imports_no_more_than_it_needs(checkpoint, tmp_path):
    path = convert(Path(checkpoint), tmp_path / "tiny.gguf", "Q4_1")
    code = "import sys\nfrom pagemill import EngineArgs\nfrom pagemill.launch import build_inproc\n"
    code += "build_inproc(EngineArgs(sys.argv[1], device='cpu', skip_tokenizer_init=True))\n"
    code += "print(*sys.modules)"
    command = [sys.executable, "-c", code, str(path)]
    imported = set(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.split())
    assert "torch" in imported
    assert not imported & NOT_FOR_A_START


def test_an_unknown_quantization_lists_the_known_ones(checkpoint):
    with pytest.raises(ConfigError, match=r"quantization='int3' is not one of .*fp8, .*int8, .*none"):
        launch.build_config(EngineArgs(checkpoint, device="cpu", quantization="int3"))


def test_a_start_says_what_was_decided_and_what_cannot_matter(checkpoint, caplog, monkeypatch):
    monkeypatch.setattr(envs, "unread", lambda: ["VLLM_USE_V1"])
    file = Path(checkpoint) / "generation_config.json"
    file.write_text('{"typical_p": 0.25}')
    with caplog.at_level(logging.INFO, "pagemill"):
        launch.build_config(EngineArgs(checkpoint, device="cpu", gpu_memory_utilization=0.5, skip_mm_profiling=True))
    file.unlink()
    table, warning = (record.getMessage() for record in caplog.records)
    rows = [line.split()[0] for line in table.splitlines()[1:]]
    told = ["skip_mm_profiling", "gpu_memory_utilization", "VLLM_USE_V1"]
    assert rows == ["setting", "dtype", "max_model_len", "max_num_batched_tokens", *told]
    assert "there is one engine" in table
    assert "typical_p=0.25" in warning


@pytest.mark.parametrize("folder", [None, Path("packages")])
def test_a_start_that_compiles_torch_says_how_to_end_that(checkpoint, caplog, monkeypatch, folder):
    monkeypatch.setattr(launch, "source_only", lambda: folder)
    config = launch.build_config(EngineArgs(checkpoint, device="cpu"))
    caplog.clear()
    with caplog.at_level(logging.INFO, "pagemill"):
        ready = EngineReady(max_model_len=64, vocab_size=9, num_blocks=7, block_size=16)
        launch.log_ready(config, ready, PhaseTimer())
    said, *hints = (record.getMessage() for record in caplog.records)
    assert "112 tokens of KV cache, ready" in said
    assert ["`python -m compileall -q -j 0 packages`" in hint for hint in hints] == [True] * (folder is not None)
