"""Models spread over worker processes give the tokens of one process; a worker that dies ends its engine."""

import os
import signal
import time

import psutil
import pytest

from pagemill import LLM, SamplingParams
from pagemill.errors import EngineDeadError, ModelError
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.integration.test_equalities import params, prompts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def children():
    """Finds the processes below this one, without those that other tests left, as a fork server."""
    before = set(psutil.Process().children(recursive=True))
    return lambda: [child for child in psutil.Process().children(recursive=True) if child not in before]


def generate(checkpoint, children, **settings):
    with LLM(str(checkpoint), dtype="float32", max_num_seqs=8, cpu_threads=1, **settings) as llm:
        workers = [title(process) for process in children()]
        outputs = llm.generate(prompts(12, longest=40), params(12), use_tqdm=False)
    assert children() == []
    return [output.outputs[0].token_ids for output in outputs], sorted(workers)


def title(process):
    return " ".join(process.cmdline()).strip()


@pytest.fixture(scope="module")
def expected(checkpoint, children):
    return generate(checkpoint, children)[0]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("ahead", [False, True])
def test_the_same_tokens_from_several_processes(checkpoint, children, expected, tp, pp, ahead):
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "async_scheduling": ahead}
    tokens, workers = generate(checkpoint, children, **sizes)
    assert tokens == expected
    assert workers == ["pagemill: worker 0", "pagemill: worker 1"]


@pytest.mark.parametrize("ahead", [False, True])
def test_the_same_tokens_with_drafts_over_two_stages(checkpoint, children, expected, ahead):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    sizes = {"pipeline_parallel_size": 2, "async_scheduling": ahead}
    assert generate(checkpoint, children, speculative_config=drafts, **sizes)[0] == expected


def test_a_killed_worker_ends_the_engine(checkpoint, children):
    with LLM(str(checkpoint), dtype="float32", tensor_parallel_size=2, cpu_threads=1) as llm:
        victim = next(p for p in children() if title(p) == "pagemill: worker 1")
        os.kill(victim.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match="worker"):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=64, ignore_eos=True), use_tqdm=False)
        assert time.monotonic() - started < 60
    assert children() == []


def test_damaged_weights_are_told(checkpoint, children, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in checkpoint.iterdir():
        (broken / path.name).write_bytes(
            path.read_bytes()[:-1000] if path.suffix == ".safetensors" else path.read_bytes()
        )
    with pytest.raises(ModelError):
        LLM(str(broken), tensor_parallel_size=2)
    assert children() == []
