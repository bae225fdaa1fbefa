"""What optimization levels mean, and that they never override what is set."""

from itertools import pairwise

import pytest

from pagemill.config.arguments import make_section
from pagemill.config.capture_sizes import capture_sizes, default_largest
from pagemill.config.compilation import GraphLimits, complete
from pagemill.config.graph_config import ATTENTION_OP, CompilationSettings, GraphSettings, PassConfig
from pagemill.errors import ConfigError

LEVELS = {0: (0, "NONE"), 1: (0, "PIECEWISE"), 2: (0, "FULL_AND_PIECEWISE"), 3: (3, "FULL_AND_PIECEWISE")}


def gpu(**changes):
    return GraphLimits(**({"max_num_seqs": 16, "token_budget": 2048, "device": "cuda", "captures": True} | changes))


def cpu():
    return gpu(device="cpu", captures=False)


def graphs(level=2, *, enforce_eager=False, **compilation):
    return GraphSettings(level, enforce_eager, compilation_config=CompilationSettings(**compilation))


@pytest.mark.parametrize("level", LEVELS)
def test_levels(level):
    done = complete(graphs(level), gpu())
    assert (done.mode, done.cudagraph_mode) == LEVELS[level]
    assert done.splitting_ops == (ATTENTION_OP,)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "given",
    (
        {"mode": 0},
        {"mode": 3},
        {"cudagraph_mode": "NONE"},
        {"cudagraph_mode": "FULL"},
        {"cudagraph_mode": "FULL_DECODE_ONLY"},
        {"cudagraph_capture_sizes": (3, 5)},
        {"max_cudagraph_capture_size": 7},
        {"mode": 3, "splitting_ops": ("a::b",), "backend": "eager"},
        {"cudagraph_lazy_capture": False, "cudagraph_num_of_warmups": 4},
    ),
)
def test_a_level_never_overrides_what_is_set(level, given):
    done = complete(graphs(level, **given), gpu())
    assert {name: getattr(done, name) for name in given} == given
    for name, default in zip(("mode", "cudagraph_mode"), LEVELS[level], strict=True):
        assert getattr(done, name) == given.get(name, default)


def test_completing_twice_changes_nothing():
    done = complete(graphs(), gpu())
    assert complete(GraphSettings(compilation_config=done), gpu()) == done


def test_there_is_no_level_beyond():
    with pytest.raises(ConfigError, match="optimization_level=4 is not one of 0, 1, 2, 3"):
        complete(graphs(4), gpu())


def test_eager_turns_everything_off():
    done = complete(graphs(3, enforce_eager=True), gpu())
    assert (done.mode, done.cudagraph_mode, done.cudagraph_capture_sizes) == (0, "NONE", ())


@pytest.mark.parametrize("given", ({"cudagraph_mode": "PIECEWISE"}, {"mode": 3}))
def test_eager_and_the_opposite_contradict_each_other(given):
    with pytest.raises(ConfigError, match=r"enforce_eager=True and compilation_config\.\w*mode=.* contradict"):
        complete(graphs(enforce_eager=True, **given), gpu())


def test_eager_may_be_said_twice():
    assert complete(graphs(enforce_eager=True, cudagraph_mode="NONE", mode=0), gpu()).cudagraph_mode == "NONE"


@pytest.mark.parametrize("level", LEVELS)
def test_a_cpu_has_no_graphs_and_compiles_only_when_told_to(level):
    done = complete(graphs(level), cpu())
    assert (done.mode, done.cudagraph_mode, done.cudagraph_capture_sizes) == (0, "NONE", ())
    assert complete(graphs(level, mode=3), cpu()).mode == 3


def test_graphs_that_are_asked_for_on_a_cpu_are_an_error():
    with pytest.raises(ConfigError, match="cudagraph_mode='FULL' needs a GPU, and the device is cpu"):
        complete(graphs(cudagraph_mode="FULL"), cpu())


def test_an_unknown_mode_of_compilation():
    with pytest.raises(ConfigError, match=r"mode=1 is not one of 0 \(no compilation\), 3 \(piecewise"):
        complete(graphs(mode=1), gpu())


def test_fusing_attention_turns_splitting_off_and_graphs_to_full():
    fused = complete(graphs(mode=3, pass_config=PassConfig(True)), gpu())
    assert fused.splitting_ops == () and not fused.is_cut and fused.cudagraph_mode == "FULL"
    explicit = complete(graphs(mode=3, pass_config=PassConfig(True), cudagraph_mode="FULL_DECODE_ONLY"), gpu())
    assert explicit.cudagraph_mode == "FULL_DECODE_ONLY"


def test_fusing_attention_needs_the_compiler():
    with pytest.raises(ConfigError, match="fuse_attn=True needs mode=3, and mode is 0"):
        complete(graphs(pass_config=PassConfig(True)), gpu())


def test_fusing_and_splitting_contradict_each_other():
    with pytest.raises(ConfigError, match=r"fuse_attn=True and splitting_ops=\['a::b'\] contradict"):
        complete(graphs(mode=3, pass_config=PassConfig(True), splitting_ops=("a::b",)), gpu())


