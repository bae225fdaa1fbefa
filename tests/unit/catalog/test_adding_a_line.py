"""Seams that no example package of tests/plugins has a line for: a toy implementation, added by one line, is used."""

import argparse
import dataclasses
from dataclasses import dataclass

import pytest

from pagemill.artifacts.describe import describe
from pagemill.catalog.executors import EXECUTORS
from pagemill.catalog.weights import WEIGHTS
from pagemill.config.arguments import EngineArgs, add_flags, make_section
from pagemill.config.decisions import Decisions
from pagemill.config.fields import setting
from pagemill.config.rules.parallel import resolve_parallel
from pagemill.engine.executor.factory import make_executor
from pagemill.errors import ConfigError
from pagemill.model.factory import load_model
from pagemill.model.loading.sources import safetensors
from pagemill.platforms.cpu import CpuPlatform
from pagemill.utils.timing import PhaseTimer
from tests.fakes.configs import model_config
from tests.fakes.engine_setup import engine_config
from tests.fakes.tiny_checkpoint import make_checkpoint


class ToyExecutor:
    """Keeps what it was built with."""

    def __init__(self, spec):
        self.spec = spec

    @classmethod
    def build(cls, spec):
        return cls(spec)


def test_an_executor_is_a_class_and_a_line():
    config = engine_config()
    asked = EngineArgs(distributed_executor_backend="toy").settings.parallel
    with pytest.raises(ConfigError, match="unknown executor 'toy'; known: mp, ray, uni"):
        resolve_parallel(asked, config.facts, Decisions())
    EXECUTORS.add("toy", f"{__name__}:ToyExecutor")
    try:
        parallel = resolve_parallel(asked, config.facts, Decisions())
        made = make_executor(dataclasses.replace(config, parallel=parallel), "a.module:Worker")
    finally:
        EXECUTORS.remove("toy")
    assert isinstance(made, ToyExecutor)
    assert made.spec.worker == "a.module:Worker"


READ = []


def toy_tensors(facts, dtype, seed, select, *, device):
    """The tensors of a format that looks much like another one."""
    for name, tensor in safetensors.iterate(facts, dtype, seed, select, device=device):
        READ.append(name)
        yield name, tensor


def test_a_weight_format_is_a_function_and_a_line(tmp_path):
    folder = make_checkpoint(tmp_path, "LlamaForCausalLM")
    facts = dataclasses.replace(describe("m", folder), weights_format="toy")
    WEIGHTS.add("toy", f"{__name__}:toy_tensors")
    try:
        model = load_model(facts, model_config(str(folder)), CpuPlatform(), PhaseTimer())
    finally:
        WEIGHTS.remove("toy")
    assert model.cache_layers()
    assert "model.embed_tokens.weight" in READ


@dataclass(frozen=True)
class ToySettings:
    """A section."""

    tau: float | None = setting(None, "a number (default: the model's)", low=0)


def test_a_setting_is_a_field():
    parser = argparse.ArgumentParser()
    add_flags(parser, [ToySettings])
    assert make_section(ToySettings, vars(parser.parse_args(["--tau", "0.5"]))).tau == 0.5
    assert "a number (default: the model's)" in parser.format_help()
    with pytest.raises(ConfigError, match=r"tau=-1.0 is too small: at least 0"):
        make_section(ToySettings, {"tau": -1.0})
