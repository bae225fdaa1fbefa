"""CUDA graphs on the device: replay equals eager, for whole steps, for pieces, and for compiled pieces."""

import pytest
import torch

from pagemill.config.graph_mode import GraphMode
from pagemill.errors import PagemillError
from pagemill.model.forward_context import BatchDescriptor, ForwardContext, current_gap, forward_context
from pagemill.worker.graphs.dispatcher import BatchLimits, Dispatcher
from pagemill.worker.graphs.graph_runner import GraphRunner
from pagemill.worker.graphs.pieces import GapBuffers, PieceWrapper
from pagemill.worker.graphs.wrapper import GraphWrapper
from tests.gpu.engines import greedy, make_llm, make_prompts, run

SIZE = 256


@pytest.fixture
def maker():
    from pagemill.platforms.cuda_graphs import CudaGraphMaker  # needs a device

    return CudaGraphMaker()


class Layers:
    """A few layers, with something between them that cannot be captured: it asks the host."""

    def __init__(self, count=4):
        torch.manual_seed(0)
        self.weights = [torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) / 16 for _ in range(count)]
        self.num_calls = 0

    def __call__(self, x):
        for weight in self.weights:
            hidden = torch.nn.functional.silu(x @ weight)
            gap = current_gap()
            x = x + (self.between(hidden) if gap is None else gap(self.between, hidden))
        return x, x.float().sum(-1)

    def between(self, hidden):
        self.num_calls += 1
        return hidden / max(1.0, hidden.float().abs().max().item())


class WholeStep(Layers):
    """The same, without the host; counts on the device."""

    def __init__(self):
        super().__init__()
        self.count = torch.zeros(1, device="cuda", dtype=torch.int64)

    def __call__(self, x):
        self.count.add_(1)
        return super().__call__(x)

    def between(self, hidden):
        return hidden / hidden.float().abs().amax().clamp(min=1).to(hidden.dtype)


def call(fn, x, mode, key=None):
    with torch.inference_mode(), forward_context(ForwardContext({}, mode, key or BatchDescriptor(len(x), None))):
        return tuple(part.clone() for part in fn(x))


