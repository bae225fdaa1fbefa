"""Seeds of requests that have none: functions of the setting, the front end and the order."""

from pagemill.messages.engine_io import EngineReady
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.processing.input_processor import InputProcessor, RequestOptions
from pagemill.serve.processing.seeds import RequestSeeds
from tests.fakes.fake_tokenizer import ByteTokenizer


def drawn(seed: int, front_end: int = 0, count: int = 50) -> list[int]:
    seeds = RequestSeeds(seed, front_end)
    return [seeds.next() for _ in range(count)]


def test_runs_repeat_and_requests_differ() -> None:
    assert drawn(7) == drawn(7)
    several = [*drawn(7), *drawn(8), *drawn(7, front_end=1), *drawn(-1), *drawn(2**70)]
    assert len(set(several)) == len(several)
    assert all(0 <= seed < 2**64 for seed in several)


def test_requests_without_a_seed_get_the_next_one() -> None:
    ready = EngineReady(max_model_len=32, vocab_size=300, num_blocks=8, block_size=16)
    processor, seeds = InputProcessor(ByteTokenizer(), ready, (), False), RequestSeeds(7)
    prepared = [processor.prepare("hi", SamplingParams(seed=seed), RequestOptions()) for seed in (None, 3, None)]
    assert [item.request.params.seed for item in prepared] == [None, 3, None]
    first, second = drawn(7, count=2)
    assert [seeds.complete(item.request).params.seed for item in prepared] == [first, 3, second]
