"""Every flag and every argument of LLM has an effect, is refused by name, or is listed as one that cannot matter."""

import argparse
import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill.cli.engine_flags import add_engine_flags, given_settings
from pagemill.cli.main import main
from pagemill.config.arguments import ENGINE_SECTIONS, EngineArgs, make_section
from pagemill.config.decisions import Decision
from pagemill.config.fleet_config import FleetConfig
from pagemill.config.graph_mode import GraphMode
from pagemill.config.no_effect import IDLE, CompatConfig, Place, idle_settings
from pagemill.config.pooler_config import PoolerConfig
from pagemill.config.refused_settings import REFUSED_SETTINGS, refusal_of
from pagemill.config.sections import AttentionConfig
from pagemill.config.server_config import ServerConfig
from pagemill.errors import ConfigError
from pagemill.model.factory import attention_chooser
from pagemill.observability.start_table import start_table
from pagemill.platforms.cpu import CpuPlatform
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.client.inproc import InprocClient
from tests.fakes.configs import cache_config, compilation_config, model_config, scheduler_config
from tests.fakes.engine import FACTS
from tests.fakes.fake_core import FakeCore
from tests.fakes.fake_tokenizer import ByteTokenizer

ROOT = Path(__file__).resolve().parents[3]
SECTIONS = (*ENGINE_SECTIONS.values(), ServerConfig, FleetConfig)


def names_of(section: Any) -> Iterator[str]:
    """Of its settings, and of those inside them."""
    for field in dataclasses.fields(section):
        yield field.name
        if dataclasses.is_dataclass(field.default):
            yield from names_of(type(field.default))


WORKING = sorted({name for section in SECTIONS for name in names_of(section)})
IDLE_NAMES = sorted(field.name for field in dataclasses.fields(CompatConfig))


@pytest.fixture(scope="module")
def attributes_read() -> set[str]:
    """The settings that some module of the package reads as an attribute."""
    left = set(WORKING)
    texts = [path.read_text() for path in (ROOT / "pagemill").rglob("*.py")]
    words = {text: left.intersection(re.findall(r"\.(\w+)", text)) for text in texts}
    for text in sorted(texts, key=lambda text: len(words[text]), reverse=True):  # those first that may read most
        if words[text] & left:
            nodes = ast.walk(ast.parse(text))
            left -= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    return set(WORKING) - left


@pytest.fixture(scope="module")
def words_of_tests() -> set[str]:
    """Every name, and every flag as the name of its keyword, that some test uses."""
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    return set(re.findall(r"\w+", text)) | {flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", text)}


@pytest.mark.parametrize("name", WORKING)
def test_a_setting_is_read_and_tested(name: str, attributes_read: set[str], words_of_tests: set[str]) -> None:
    assert name in attributes_read, f"nothing reads {name}: give it an effect, or list it in config/no_effect.py"
    assert name in words_of_tests, f"no test sets {name}"


def test_the_three_classes_are_apart() -> None:
    classes = [set(WORKING), set(IDLE_NAMES), set(REFUSED_SETTINGS)]
    assert len(set.union(*classes)) == sum(map(len, classes))
    assert {name for idle in IDLE for name in idle.names} <= set(WORKING)


@pytest.mark.parametrize("name", sorted(REFUSED_SETTINGS))
def test_a_setting_without_counterpart_is_refused_with_what_to_do_instead(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not supported") as caught:
        EngineArgs(**{name: "anything"})
    assert str(caught.value).endswith(REFUSED_SETTINGS[name])
    flag = f"--{name.replace('_', '-')}"
    assert refusal_of(flag) == refusal_of(f"{flag}=x") == f"{flag} is not supported: {REFUSED_SETTINGS[name]}"


def test_the_command_line_says_so_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "smollm2", "--max-loras", "5", "--no-enable-lora"]) == 2
    assert "--max-loras is not supported: adapters are not loaded yet" in capsys.readouterr().err
    assert main(["serve", "smollm2", "--no-enable-lora"]) == 2
    assert "--no-enable-lora is not supported" in capsys.readouterr().err
    assert main(["serve", "smollm2", "--nobody-knows"]) == 2
    assert "unrecognized arguments: --nobody-knows" in capsys.readouterr().err
    with pytest.raises(TypeError, match="nobody_knows"):
        EngineArgs(nobody_knows=1)


def test_a_refused_setting_with_the_default_of_vllm_asks_for_nothing() -> None:
    given = {"enable_lora": False, "stream_interval": 1, "trust_remote_code": None, "swa_bounded_replay": True}
    assert EngineArgs("m", **given).given == {"model"}
    for name, value in {"enable_lora": 0, "stream_interval": True, "swa_bounded_replay": False}.items():
        with pytest.raises(ConfigError, match=f"{name} is not supported"):
            EngineArgs("m", **{name: value})
    with pytest.raises(ConfigError, match="trust_remote_code is not supported: code of a repository is never run"):
        EngineArgs("m", trust_remote_code=True)


