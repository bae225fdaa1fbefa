"""An installed package that adds a model, an attention backend, a platform, a logits processor, a stat logger, a
step extension and an endpoint."""

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.integration.server_process import running_server

EXAMPLE = Path(__file__).parents[1] / "plugins" / "example"
PROMPT = list(range(10, 40))
BACKEND_USED = "the example's attention backend is used"
RECORD = """
import json, sys
from pagemill import LLM, SamplingParams
with LLM(sys.argv[1], dtype="float32", cpu_threads=1, **json.loads(sys.argv[2])) as llm:
    outputs = llm.generate([list(range(10, 40))], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
print(json.dumps([outputs[0].outputs[0].token_ids, outputs[0].outputs[0].text]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that the example is installed in; it is not on the path of this process."""
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "example"
    subprocess.run(["cp", "-r", EXAMPLE, source], check=True)  # a build leaves files beside its source
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--no-index", "--target", folder, source], check=True, timeout=300)
    return folder


@pytest.fixture
def with_example(installed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(installed))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Llama's tensors under an architecture that only the example knows."""
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["ExampleForCausalLM"]}))
    return folder


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def run(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout, done.stderr


def generated(checkpoint, **settings):
    code, out, err = run(RECORD, checkpoint, json.dumps(settings))
    assert code == 0, err
    tokens, text = json.loads(out)
    return tokens, text, err


def test_without_the_package_the_architecture_is_unknown(checkpoint):
    code, _, err = run(RECORD, checkpoint, "{}")
    assert code
    assert "ExampleForCausalLM" in err


def test_all_lines_work_in_a_server_with_two_workers(checkpoint, with_example, monkeypatch):
    tokens, text, _ = generated(checkpoint)
    flags = ["--dtype", "float32", "--cpu-threads", "1", "-tp", "2", "--device", "example"]
    monkeypatch.setenv("PAGEMILL_LOG_STATS_INTERVAL", "0.2")
    with running_server(str(checkpoint), *flags, "--attention-backend", "EXAMPLE_ATTN") as server:
        assert httpx.get(f"{server.url}/example").json() == {"from": "pagemill_example"}
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
        wait_for(lambda: "24 tokens were generated" in "".join(server.lines))
    assert answer["choices"][0]["text"] == text
    assert len(tokens) == 24
    assert all(token % 4 == 0 for token in tokens)  # the logits processor: even; the step extension: no others
    log = "".join(server.lines)
    assert log.count(BACKEND_USED) == 2  # in each worker
    assert log.count("1 of 1 rows were changed") == 24  # one of the workers answers to the engine, at every step
    assert log.count("plug-in example (pagemill_example:register) loaded") == 4  # in each process of the server
    assert log.count("plug-in broken (pagemill_example.absent:register) skipped: ModuleNotFoundError") == 4


def test_none_are_loaded_for_an_empty_list(checkpoint, with_example, monkeypatch):
    monkeypatch.setenv("PAGEMILL_PLUGINS", "")
    code, _, err = run(RECORD, checkpoint, "{}")
    assert code
    assert "plug-in" not in err


def test_the_references_plugins_are_called_when_they_are_named(checkpoint, with_example, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "example,reference_example,nobody")
    tokens, _, err = generated(checkpoint)
    assert len(tokens) == 24
    assert err.count("the reference's example was called") == 1
    assert "plug-in nobody is not installed" in err
    assert "broken" not in err


def test_a_platform_is_chosen_by_its_name_only(checkpoint, with_example):
    _, _, err = generated(checkpoint)
    assert BACKEND_USED not in err
    _, _, err = generated(checkpoint, device="example")
    assert BACKEND_USED in err


def test_an_unknown_device_lists_the_known_ones(checkpoint, with_example):
    code, _, err = run(RECORD, checkpoint, json.dumps({"device": "tpu"}))
    assert code
    assert "unknown platform 'tpu'; known: cpu, cuda, example" in err
