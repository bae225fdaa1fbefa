"""From settings and a model to the graphs of a runner."""

import dataclasses
import logging
import math

import pytest

from pagemill.config.graph_config import ATTENTION_OP
from pagemill.config.graph_mode import GraphMode
from pagemill.errors import ConfigError
from pagemill.model.attention.backends.flash_attn import _with_provider
from pagemill.model.attention.backends.torch_cpu import TorchCpuBackend
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.layer import Attention
from pagemill.model.attention.phased import phased
from pagemill.model.attention.state_layer import StateLayer
from pagemill.worker.graphs.compile.compiled_model import CompiledModel
from pagemill.worker.graphs.dispatcher import BatchLimits
from pagemill.worker.graphs.factory import graph_supports, make_graphs, small_step, uncut
from pagemill.worker.graphs.graph_runner import GraphRunner, NoGraphs
from pagemill.worker.graphs.pieces import PieceWrapper
from tests.fakes.configs import graph_config
from tests.fakes.fake_graphs import FakeGraphMaker

LIMITS = BatchLimits(8)
ONE = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def layers(support=AttentionCGSupport.ALWAYS, states=0, most=None):
    class Builder(TorchCpuBackend.metadata_builder):
        graph_support = support
        most_replayed = most

    class Backend(TorchCpuBackend):
        name = "TEST_ATTN"
        metadata_builder = Builder

    spec = AttentionLayerSpec(4, 2, 16, 0.25)
    found = {
        f"layers.{index}.attn": Attention(spec, name=f"layers.{index}.attn", backend=Backend) for index in range(2)
    }
    return found | {
        f"states.{index}": StateLayer([(4,)], ["float32"], name=f"states.{index}") for index in range(states)
    }


def config(graph_mode="FULL_AND_PIECEWISE", **settings):
    defaults = {
        "mode": 0,
        "cudagraph_mode": GraphMode[graph_mode],
        "cudagraph_capture_sizes": (1, 2, 4),
        "splitting_ops": (ATTENTION_OP,),
    }
    return graph_config(**(defaults | settings))


@pytest.mark.parametrize("asked", [False, True])
def test_figures_are_logged_where_cudagraph_metrics_asks_for_them(asked):
    settings = dataclasses.replace(config(), cudagraph_metrics=asked)
    graphs = make_graphs(settings, layers(), LIMITS, FakeGraphMaker())
    assert math.isfinite(graphs._next_report) is asked


def test_settings_reach_the_dispatcher_and_the_schedule():
    settings = config(cudagraph_lazy_capture=False, cudagraph_num_of_warmups=3)
    graphs = make_graphs(settings, layers(), LIMITS, FakeGraphMaker())
    assert isinstance(graphs, GraphRunner)
    assert graphs.dispatcher.mode is GraphMode.FULL_AND_PIECEWISE
    assert len(graphs.schedule.at_start()) == len(graphs.dispatcher.graph_keys()) and graphs.max_num_tokens == 4
    assert graphs.num_warm_ups == 3


@pytest.mark.parametrize("mode, maker", (("NONE", FakeGraphMaker()), ("FULL", None)))
def test_without_graphs(mode, maker):
    assert isinstance(make_graphs(config(mode), layers(), LIMITS, maker), NoGraphs)


def test_a_mode_is_lowered_to_what_the_model_can_and_the_log_says_why(caplog):
    with caplog.at_level(logging.WARNING, logger="pagemill"):
        graphs = make_graphs(config("FULL"), layers(ONE), LIMITS, FakeGraphMaker())
    assert graphs.dispatcher.mode is GraphMode.FULL_AND_PIECEWISE
    assert "FULL becomes FULL_AND_PIECEWISE: TEST_ATTN supports full graphs for batches of one token" in caplog.text


def test_attention_that_can_always_be_captured_makes_small_mixed_steps_whole():
    for support, mode in ((AttentionCGSupport.ALWAYS, GraphMode.FULL), (ONE, GraphMode.PIECEWISE)):
        graphs = make_graphs(config(), layers(support), LIMITS, FakeGraphMaker())
        assert graphs.choose(3, 2, False)[1].num_requests == (None if mode is GraphMode.PIECEWISE else 4)
        assert bool(graphs.mixed_keys) == (mode is GraphMode.FULL)


@pytest.mark.parametrize("version, expected", ((2, GraphMode.FULL_AND_PIECEWISE), (3, GraphMode.FULL)))
def test_support_may_depend_on_who_provides_a_backend(version, expected):
    class Provider:
        name = "test"

    Provider.version = version
    spec = AttentionLayerSpec(4, 2, 16, 0.25)
    layer = Attention(spec, name="attn", backend=_with_provider(Provider, (9, 0)))
    both = Attention(spec, name="both", backend=phased(layer.backend, layer.backend))
    for found in (layer, both):
        graphs = make_graphs(config("FULL"), {found.name: found}, LIMITS, FakeGraphMaker())
        assert graphs.dispatcher.mode is expected


def test_a_backend_may_want_only_smaller_steps_whole():
    assert small_step(layers(states=1)) == 512
    assert small_step(layers(most=2)) == 2
    graphs = make_graphs(config(), layers(most=2), LIMITS, FakeGraphMaker())
    assert {key.num_tokens for key in graphs.mixed_keys} == {2}
    assert graphs.choose(3, 2, False)[1].num_requests is None


def test_nothing_left_of_a_mode_means_no_graphs():
    graphs = make_graphs(config("FULL", splitting_ops=()), layers(AttentionCGSupport.NEVER), LIMITS, FakeGraphMaker())
    assert isinstance(graphs, NoGraphs)


def test_layers_with_states_are_neither_captured_nor_cut():
    mixed = layers(states=1)
    assert graph_supports(mixed) == {"TEST_ATTN": AttentionCGSupport.ALWAYS, "StateLayer": AttentionCGSupport.NEVER}
    assert uncut(mixed) == ["states.0"] and uncut(layers()) == []
    assert isinstance(make_graphs(config(), mixed, LIMITS, FakeGraphMaker()), NoGraphs)


def test_layers_with_states_cannot_be_compiled():
    with pytest.raises(ConfigError, match=r"mode=3 cannot compile layers such as states\.0"):
        make_graphs(config(mode=3), layers(states=1), LIMITS, FakeGraphMaker())


def test_a_model_is_cut_by_the_compiler_or_while_it_is_captured(tmp_path):
    def model(inputs, positions):
        return inputs

    graphs = make_graphs(config(), layers(), LIMITS, FakeGraphMaker())
    assert isinstance(graphs.wrap_model(model), PieceWrapper)
    for maker in (FakeGraphMaker(), None):
        graphs = make_graphs(config(mode=3, backend="eager", cache_dir=str(tmp_path)), layers(), LIMITS, maker)
        assert isinstance(graphs.wrap_model(model), CompiledModel)


@pytest.mark.parametrize("level, checks", (("DEBUG", True), ("INFO", False)))
def test_addresses_are_checked_in_debugging(level, checks, monkeypatch):
    monkeypatch.setenv("PAGEMILL_LOGGING_LEVEL", level)
    graphs = make_graphs(config(), layers(), LIMITS, FakeGraphMaker())
    assert graphs.wrap_step(len)._check is checks