SAMPLES: dict[str, tuple[Any, list[str]]] = {
    "bool": (True, []), "str": ("x", ["x"]), "int": (1, ["1"]), "float": (1.0, ["1"]), "tuple": (("x",), ["x"]),
    "dict": ({"image": 1}, ['{"image": 1}']),
}  # fmt: skip


@pytest.mark.parametrize("name", IDLE_NAMES)
def test_what_cannot_matter_is_accepted_and_told(name: str) -> None:
    field = next(field for field in dataclasses.fields(CompatConfig) if field.name == name)
    kind = next(kind for kind in SAMPLES if getattr(field.type, "__name__", str(field.type)).startswith(kind))
    value, words = SAMPLES[kind]
    if field.metadata["choices"]:
        value, words = field.metadata["choices"][0], [field.metadata["choices"][0]]
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    given = given_settings(parser.parse_args([f"--{name.replace('_', '-')}", *words]))
    for args in (EngineArgs(**given), EngineArgs(**{name: value})):
        assert name in args.given
        told = idle_settings(args.given, Place("cuda", model_config(), cache_config()))
        assert [setting.name for setting in told] == [name]


HUB = model_config(model="org/name")


@pytest.mark.parametrize(("name", "place", "idle"), [
    ("gpu_memory_utilization", Place("cpu", HUB, cache_config()), True),
    ("gpu_memory_utilization", Place("cuda", HUB, cache_config()), False),
    ("enforce_eager", Place("cpu", HUB, cache_config()), True),
    ("enforce_eager", Place("cuda", HUB, cache_config()), False),
    ("revision", Place("cpu", HUB, cache_config()), False),
    ("revision", Place("cpu", model_config(), cache_config()), True),
    ("tokenizer_revision", Place("cpu", dataclasses.replace(HUB, tokenizer="/"), cache_config()), True),
    ("download_dir", Place("cpu", model_config(tokenizer="org/name"), cache_config()), False),
    ("download_dir", Place("cpu", model_config(), cache_config()), True),
    ("kv_cache_metrics_sample", Place("cpu", HUB, cache_config()), True),
    ("kv_cache_metrics_sample", Place("cpu", HUB, cache_config(kv_cache_metrics=True)), False),
    ("chat_template", Place("cpu", model_config(skip_tokenizer_init=True), cache_config()), True),
])  # fmt: skip
def test_where_settings_cannot_matter(name: str, place: Place, idle: bool) -> None:
    assert [setting.name for setting in idle_settings({name}, place)] == [name] * idle
    assert idle_settings((), place) == []


def test_the_table_shows_what_matters() -> None:
    decisions = [
        Decision("device", "cpu", "the machine's"),
        Decision("block_size", 16, "default"),
        Decision("dtype", "float32", "bfloat16 is slow on this cpu"),
        Decision("runner", "generate", "default"),
        Decision("pooler_config", PoolerConfig(pooling_type="MEAN", normalize=True), "the model's"),
        Decision("compilation_config", compilation_config(), "there are no graphs on a cpu"),
    ]
    idle = idle_settings({"code_revision"}, Place("cpu", HUB, cache_config()))
    lines = start_table(decisions, idle).splitlines()
    assert [line.split()[0] for line in lines] == ["setting", "device", "pooler_config", "dtype", "code_revision"]
    assert "bfloat16 is slow on this cpu" in lines[3]
    assert "MEAN, scaled to length 1" in lines[2]
    assert "no effect" in lines[4]
    graphs = compilation_config(mode=3, cudagraph_mode=GraphMode.FULL, max_cudagraph_capture_size=64)
    assert "mode 3, graphs FULL, up to 64" in start_table([Decision("compilation_config", graphs, "level 3")], [])
    assert start_table([], []) == ""


def test_backends_of_phases_are_asked_for() -> None:
    model = model_config(attention_config=AttentionConfig(prefill_backend="TORCH_CPU", decode_backend="CPU_ATTN"))
    wishes = attention_chooser(model, cache_config(), CpuPlatform()).preferences
    assert (wishes.prefill, wishes.decode) == ("TORCH_CPU", "CPU_ATTN")


async def test_residency_is_measured_where_it_is_asked_for() -> None:
    for asked in (False, True):
        client = InprocClient(FakeCore())
        cache = cache_config(kv_cache_metrics=asked)
        engine = AsyncLLM(client, ByteTokenizer(), FACTS, scheduler_config(), cache=cache)
        assert ("kv_block_lifetime_seconds" in engine.metrics.text().decode()) is asked
        await engine.shutdown()


def test_the_log_of_the_http_server_has_the_level_of_the_setting() -> None:
    assert make_section(ServerConfig, {"uvicorn_log_level": "debug"}).uvicorn_log_level == "debug"
    with pytest.raises(ConfigError, match="uvicorn_log_level"):
        make_section(ServerConfig, {"uvicorn_log_level": "loud"})
