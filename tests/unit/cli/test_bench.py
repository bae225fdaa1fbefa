import contextlib
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pagemill.bench.scheduler import work
from pagemill.cli.main import main
from pagemill.messages.outputs import CompletionOutput, RequestOutput
from tests.fakes.openai_server import FakeOpenAIServer


class FakeLLM:
    made: list["FakeLLM"]

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.calls: list[list[list[int]]] = []
        self.params: list[Any] = []
        FakeLLM.made.append(self)

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> list[RequestOutput]:
        self.calls.append([prompt["prompt_token_ids"] for prompt in prompts])
        self.params.append(sampling_params[0])
        return [
            RequestOutput("r", None, [], [CompletionOutput(0, "", [7] * params.max_tokens)], True)
            for params in sampling_params
        ]


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    module = ModuleType("pagemill.llm")
    module.LLM = FakeLLM
    FakeLLM.made = []
    monkeypatch.setitem(sys.modules, "pagemill.llm", module)
    return FakeLLM.made


def figures(out: str) -> dict[str, str]:
    return dict(line.rsplit(maxsplit=1) for line in out.splitlines())


def test_throughput(llms: list[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["bench", "throughput", "--model", "m", "--num-prompts", "8", "--input-len", "32", "--output-len", "16"]
    assert main([*argv, "--max-num-seqs", "4", "--output-json", str(tmp_path / "r.json")]) == 0
    assert llms[0].settings == {"model": "m", "max_num_seqs": 4}
    assert [len(prompt) for prompt in llms[0].calls[0]] == [32] * 8
    rows = {name.strip(): value for name, value in figures(capsys.readouterr().out).items()}
    assert (rows["num_requests"], rows["num_prompt_tokens"], rows["num_output_tokens"]) == ("8", "256", "128")
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["num_output_tokens"] == 128
    assert saved["arguments"]["model"] == "m" and saved["arguments"]["input_len"] == 32


def test_decoding_is_greedy_unless_told_otherwise(llms: list[FakeLLM]):
    argv = ["bench", "throughput", "--num-prompts", "2", "--input-len", "4", "--output-len", "2"]
    assert main(argv) == 0
    assert main([*argv, "--temperature", "0.8", "--top-k", "50", "--top-p", "0.95"]) == 0
    greedy, drawn = (llm.params[0] for llm in llms)
    assert greedy.greedy and greedy.ignore_eos
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.ignore_eos) == (0.8, 50, 0.95, True)


@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_a_profile_is_of_new_prompts(
    kind: str, llms: list[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    @contextlib.contextmanager
    def trace(path: Path) -> Iterator[None]:
        yield
        event = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.0, "dur": 1500.0}
        path.write_text(json.dumps({"traceEvents": [event]}))

    monkeypatch.setattr("pagemill.bench.profiling.gpu_trace", trace)
    argv = ["bench", kind, "--input-len", "4", "--output-len", "2", "--profile", str(tmp_path / "t.json")]
    assert main(argv) == 0
    calls = llms[0].calls
    assert calls[-1] not in calls[:-1] and len(calls[-1]) == len(calls[0])
    assert "GPU busy 100.0% of 1.5 ms" in capsys.readouterr().out


def test_a_given_workload(llms: list[FakeLLM], tmp_path: Path):
    path = tmp_path / "work.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2], "num_output_tokens": 3}\n')
    assert main(["bench", "throughput", "--workload", str(path)]) == 0
    assert llms[0].calls == [[[1, 2]]]


def test_speculation_on_and_off(llms: list[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["bench", "throughput", "--num-prompts", "2", "--input-len", "4", "--output-len", "3", "--seed", "5"]
    argv += ["--compare-speculation", "2", "--max-num-seqs", "4", "--output-json", str(tmp_path / "r.json")]
    assert main([*argv, "--spec-method", "suffix", "--spec-tokens", "4"]) == 0
    assert [llm.settings for llm in llms] == [
        {"max_num_seqs": 4, "speculative_config": {"method": "none"}},
        {"max_num_seqs": 4, "spec_method": "suffix", "spec_tokens": 4},
    ]
    assert [len(llm.calls) for llm in llms] == [3, 3]
    assert {llm.params[0].seed for llm in llms} == {5}
    out = capsys.readouterr().out
    assert "without drafts   with drafts   ratio" in out and "equal outputs: 2 of 2" in out
    saved = json.loads((tmp_path / "r.json").read_text())
    assert (len(saved["turns"]), saved["num_equal_outputs"]) == (2, 2)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--compare-speculation", "0"], "--compare-speculation 0 must be at least 1"),
        (["--compare-speculation", "1", "--profile", "t.json"], "--profile is not allowed with --compare-speculation"),
    ],
)
def test_comparisons_that_cannot_be(
    argv: list[str], said: str, llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", "throughput", *argv]) == 2
    assert said in capsys.readouterr().err
    assert not llms


def test_latency_runs_a_new_batch_each_time(llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]):
    argv = ["bench", "latency", "--batch-size", "2", "--num-iterations", "3", "--num-warmups", "1", "--input-len", "8"]
    assert main(argv) == 0
    calls = llms[0].calls
    assert [len(batch) for batch in calls] == [2, 2, 2, 2]
    assert len({tuple(prompt) for batch in calls for prompt in batch}) == 8
    assert "latency median_ms" in capsys.readouterr().out


def test_load_on_a_server(server: FakeOpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["bench", "serve", "--url", server.url, "--num-prompts", "5", "--input-len", "4", "--request-rate", "500"]
    argv += ["--max-concurrency", "2", "--goodput", "ttft:60000", "e2el:60000", "--api-key", "secret"]
    assert main([*argv, "--output-json", str(tmp_path / "r.json")]) == 0
    saved = json.loads((tmp_path / "r.json").read_text())
    assert (saved["num_completed"], saved["num_failed"], saved["num_output_tokens"]) == (5, 0, 20)
    assert saved["good_requests_per_s"] == pytest.approx(saved["requests_per_s"])
    assert saved["ttft"]["median_ms"] > 0 and saved["itl"]["p99_ms"] > 0
    assert "secret" not in json.dumps(saved)
    assert "tpot p99_ms" in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_that_answers_nothing(server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str]):
    server.script.error = (503, "busy")
    assert main(["bench", "serve", "--url", server.url, "--num-prompts", "2"]) == 1
    assert "no request to" in (err := capsys.readouterr().err) and "503" in err


@pytest.fixture
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"decodes": (2, 4), "num_cached_blocks": 400, "admitted_tokens": 1024, "num_warmup_steps": 1}
    monkeypatch.setattr(work, "SchedulerWork", functools.partial(work.SchedulerWork, **sizes))


def test_scheduler(small_work: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "r.json"
    assert main(["bench", "scheduler", "--steps", "3", "--repetitions", "2", "--output-json", str(path)]) == 0
    saved = json.loads(path.read_text())
    assert saved["arguments"]["steps"] == 3
    assert saved["step_ms_4"] > 0 and saved["admit_1k_ms"] > 0 and "ratio_4" not in saved
    assert "step_ms_2 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["bench", "serve", "--request-rate", "0"], 1, "request_rate=0.0 is not allowed"),
        (["bench", "serve", "--goodput", "speed:1"], 1, "goodput='speed:1' is not allowed"),
        (["bench", "serve", "--max-concurrency", "0"], 2, "--max-concurrency 0 must be at least 1"),
        (["bench", "throughput", "--num-prompts", "0"], 1, "num_prompts=0 is too small"),
        (["bench", "throughput", "--workload", "no-such"], 1, "cannot read the workload no-such"),
        (["bench", "throughput", "--top-p", "0"], 1, "top_p=0.0"),
        (["bench", "latency", "--temperature", "-1"], 1, "temperature=-1.0"),
        (["bench", "latency", "--batch-size", "0"], 1, "num_prompts=0 is too small"),
        (["bench", "scheduler", "--steps", "0"], 1, "num_steps=0 is too small: at least 1"),
        (["bench", "latency", "--num-iterations", "0"], 2, "--num-iterations must be at least 1"),
    ],
)
def test_bad_input(argv: list[str], code: int, message: str, llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]):
    assert main(argv) == code
    assert message in capsys.readouterr().err
    assert llms == []


def test_bench_alone_shows_its_help(capsys: pytest.CaptureFixture[str]):
    assert main(["bench"]) == 0
    assert "throughput" in capsys.readouterr().out
