"""benchmarks/gpu.py, with a package in place of the reference engine that answers at once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
FAKE = """
import os
import time
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, **given):
        self.__dict__.update(given)

class LLM:
    def __init__(self, model, **settings):
        if "broken" in os.environ.get("FAKE", ""):
            raise RuntimeError("does not start")
        assert settings["load_format"] == "dummy" and "device" not in settings

    def generate(self, prompts, params, use_tqdm):
        if "stuck" in os.environ.get("FAKE", ""):
            time.sleep(60)
        time.sleep(1e-5 * sum(each.max_tokens for each in params))
        print("chatter on stdout")
        short = "short" in os.environ.get("FAKE", "")
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * (p.max_tokens - short))]) for p in params]
"""


@pytest.fixture
def bench(tmp_path: Path):
    """Runs the script; (exit status, output, the JSON file)."""
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    path = tmp_path / "gpu.json"

    def run(*arguments: str, fake: str = "") -> SimpleNamespace:
        command = [sys.executable, str(SCRIPT), *arguments, "--output-json", str(path), "--engines", "reference"]
        done = subprocess.run(
            [*command, "--reference-path", str(package.parent)],
            env=os.environ | {"FAKE": fake},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "Traceback" not in done.stderr, done.stderr
        rows = json.loads(path.read_text())["rows"] if path.exists() else {}
        return SimpleNamespace(code=done.returncode, out=done.stdout, rows=rows)

    return run


@pytest.mark.slow
def test_rows_of_one_setup_share_a_process_and_are_not_run_again(bench):
    done = bench("--only", "smoke,1b-batch1")
    assert set(done.rows) == {"smoke", "1b-batch1"}
    assert "decode_tokens_per_s" in done.rows["1b-batch1"]["reference"]["figures"]
    assert done.rows["smoke"]["reference"]["start"] == done.rows["1b-batch1"]["reference"]["start"]
    assert done.out.count("reference start") == 1
    again = bench("--only", "smoke,1b-batch1", fake="broken")
    assert "reference start" not in again.out and again.rows == done.rows
    assert bench("--only", "smoke", "--again", fake="broken").rows["smoke"]["reference"]["error"]


@pytest.mark.slow
def test_failures_are_recorded_and_tried_again(bench):
    done = bench("--only", "smoke", fake="broken")
    assert done.code == 1
    assert done.rows["smoke"]["reference"]["error"] == "RuntimeError: does not start"
    assert "does not start" in done.out
    assert "figures" in bench("--only", "smoke").rows["smoke"]["reference"]


def test_a_work_that_fails_leaves_the_others(bench):
    rows = bench("--only", "smoke,1b-first-token", fake="short").rows
    assert set(rows) == {"smoke", "1b-first-token"}
    assert all("error" in row["reference"] for row in rows.values())


@pytest.mark.slow
def test_an_engine_that_hangs_is_killed(bench):
    done = bench("--only", "smoke", "--time-limit-s", "2", fake="stuck")
    assert "the engine ended before" in done.rows["smoke"]["reference"]["error"]


@pytest.mark.slow
def test_starts_are_measured_twice_on_caches_of_their_own(bench):
    figures = bench("--only", "1b-start").rows["1b-start"]["reference"]["figures"]
    assert figures["first_start_s"] > 0 and figures["warm_start_s"] > 0


def test_files_of_several_runs_are_merged_into_one_table(bench, tmp_path: Path):
    good = {
        "ours": {"figures": {"decode_tokens_per_s": 250.0}},
        "reference": {"figures": {"decode_tokens_per_s": 200.0}},
    }
    (tmp_path / "a.json").write_text(json.dumps({"machine": {}, "rows": {"8b-batch1": good}}))
    bad = {"ours": {"error": "lost"}}
    slow = {"ours": {"figures": {"output_tokens_per_s": 9000.0}}}
    (tmp_path / "b.json").write_text(json.dumps({"machine": {}, "rows": {"8b-batch1": bad, "8b-256": slow}}))
    done = bench("--merge", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert done.rows["8b-batch1"] == good
    lines = {line.split()[0]: line for line in done.out.splitlines() if line.strip()}
    assert "1.25  >=240 ok" in lines["8b-batch1"]
    assert "9,806 r" in lines["8b-256"] and "MISSED" in lines["8b-256"]


def test_an_unknown_row_is_named(bench):
    command = [sys.executable, str(SCRIPT), "--only", "9b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "unknown rows ['9b']" in done.stderr


def test_every_row_is_possible():
    """Rows name works and figures that exist, and setups whose models are there."""
    code = """
import json, sys
sys.path[:0] = ["benchmarks", "benchmarks/engines"]
import gpu_engine, gpu_rows
for row in gpu_rows.ROWS:
    config = json.loads((row.setup.folder / "config.json").read_text())
    assert config["vocab_size"] > 1000
    assert row.work == "start" or row.work in gpu_engine.WORKS, row
assert gpu_rows.OWN_WORKS <= set(gpu_engine.WORKS)
assert len(gpu_rows.BY_NAME) == len(gpu_rows.ROWS) + len(gpu_rows.SCRIPTS)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
