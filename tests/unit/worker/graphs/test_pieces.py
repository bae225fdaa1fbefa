"""A real model cut at attention while it is captured, on fake graphs: as good as without."""

import pytest
import torch

from pagemill.config.graph_mode import GraphMode
from pagemill.errors import PagemillError
from pagemill.model.forward_context import BatchDescriptor, ForwardContext, current_gap, forward_context
from pagemill.worker.graphs.pieces import GapBuffers, PieceWrapper
from pagemill.worker.graphs.wrapper import GraphWrapper
from tests.fakes.fake_graphs import FakeGraphMaker
from tests.fakes.padded_model import MAX_TOKENS, PaddedModel, ignore_padding
from tests.fakes.tiny_checkpoint import make_checkpoint

TOKENS = list(range(5, 45))
COUNTS = [9, 7, 8, 1, 8, 7]
PADDED, NUM_LAYERS = 16, 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "Gemma3ForCausalLM")


def test_replayed_pieces_equal_the_model(checkpoint, monkeypatch):
    maker, gaps = FakeGraphMaker(), GapBuffers(MAX_TOKENS)
    padded = PaddedModel(checkpoint, lambda model: PieceWrapper(model, maker, gaps, check_addresses=True))
    ignore_padding(padded.model, monkeypatch)
    eager = padded.logits(TOKENS, COUNTS, GraphMode.NONE, PADDED)
    assert not maker.graphs
    pieces = padded.logits(TOKENS, COUNTS, GraphMode.PIECEWISE, PADDED)
    assert torch.equal(pieces, eager)
    key = BatchDescriptor(PADDED, None)
    assert padded.run.captured() == (key,) and len(padded.run._recordings[key].pieces) == NUM_LAYERS + 1
    assert maker.num_replays == len(COUNTS) * (NUM_LAYERS + 1)


@pytest.mark.slow
def test_every_size_has_its_pieces_and_all_share_the_gaps(checkpoint, monkeypatch):
    maker, gaps = FakeGraphMaker(), GapBuffers(MAX_TOKENS)
    padded = PaddedModel(checkpoint, lambda model: PieceWrapper(model, maker, gaps))
    ignore_padding(padded.model, monkeypatch)
    eager = padded.logits(TOKENS, COUNTS, GraphMode.NONE, PADDED)
    for size in (16, 32, 16, 9, 32):
        assert torch.allclose(padded.logits(TOKENS, COUNTS, GraphMode.PIECEWISE, size), eager, atol=1e-4)
    assert len(maker.graphs) == 3 * (NUM_LAYERS + 1)
    assert len(gaps._buffers) == 1


def test_the_pieces_of_a_full_step_are_not_active(checkpoint, monkeypatch):
    maker, gaps = FakeGraphMaker(), GapBuffers(MAX_TOKENS)
    pieces = []

    def wrap(model):
        pieces.append(PieceWrapper(model, maker, gaps))
        return GraphWrapper(pieces[0], GraphMode.FULL, maker)

    padded = PaddedModel(checkpoint, wrap)
    ignore_padding(padded.model, monkeypatch)
    want = padded.logits(TOKENS, [40], GraphMode.NONE, 40)
    assert torch.equal(padded.logits(TOKENS, [40], GraphMode.FULL, 40), want)
    assert len(maker.graphs) == 1 and not pieces[0].captured()
    assert torch.equal(padded.logits(TOKENS, [40], GraphMode.PIECEWISE, 40), want)
    assert len(maker.graphs) == 1 + NUM_LAYERS + 1


def toy(call=None):
    """x -> (x + 1), called out, * 3."""

    def model(x):
        hidden, gap = x + 1, current_gap()
        outside = call or (lambda value: value - 5)
        return (outside(hidden) if gap is None else gap(outside, hidden)) * 3

    return model


def run(wrapper, x, mode=GraphMode.PIECEWISE):
    with torch.inference_mode(), forward_context(ForwardContext({}, mode, BatchDescriptor(len(x), None))):
        return wrapper(x)


def test_what_is_called_out_of_a_graph_sees_real_values():
    seen = []
    wrapper = PieceWrapper(toy(lambda value: seen.append(value.clone()) or value - 5), FakeGraphMaker(), GapBuffers(4))
    x = torch.zeros(4)
    for turn in range(3):
        x.fill_(turn)
        assert torch.equal(run(wrapper, x), torch.full((4,), (turn - 4.0) * 3))
    assert [value.mean().item() for value in seen] == [1, 2, 3]


def test_an_error_between_graphs_leaves_nothing_behind():
    fails = [True]

    def call(value):
        if fails:
            fails.pop()
            raise KeyError("once")
        return value

    wrapper = PieceWrapper(toy(call), FakeGraphMaker(), GapBuffers(4))
    with pytest.raises(KeyError):
        run(wrapper, torch.zeros(4))
    assert not wrapper.captured() and current_gap() is None
    assert torch.equal(run(wrapper, torch.zeros(4)), torch.full((4,), 3.0))


@pytest.mark.parametrize("room", (0, 1))
def test_without_memory_the_step_runs_without_graphs(room):
    told = []
    wrapper = PieceWrapper(
        toy(), FakeGraphMaker(room=room), GapBuffers(4), on_no_memory=lambda mode, key: told.append(key)
    )
    assert torch.equal(run(wrapper, torch.zeros(4)), torch.full((4,), -12.0))
    assert told == [BatchDescriptor(4, None)] and not wrapper.captured()


def test_a_moved_argument_is_found():
    wrapper = PieceWrapper(toy(), FakeGraphMaker(), GapBuffers(4), check_addresses=True)
    run(wrapper, torch.zeros(4))
    with pytest.raises(PagemillError, match="argument 0"):
        run(wrapper, torch.zeros(8)[4:])


def test_a_step_needs_a_descriptor():
    wrapper = PieceWrapper(toy(), FakeGraphMaker(), GapBuffers(4))
    with pytest.raises(PagemillError, match="descriptor"), forward_context(ForwardContext({}, GraphMode.PIECEWISE)):
        wrapper(torch.zeros(4))


def test_more_tokens_than_there_is_room_for():
    with pytest.raises(PagemillError, match="5 tokens do not fit a graph; at most 4 do"):
        GapBuffers(4).hold(torch.zeros(5, 2))


def test_results_of_one_shape_share_a_buffer():
    gaps = GapBuffers(4)
    first, second = gaps.hold(torch.ones(3, 2)), gaps.hold(torch.zeros(4, 2))
    assert first.data_ptr() == second.data_ptr() != gaps.hold(torch.zeros(4, 3)).data_ptr()
    assert torch.equal(second, torch.zeros(4, 2))