def test_other_cuts_need_the_compiler():
    with pytest.raises(ConfigError, match=r"splitting_ops=\['a::b'\] needs mode=3"):
        complete(graphs(splitting_ops=("a::b",)), gpu())


def test_default_sizes_follow_the_requests():
    done = complete(graphs(), gpu())
    assert done.cudagraph_capture_sizes == (1, 2, 4, 8, 16, 24, 32) and done.max_cudagraph_capture_size == 32


def test_the_largest_size_may_be_set_either_way():
    short = GraphSettings(max_cudagraph_capture_size=10)
    assert complete(short, gpu()).cudagraph_capture_sizes == (1, 2, 4, 8, 10)
    assert complete(graphs(max_cudagraph_capture_size=10), gpu()) == complete(short, gpu())
    assert complete(graphs(max_cudagraph_capture_size=9999), gpu(token_budget=20)).cudagraph_capture_sizes[-1] == 20


def test_sizes_may_be_set_either_way_in_any_order():
    short = GraphSettings(cudagraph_capture_sizes=(8, 1, 8, 3))
    assert complete(short, gpu()).cudagraph_capture_sizes == (1, 3, 8)
    assert complete(graphs(cudagraph_capture_sizes=(1, 3, 8)), gpu()) == complete(short, gpu())


def test_two_ways_that_differ_contradict_each_other():
    both = GraphSettings(
        cudagraph_capture_sizes=(1, 2), compilation_config=CompilationSettings(cudagraph_capture_sizes=(1, 4))
    )
    with pytest.raises(ConfigError, match=r"cudagraph_capture_sizes=\(1, 2\) and compilation_config.*=\(1, 4\)"):
        complete(both, gpu())


@pytest.mark.parametrize("sizes", ((), (0, 1), (-1,)))
def test_sizes_that_are_none(sizes):
    with pytest.raises(ConfigError, match=r"each at least 1; for no graphs use cudagraph_mode NONE"):
        complete(graphs(cudagraph_capture_sizes=sizes), gpu())


def test_sizes_that_are_too_large():
    with pytest.raises(ConfigError, match="4096 is more than max_num_batched_tokens=2048"):
        complete(graphs(cudagraph_capture_sizes=(1, 4096)), gpu())
    with pytest.raises(ConfigError, match="16 is more than max_cudagraph_capture_size=8"):
        complete(graphs(cudagraph_capture_sizes=(1, 16), max_cudagraph_capture_size=8), gpu())


@pytest.mark.parametrize("largest", (1, 2, 3, 7, 8, 9, 255, 256, 257, 511, 512, 513, 1024, 5000))
def test_sizes_ascend_to_the_largest(largest):
    sizes = capture_sizes(largest)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == largest
    padding = [(after - before - 1) / after for before, after in pairwise(sizes)]
    assert max(padding, default=0) < 0.5


@pytest.mark.parametrize(
    "seqs, budget, query_len, expected",
    (
        (1, 2048, 1, 2),
        (128, 2048, 1, 256),
        (256, 8192, 1, 512),
        (1024, 8192, 1, 1024),
        (256, 64, 1, 64),
        (64, 2048, 4, 256),
    ),
)
def test_the_largest_by_default(seqs, budget, query_len, expected):
    assert default_largest(seqs, budget, query_len) == expected


@pytest.mark.parametrize("mode", ("full_and_piecewise", "FULL_AND_PIECEWISE", "Full_And_Piecewise"))
def test_modes_in_any_case(mode):
    config = make_section(GraphSettings, {"compilation_config": {"cudagraph_mode": mode}})
    assert config.compilation_config.cudagraph_mode == "FULL_AND_PIECEWISE"


def test_an_unknown_graph_mode_names_what_is_known():
    with pytest.raises(ConfigError) as caught:
        make_section(GraphSettings, {"compilation_config": {"cudagraph_mode": "half"}})
    assert str(caught.value) == (
        "compilation_config: cudagraph_mode='half' is not one of NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, "
        "FULL_AND_PIECEWISE"
    )


@pytest.mark.parametrize(
    "given, message",
    (
        ({"cudagraph_mod": "FULL"}, "unknown field 'cudagraph_mod'; known: mode, backend"),
        ({"mode": "three"}, "mode='three' is not of type int"),
        ({"cudagraph_capture_sizes": [1, "2"]}, "cudagraph_capture_sizes: '2' is not of type int"),
        ({"cudagraph_capture_sizes": 4}, "cudagraph_capture_sizes=4 is not of type tuple"),
        ({"cudagraph_num_of_warmups": -1}, "cudagraph_num_of_warmups=-1 is too small: at least 0"),
        ({"pass_config": {"fuse": True}}, "pass_config: unknown field 'fuse'"),
        ({"backend": "tvm"}, "backend='tvm' is not one of inductor, eager"),
    ),
)
def test_errors_name_the_field_the_value_and_what_is_allowed(given, message):
    with pytest.raises(ConfigError) as caught:
        make_section(GraphSettings, {"compilation_config": given})
    assert str(caught.value).startswith("compilation_config: ") and message in str(caught.value)
