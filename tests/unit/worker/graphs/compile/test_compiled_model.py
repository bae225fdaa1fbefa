"""A real model, traced, cut and compiled: as many pieces as layers and one, and the same results."""

import errno
import os

import pytest
import torch

from pagemill.config.graph_config import ATTENTION_OP
from pagemill.config.graph_mode import GraphMode
from pagemill.errors import ConfigError
from pagemill.worker.graphs.compile.compiled_model import CompiledModel
from pagemill.worker.graphs.pieces import GapBuffers
from pagemill.worker.graphs.wrapper import GraphWrapper
from tests.fakes.configs import compilation_config
from tests.fakes.fake_graphs import FakeGraphMaker
from tests.fakes.padded_model import MAX_TOKENS, PaddedModel, ignore_padding
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.marks import slow

TOKENS = list(range(5, 45))
COUNTS = [1, 9, 7, 8, 1, 8, 6]
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    names = ("LlamaForCausalLM", "Gemma3ForCausalLM")
    return {name: make_checkpoint(tmp_path_factory.mktemp(name), name) for name in names}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    # Restored after the test, whatever the code under test sets it to.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "unused"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def config(tmp_path, **settings):
    defaults = {"mode": 3, "backend": "eager", "splitting_ops": (ATTENTION_OP,), "cache_dir": str(tmp_path / "cache")}
    return compilation_config(**(defaults | settings))


def compiled(settings, wrap_piece=lambda piece: piece, gaps=None):
    return lambda model: CompiledModel(
        model, model.cache_layers(), settings, wrap_piece, gaps or GapBuffers(MAX_TOKENS)
    )


def eager_logits(checkpoint, monkeypatch, padded=MAX_TOKENS):
    model = PaddedModel(checkpoint, lambda model: model)
    ignore_padding(model.model, monkeypatch)
    return model.logits(TOKENS, COUNTS, GraphMode.NONE, padded)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("LlamaForCausalLM", slow("Gemma3ForCausalLM")))
def test_one_piece_more_than_layers_and_the_same_logits(checkpoints, monkeypatch, tmp_path, name):
    model = PaddedModel(checkpoints[name], compiled(config(tmp_path)))
    ignore_padding(model.model, monkeypatch)
    got = model.logits(TOKENS, COUNTS, GraphMode.NONE, MAX_TOKENS)
    assert (model.run.backend.num_compiled, model.run.backend.num_cuts) == (NUM_LAYERS + 1, NUM_LAYERS)
    assert torch.allclose(got, eager_logits(checkpoints[name], monkeypatch), atol=1e-4)


@pytest.mark.slow
def test_it_is_traced_once_for_any_number_of_tokens(checkpoints, monkeypatch, tmp_path):
    model = PaddedModel(checkpoints["LlamaForCausalLM"], compiled(config(tmp_path)))
    ignore_padding(model.model, monkeypatch)
    want = eager_logits(checkpoints["LlamaForCausalLM"], monkeypatch)
    for padded in (9, 16, 32):
        assert torch.allclose(model.logits(TOKENS, COUNTS, GraphMode.NONE, padded), want, atol=1e-4)
    one_by_one = model.logits(TOKENS, [1] * len(TOKENS), GraphMode.NONE, 1)
    assert torch.allclose(one_by_one, want, atol=1e-4)
    assert model.run.backend.num_compiled == NUM_LAYERS + 1


class Compiled:
    """A compiled model where a model is wanted."""

    def __init__(self, model, settings):
        self.run = CompiledModel(model, model.cache_layers(), settings, lambda piece: piece, GapBuffers(MAX_TOKENS))
        self.compute_logits = model.compute_logits

    def __call__(self, inputs, positions):
        return self.run(inputs, positions)