def equal(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_replayed_step_equals_the_step(maker):
    step = WholeStep()
    wrapper = GraphWrapper(step, GraphMode.FULL, maker, check_addresses=True)
    buffer = torch.zeros(64, SIZE, device="cuda", dtype=torch.bfloat16)
    call(step, buffer, GraphMode.NONE)
    step.count.zero_()
    for turn in range(1, 4):
        for rows in (64, 8, 1):
            buffer.normal_()
            want = call(step, buffer[:rows], GraphMode.NONE)
            assert equal(call(wrapper, buffer[:rows], GraphMode.FULL), want)
        assert step.count.item() == turn * 6
    assert len(wrapper.captured()) == 3


def test_a_graph_reads_the_address_of_its_capture(maker):
    step = WholeStep()
    wrapper = GraphWrapper(step, GraphMode.FULL, maker, check_addresses=True)
    buffer = torch.randn(16, SIZE, device="cuda").bfloat16()
    call(wrapper, buffer[:8], GraphMode.FULL)
    with pytest.raises(PagemillError, match="argument 0"):
        call(wrapper, buffer[8:], GraphMode.FULL)


def test_replayed_pieces_equal_the_model(maker):
    model = Layers()
    wrapper = PieceWrapper(model, maker, GapBuffers(64))
    buffer = torch.zeros(64, SIZE, device="cuda", dtype=torch.bfloat16)
    for turn in range(4):
        for rows in (64, 16, 3):
            buffer.normal_()
            want = call(model, buffer[:rows], GraphMode.NONE)
            calls = model.num_calls
            assert equal(call(wrapper, buffer[:rows], GraphMode.PIECEWISE), want), (turn, rows)
            assert model.num_calls == calls + len(model.weights)
    assert len(wrapper._recordings[BatchDescriptor(64, None)].pieces) == len(model.weights) + 1


def test_whole_steps_and_pieces_share_a_pool(maker):
    model = WholeStep()
    pieces = PieceWrapper(model, maker, GapBuffers(64))
    full = GraphWrapper(pieces, GraphMode.FULL, maker)
    buffer = torch.zeros(64, SIZE, device="cuda", dtype=torch.bfloat16)
    for turn in range(6):
        for rows in (64, 8, 32):
            buffer.normal_()
            mode = (GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE)[(turn + rows // 8) % 3]
            want = call(model, buffer[:rows], GraphMode.NONE)
            assert equal(call(full, buffer[:rows], mode), want), (turn, rows, mode)


def test_results_do_not_own_the_memory_of_the_pool(maker):
    step = WholeStep()
    wrapper = GraphWrapper(step, GraphMode.FULL, maker)
    buffer = torch.zeros(4096, SIZE, device="cuda", dtype=torch.bfloat16)
    call(step, buffer, GraphMode.NONE)
    call(wrapper, buffer, GraphMode.FULL)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    for rows in range(4000, 3000, -100):
        call(step, buffer[:rows], GraphMode.NONE)
        call(wrapper, buffer[:rows], GraphMode.FULL)
    torch.cuda.empty_cache()
    # Ten graphs that each kept their results would take more than ten times 4 layers x 3 MB.
    assert torch.cuda.memory_reserved() - reserved < 40 * 2**20


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn))
def test_borrowed_tensors_are_the_same_memory(maker, dtype):
    tensor = torch.randint(0, 2, (6, 5, 4), device="cuda").to(dtype)
    for view in (tensor, tensor[1:4], tensor.transpose(0, 2), tensor[:, 2], tensor[::2, 1:, ::3]):
        borrowed = maker.borrow(view)
        assert borrowed.shape == view.shape and borrowed.stride() == view.stride() and borrowed.dtype == dtype
        assert borrowed.data_ptr() == view.data_ptr() and borrowed.device == view.device
        assert torch.equal(borrowed.view(torch.uint8) if view.is_contiguous() else borrowed.float(),
                           view.view(torch.uint8) if view.is_contiguous() else view.float())  # fmt: skip
    assert maker.borrow(tensor[:0]).shape == (0, 5, 4)


def test_an_error_in_a_capture_leaves_the_device_usable(maker):
    def asks(x):
        return x * 2, x.sum().item()

    wrapper = GraphWrapper(asks, GraphMode.FULL, maker)
    x = torch.ones(8, device="cuda")
    with pytest.raises(RuntimeError), forward_context(ForwardContext({}, GraphMode.FULL, BatchDescriptor(8, 8))):
        wrapper(x)
    torch.cuda.synchronize()
    good = GraphWrapper(lambda x: (x * 3,), GraphMode.FULL, maker)
    assert torch.equal(call(good, x, GraphMode.FULL)[0], x * 3)
    assert torch.equal(call(good, x, GraphMode.FULL)[0], x * 3)


def test_capture_at_the_start_on_the_device(maker):
    sizes = (*range(1, 9), *range(10, 33, 2))
    dispatcher = Dispatcher(GraphMode.FULL_AND_PIECEWISE, sizes, BatchLimits(32))
    graphs = GraphRunner(dispatcher, maker)
    model = WholeStep()
    step = graphs.wrap_step(graphs.wrap_model(model))
    buffer = torch.zeros(32, SIZE, device="cuda", dtype=torch.bfloat16)

    def run_shape(mode, key):
        call(step, buffer[: key.num_tokens], mode, key)

    graphs.capture_at_start(run_shape)
    captured = graphs.stats.num_captured
    assert captured < graphs.num_keys
    for _ in range(3):
        for count, uniform in ((3, True), (13, True), (5, False), (1, True), (31, False)):
            buffer.normal_()
            mode, key = graphs.choose(count, count if uniform else 2, uniform)
            rows = buffer[: key.num_tokens]
            assert equal(call(step, rows, mode, key), call(model, rows, GraphMode.NONE))
    while graphs.capture_one(run_shape):
        pass
    assert graphs.stats.num_captured == graphs.num_keys


@pytest.mark.filterwarnings("ignore")
def test_an_engine_with_compiled_pieces(checkpoints, tmp_path):
    prompts = make_prompts(12)
    settings = {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 4, 16, 64]}
    for _ in range(2):  # the second time from the folder
        with make_llm(
            checkpoints.path("LlamaForCausalLM"), compilation_config=settings | {"cache_dir": str(tmp_path)}
        ) as llm:
            tokens = run(llm, prompts, greedy(16))
        checkpoints.reference("LlamaForCausalLM").check(prompts, tokens, "bfloat16")
        assert any(tmp_path.iterdir())
