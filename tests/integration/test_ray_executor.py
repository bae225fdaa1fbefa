"""Workers on a Ray cluster of two nodes, both on this machine: the tokens of one process, and the end of an engine."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from pagemill import LLM, SamplingParams
from pagemill.engine.executor.ray import RayExecutor
from pagemill.errors import ConfigError, EngineDeadError
from tests.fakes.engine_setup import engine_config
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.worker_processes import HERE
from tests.integration.test_equalities import params, prompts

ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'pagemill[ray]')")
pytestmark = pytest.mark.slow

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Two nodes of one CPU each: two workers find room on none of them."""
    from ray.cluster_utils import Cluster  # deferred: an optional package

    before = set(psutil.Process().children(recursive=True))  # as the fork server that other tests left
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args=NODE)
        try:
            cluster.add_node(**NODE)
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            cluster.shutdown()
    gone_within(60, lambda: [child for child in psutil.Process().children(recursive=True) if child not in before])


def gone_within(limit_s, find):
    deadline = time.monotonic() + limit_s
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def workers():
    """Actors on the machine, by their titles."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline()).strip()
        except psutil.NoSuchProcess:
            continue
        if title.startswith("ray::pagemill: worker"):
            found.append((title, process))
    return sorted(found, key=lambda pair: pair[0])


@pytest.fixture(autouse=True)
def no_worker_is_left(cluster):
    yield
    gone_within(60, workers)
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


def load(checkpoint, **settings):
    return LLM(str(checkpoint), dtype="float32", max_num_seqs=8, cpu_threads=1, **settings)


def generate(llm):
    outputs = llm.generate(prompts(12, longest=40), params(12), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_the_same_tokens_from_two_nodes_and_the_end_of_a_worker(checkpoint):
    with load(checkpoint) as llm:
        expected = generate(llm)
    with load(checkpoint, tensor_parallel_size=2, distributed_executor_backend="ray") as llm:
        (title, first), (_, second) = workers()
        assert title == "ray::pagemill: worker 0"
        assert first.ppid() != second.ppid()  # each belongs to the raylet of a node
        assert generate(llm) == expected
        os.kill(second.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"worker 1 \(pid \d+ on .*\) is gone: its worker process has died"):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=64, ignore_eos=True), use_tqdm=False)
        assert time.monotonic() - started < 60


def test_pipeline_stages_on_two_nodes(checkpoint):
    with load(checkpoint, pipeline_parallel_size=2, distributed_executor_backend="ray") as llm:
        tokens = generate(llm)
    with load(checkpoint) as llm:
        assert tokens == generate(llm)


def test_a_worker_killed_while_idle_and_one_that_is_stopped():
    executor = RayExecutor(f"{HERE}:ProcessWorker", engine_config(), tensor_parallel_size=2)
    os.kill(executor.pids[0], signal.SIGSTOP)
    os.kill(executor.pids[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="worker 1"):
        while time.monotonic() - started < 60:
            executor.check_health()
            time.sleep(0.01)
    assert time.monotonic() - started < 60
    executor.shutdown()
    assert time.monotonic() - started < 60


def test_workers_end_with_an_engine_that_is_killed():
    code = f"""
import time
from pagemill.engine.executor.ray import RayExecutor
from tests.fakes.worker_processes import config
executor = RayExecutor("{HERE}:ProcessWorker", config(), tensor_parallel_size=2)
print("\\n", *executor.pids, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as engine:
        for line in engine.stdout:
            if line.strip().replace(" ", "").isdigit():
                break
        assert len(workers()) == 2
        engine.kill()
        gone_within(60, workers)


def test_large_and_small_steps_arrive_in_order():
    import numpy as np

    from pagemill.messages.step import NewRequest, SchedulerOutput
    from tests.fakes.engine_setup import core_request

    executor = RayExecutor(f"{HERE}:Counting", engine_config(), tensor_parallel_size=2, overlap=True)
    try:
        steps, sizes = [], (10, 500_000, 20, 1_000_000, 30)
        for step_id, size in enumerate(sizes):
            new = NewRequest("a", 0, np.full(size, 70_000, np.int32), size, 0, ([1],), core_request("a", 1).params)
            array = np.arange(size, dtype=np.int32)
            executor.execute_model(SchedulerOutput(step_id, array, array, new=[new]))
            steps.append(executor.sample_tokens())
        assert [step.result().token_ids[0] for step in steps] == list(sizes)
    finally:
        executor.shutdown()


def test_a_cluster_that_is_too_small_is_told_so():
    with pytest.raises(ConfigError, match=r"no room for 3 workers of 1 CPU each within 1 s; its 2 nodes: .* has 1 CPU"):
        RayExecutor(f"{HERE}:ProcessWorker", engine_config(), tensor_parallel_size=3, room_timeout_s=1)