@pytest.mark.slow
def test_weights_packed_for_a_cpu_are_compiled_too(checkpoints, tmp_path):
    """bfloat16 on a CPU: linear layers and the embedding are native kernels, which are operations here."""
    paged = PagedModel.load(checkpoints["LlamaForCausalLM"], "bfloat16")
    want = paged.logits(TOKENS, chunk=10)
    paged.model = Compiled(paged.model, config(tmp_path))
    got = paged.logits(TOKENS, chunk=10)
    assert paged.model.run.backend.num_cuts == NUM_LAYERS
    assert (got - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.slow
def test_a_first_step_of_one_token_does_not_compile(checkpoints, monkeypatch, tmp_path):
    model = PaddedModel(checkpoints["LlamaForCausalLM"], compiled(config(tmp_path)))
    ignore_padding(model.model, monkeypatch)
    model.logits([7], [1], GraphMode.NONE, 1)
    assert model.run.backend.num_compiled == 0
    model.logits([7, 8], [2], GraphMode.NONE, 2)
    assert model.run.backend.num_compiled == NUM_LAYERS + 1


@pytest.mark.slow
def test_compiled_pieces_are_captured_and_replayed(checkpoints, monkeypatch, tmp_path):
    maker, gaps = FakeGraphMaker(), GapBuffers(MAX_TOKENS)

    def wrap(piece):
        return GraphWrapper(piece, GraphMode.PIECEWISE, maker, check_addresses=True)

    model = PaddedModel(checkpoints["LlamaForCausalLM"], compiled(config(tmp_path), wrap, gaps))
    ignore_padding(model.model, monkeypatch)
    want = model.logits(TOKENS, COUNTS, GraphMode.NONE, 16)
    assert not maker.graphs
    assert torch.equal(model.logits(TOKENS, COUNTS, GraphMode.PIECEWISE, 16), want)
    assert len(maker.graphs) == NUM_LAYERS + 1
    assert maker.num_replays == len(COUNTS) * (NUM_LAYERS + 1)


@pytest.mark.slow
def test_without_splitting_operations_there_is_one_piece(checkpoints, monkeypatch, tmp_path):
    model = PaddedModel(checkpoints["LlamaForCausalLM"], compiled(config(tmp_path, splitting_ops=())))
    ignore_padding(model.model, monkeypatch)
    got = model.logits(TOKENS, COUNTS, GraphMode.NONE, MAX_TOKENS)
    assert (model.run.backend.num_compiled, model.run.backend.num_cuts) == (1, 0)
    assert torch.allclose(got, eager_logits(checkpoints["LlamaForCausalLM"], monkeypatch), atol=1e-4)


@pytest.mark.slow
def test_graphs_are_written_to_the_folder_for_debugging(checkpoints, monkeypatch, tmp_path):
    settings = config(tmp_path, debug_dump_path=str(tmp_path / "dump"))
    model = PaddedModel(checkpoints["LlamaForCausalLM"], compiled(settings))
    ignore_padding(model.model, monkeypatch)
    model.logits(TOKENS, [40], GraphMode.NONE, 40)
    files = {file.name: file.read_text() for file in (tmp_path / "dump" / "rank_0").iterdir()}
    cuts = [name for name in files if name.endswith("_cut.py")]
    assert len(cuts) == NUM_LAYERS and len(files) == 2 + 2 * NUM_LAYERS + 1
    assert files["model.py"].count("pagemill.attention") == NUM_LAYERS
    assert all("pagemill.attention" in files[name] for name in cuts)


@pytest.mark.slow
def test_an_error_of_the_compiler_names_the_piece(checkpoints, monkeypatch, tmp_path):
    model = PaddedModel(checkpoints["LlamaForCausalLM"], compiled(config(tmp_path)))
    ignore_padding(model.model, monkeypatch)

    def broken(graph, inputs):
        raise ValueError("cannot")

    monkeypatch.setattr(model.run.backend, "_compiler", broken)
    with pytest.raises(ConfigError, match=r"mode=3 cannot compile this model here .*; use mode 0") as caught:
        model.logits(TOKENS, [40], GraphMode.NONE, 40)
    chain, error = [], caught.value
    while error is not None:
        chain, error = [*chain, error], error.__cause__ or error.__context__
    assert any("submod_0" in note for error in chain for note in getattr(error, "__notes__", []))


@pytest.mark.slow
def test_what_cannot_be_traced_is_one_clear_error(checkpoints, monkeypatch, tmp_path):
    model = PaddedModel(checkpoints["LlamaForCausalLM"], compiled(config(tmp_path)))
    ignore_padding(model.model, monkeypatch)
    monkeypatch.setattr(model.model._program, "run", lambda hidden, *_: torch._dynamo.graph_break() or hidden)
    with pytest.raises(ConfigError, match="mode=3 cannot compile this model here"):
        model.logits(TOKENS, [40], GraphMode.NONE, 40)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_inductor_compiles_once_and_the_next_start_takes_it_from_the_folder(checkpoints, monkeypatch, tmp_path):
    want = eager_logits(checkpoints["LlamaForCausalLM"], monkeypatch)
    hits = []
    for _ in range(2):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = PaddedModel(checkpoints["LlamaForCausalLM"], compiled(config(tmp_path, backend="inductor")))
        ignore_padding(model.model, monkeypatch)
        got = model.logits(TOKENS, COUNTS, GraphMode.NONE, MAX_TOKENS)
        assert torch.allclose(got, want, atol=1e-4)
        assert model.run.backend.num_compiled == NUM_LAYERS + 1
        hits.append(sum(v for k, v in torch._dynamo.utils.counters["inductor"].items() if "cache_hit" in k))
    assert any((tmp_path / "cache").iterdir())
    assert hits[1] > hits[0]


def test_a_cache_folder_that_cannot_be_made_is_named(checkpoints, tmp_path):
    (tmp_path / "file").touch()
    model = PaddedModel(checkpoints["LlamaForCausalLM"], compiled(config(tmp_path, cache_dir=str(tmp_path / "file/x"))))
    with pytest.raises(ConfigError, match=r"compiled code cannot be kept in .*/file/x: Not a directory; make room"):
        model.logits(TOKENS, COUNTS, GraphMode.NONE, MAX_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_disk_that_is_full_while_code_is_compiled_is_one_clear_error(checkpoints, monkeypatch, tmp_path, wrapped):
    model = PaddedModel(checkpoints["LlamaForCausalLM"], compiled(config(tmp_path)))
    ignore_padding(model.model, monkeypatch)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if wrapped:  # by the compiler
        monkeypatch.setattr(model.run.backend, "_compiler", full)
    else:
        monkeypatch.setattr(model.run, "_run", full)
    with pytest.raises(ConfigError, match=r"compiled code cannot be kept in .*: No space left on device; make room"):
        model.logits(TOKENS, [40], GraphMode.NONE, 40)
