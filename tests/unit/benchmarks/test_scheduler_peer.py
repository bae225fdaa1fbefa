"""The peer's process: jobs go there and back, and whatever is missing is named with the way to get it."""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pagemill.bench.scheduler import work
from pagemill.bench.scheduler.own import OwnScheduler
from pagemill.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import scheduler_peer
from scheduler_peer import PeerProcess

ECHO = """
import json, sys
for line in sys.stdin:
    job = json.loads(line)
    if job["call"] == "die":
        sys.exit("it is over")
    if job["call"] == "fail":
        print(json.dumps({"error": {"type": "ValueError", "text": "no"}}), flush=True)
    else:
        print(json.dumps({"result": job}), flush=True)
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Python of an environment in which the peer's script is an echo."""
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    monkeypatch.setattr(scheduler_peer, "PEER_SCRIPT", script)
    return Path(sys.executable)


def test_jobs_go_there_and_back(echo: Path):
    with PeerProcess(echo) as peer:
        assert peer.call("steps", 3, [1, 2]) == {"call": "steps", "args": [3, [1, 2]]}
        with pytest.raises(RuntimeError, match="the peer's fail failed: ValueError: no"):
            peer.call("fail")


def test_a_peer_that_dies_is_reported_with_its_last_words(echo: Path):
    with PeerProcess(echo) as peer:
        with pytest.raises(RuntimeError, match="ended with exit status 1: it is over"):
            peer.call("die")
        with pytest.raises(RuntimeError, match="ended with exit status 1"):
            peer.call("steps", 1)


def test_a_python_that_is_not_there():
    with pytest.raises(ConfigError, match=r"peer_python='/no/such' cannot be run .*setup_peers.sh .*--peer-python"):
        PeerProcess(Path("/no/such"))


def test_an_environment_without_the_engine():
    """Ours has no vLLM; the script itself runs, and tells."""
    missing = pytest.raises(ConfigError, match=r"lacks a package \(No module named 'vllm.*setup_peers.sh")
    with PeerProcess(Path(sys.executable)) as peer, missing:
        peer.call("__init__", {"block_size": 16}, 7, [1])


@pytest.mark.slow
def test_both_do_the_same_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The peer's process is replaced by our own scheduler in this one."""

    class Peer:
        def __init__(self, python: Path) -> None:
            assert python == Path("peer/python")

        def __enter__(self) -> "Peer":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def call(self, method: str, *args: Any) -> Any:
            if method != "__init__":
                return getattr(self.scheduler, method)(*args)
            self.scheduler = OwnScheduler(*args)
            return None

    monkeypatch.setattr(scheduler_peer, "PeerProcess", Peer)
    sizes = {"decodes": (2, 4), "num_cached_blocks": 400, "admitted_tokens": 1024, "num_warmup_steps": 1}
    monkeypatch.setattr(work, "SchedulerWork", functools.partial(work.SchedulerWork, **sizes))
    path = tmp_path / "r.json"
    argv = ["--peer-python", "peer/python", "--steps", "3", "--repetitions", "1", "--output-json", str(path)]
    scheduler_peer.main(argv)
    saved = json.loads(path.read_text())
    assert saved["ratio_2"] > 0 and saved["ratio_4"] > 0 and saved["peer"]["step_ms_4"] > 0
