"""The index of weight files: names of files in the folder come of it, or ModelError."""

import json
import random

import pytest

from pagemill.artifacts.hf_config import require_safetensors
from pagemill.artifacts.weight_index import INDEX, names_of_weight_files
from pagemill.errors import ModelError
from tests.unit.artifacts.test_config_fields import HOSTILE

SHARD = "model-00001-of-00001.safetensors"
HOSTILE_NAMES = [
    *HOSTILE, "", ".", "..", "/", "/etc/passwd", "../x.safetensors", "a/b.safetensors", "x" * 5000 + ".safetensors",
    "é" * 150 + ".safetensors", "\x00.safetensors", "\n.safetensors", "\ud800.safetensors", "x.bin", ["x"], {"x": 1},
]  # fmt: skip


def write(folder, content):
    (folder / INDEX).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def test_names(tmp_path):
    assert names_of_weight_files(tmp_path) == ["model.safetensors"]
    (tmp_path / "medusa_lm_head.safetensors").touch()
    assert names_of_weight_files(tmp_path) == ["medusa_lm_head.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert names_of_weight_files(tmp_path) == ["model.safetensors"], "the model's, where it is there too"
    write(tmp_path, {"weight_map": {"b": "2.safetensors", "a": "1.safetensors", "c": "1.safetensors"}})
    assert names_of_weight_files(tmp_path) == ["1.safetensors", "2.safetensors"]


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: repr(name)[:20])
def test_a_name_that_is_none(tmp_path, name):
    write(tmp_path, {"weight_map": {"a": SHARD, "b": name}})
    with pytest.raises(ModelError, match="weight_map names") as raised:
        require_safetensors(tmp_path)
    assert len(str(raised.value)) < 600
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [*HOSTILE, {}, [], {"x": 1}], ids=lambda content: repr(content)[:20])
def test_a_map_that_is_none(tmp_path, content):
    write(tmp_path, {"weight_map": content})
    with pytest.raises(ModelError, match="weight_map"):
        names_of_weight_files(tmp_path)
    write(tmp_path, content)
    with pytest.raises(ModelError, match="is damaged"):
        names_of_weight_files(tmp_path)


def test_bytes_that_are_anything(tmp_path):
    rng = random.Random(0)
    good = json.dumps({"metadata": {"total_size": 5}, "weight_map": {"a": SHARD, "b": SHARD}}).encode()
    num_good = 0
    for _ in range(500):
        changed = bytearray(good[: rng.choice([len(good), rng.randrange(len(good))])])
        for _ in range(rng.randrange(3) if changed else 0):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        write(tmp_path, bytes(changed))
        try:
            num_good += all("/" not in name for name in names_of_weight_files(tmp_path))
        except ModelError as error:
            assert len(str(error)) < 600
            assert "\n" not in str(error)
    assert 0 < num_good < 500
    write(tmp_path, b"[" * 100_000)
    with pytest.raises(ModelError, match="is damaged"):
        names_of_weight_files(tmp_path)
