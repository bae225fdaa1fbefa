import json
from pathlib import Path

import pytest

from pagemill.bench.workload import RandomShape, WorkItem, random_workload, read_workload
from pagemill.errors import ConfigError


def test_the_same_seed_makes_the_same_workload():
    shape = RandomShape(input_len=16, output_len=4, range_ratio=0.5)
    assert random_workload(5, shape, seed=1) == random_workload(5, shape, seed=1)
    assert random_workload(5, shape, seed=1) != random_workload(5, shape, seed=2)


def test_lengths_and_ids():
    items = random_workload(4, RandomShape(input_len=10, output_len=3, prefix_len=6, vocab_size=50))
    assert [len(item.prompt_token_ids) for item in items] == [16] * 4
    assert {item.num_output_tokens for item in items} == {3}
    assert all(0 <= token < 50 for item in items for token in item.prompt_token_ids)
    assert len({tuple(item.prompt_token_ids[:6]) for item in items}) == 1
    assert len({tuple(item.prompt_token_ids[6:]) for item in items}) == 4


def test_lengths_vary_within_the_ratio():
    items = random_workload(200, RandomShape(input_len=100, output_len=10, range_ratio=0.2))
    lengths = {len(item.prompt_token_ids) for item in items}
    assert min(lengths) >= 80 and max(lengths) <= 120 and len(lengths) > 20


@pytest.mark.parametrize(
    ("num_prompts", "changes", "message"),
    [
        (0, {}, "num_prompts=0 is too small"),
        (1, {"input_len": 0}, "input_len=0 is too small"),
        (1, {"output_len": 0}, "output_len=0 is too small"),
        (1, {"vocab_size": 0}, "vocab_size=0 is too small"),
        (1, {"prefix_len": -1}, "prefix_len=-1 is too small"),
        (1, {"range_ratio": 1.0}, r"range_ratio=1\.0 is not in"),
    ],
)
def test_impossible_shapes(num_prompts: int, changes: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        random_workload(num_prompts, RandomShape(**{"input_len": 4, "output_len": 4, **changes}))


def test_a_workload_from_a_file(tmp_path: Path):
    path = tmp_path / "work.jsonl"
    entry = json.dumps({"prompt_token_ids": [1, 2], "num_output_tokens": 3})
    path.write_text(f"{entry}\n\n{entry}\n{entry}\n")
    assert read_workload(path) == [WorkItem([1, 2], 3)] * 3
    assert len(read_workload(path, 2)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "holds no request"),
        ("{oops", "request 1: not an object"),
        ("[1]", "request 1: not an object"),
        ('{"prompt_token_ids": [1]}', "request 1: not an object with"),
        ('{"prompt_token_ids": [], "num_output_tokens": 1}', "token ids must be integers"),
        ('{"prompt_token_ids": [1.5], "num_output_tokens": 1}', "token ids must be integers"),
        ('{"prompt_token_ids": [1], "num_output_tokens": 0}', "num_output_tokens at least 1"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "work.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        read_workload(path)
    with pytest.raises(ConfigError, match="cannot read the workload"):
        read_workload(tmp_path / "none")
