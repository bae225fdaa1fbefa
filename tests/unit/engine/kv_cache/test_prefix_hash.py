"""Hashes commit to everything before them, to the salt, and to the seed."""

import hashlib
import importlib
import subprocess
import sys

import cbor2
import msgspec
import numpy as np
import pytest

from pagemill.engine.kv_cache.prefix_hash import PrefixHasher, extra_keys
from pagemill.engine.request import Request
from pagemill.errors import ConfigError
from pagemill.messages.engine_io import LoRARequest, MultimodalItem
from tests.fakes.engine_setup import core_request
from tests.marks import slow

ALGORITHMS = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]


def hashes(prompt, *, algorithm="sha256", seed="0", salt=None, block_size=4, **keys):
    request = Request(core_request("r", prompt, salt=salt, **keys), sequence=0, max_model_len=1000)
    PrefixHasher(algorithm, block_size, seed).extend(request)
    return request.block_hashes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_prefixes_and_nothing_else_have_equal_hashes(algorithm):
    left = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], algorithm=algorithm)
    right = hashes([1, 2, 3, 4, 5, 6, 7, 0, 9], algorithm=algorithm)
    other = hashes([0, 2, 3, 4, 5, 6, 7, 8], algorithm=algorithm)
    assert len(left) == 2
    assert left[0] == right[0]
    assert len({*left, *right, *other}) == 5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_salt_parts_the_whole_chain(algorithm):
    chains = [hashes(8, algorithm=algorithm, salt=salt) for salt in (None, "a", "b", "\ud800")]
    assert len({digest for chain in chains for digest in chain}) == 8
    assert hashes(8, algorithm=algorithm, salt="a") == chains[1]


PLACEHOLDER = 9
IMAGE_PROMPT = [1, 3, 7493, 1681, 1294, 1593, 3937, 9551, *[PLACEHOLDER] * 41, 4, *range(100, 114)]
"""The document's prompt: 8 tokens, an image of 41 placeholders, the end, and what fills the fourth block."""


def test_an_image_is_named_in_each_block_that_holds_some_of_it():
    """The table of four blocks in the design document of prefix caching."""
    image = MultimodalItem(8, 41, "image-hash")
    request = Request(core_request("r", [*IMAGE_PROMPT, 5], mm_items=[image]), sequence=0, max_model_len=1000)
    starts = [-8, 8, 24, 40]
    assert [extra_keys(request, index, 16) for index in range(4)] == [[("item", b"image-hash", at)] for at in starts]
    assert extra_keys(request, 4, 16) == []
    hasher = PrefixHasher("sha256", 16, "0")
    hasher.extend(request)
    parent = hasher.root
    for index, digest in enumerate(request.block_hashes):
        tokens = np.array(IMAGE_PROMPT[16 * index : 16 * index + 16], np.int32).tobytes()
        parent = hashlib.sha256(parent + tokens + msgspec.msgpack.encode(extra_keys(request, index, 16))).digest()
        assert digest == parent
    assert len(request.block_hashes) == 4


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_images_behind_equal_placeholders_share_nothing_from_there_on(algorithm):
    prompt = [1, 2, 3, 4, *[PLACEHOLDER] * 4, 5, 6, 7, 8]
    cat, dog = (hashes(prompt, algorithm=algorithm, mm_items=[MultimodalItem(4, 4, name)]) for name in ("cat", "dog"))
    assert cat[0] == dog[0] == hashes(prompt, algorithm=algorithm)[0]
    assert not set(cat[1:]) & set(dog[1:])


def test_one_image_of_two_blocks_is_not_the_same_image_twice():
    prompt = [PLACEHOLDER] * 8
    once = hashes(prompt, mm_items=[MultimodalItem(0, 8, "cat")])
    twice = hashes(prompt, mm_items=[MultimodalItem(0, 4, "cat"), MultimodalItem(4, 4, "cat")])
    assert once[0] == twice[0]
    assert once[1] != twice[1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_adapters_share_nothing_with_the_base_or_each_other(algorithm):
    adapters = [None, LoRARequest("a", 1, "/a"), LoRARequest("a", 2, "/a"), LoRARequest("b", 1, "/b")]
    chains = [hashes(8, algorithm=algorithm, lora=lora) for lora in adapters]
    assert len({digest for chain in chains for digest in chain}) == 8


def test_hashing_goes_on_where_it_stopped():
    request = Request(core_request("r", 6), sequence=0, max_model_len=1000)
    hasher = PrefixHasher("sha256", 4, "0")
    hasher.extend(request)
    request.token_ids.extend([7, 8, 9, 10, 11, 12])
    hasher.extend(request)
    assert request.block_hashes == hashes(12)


def test_the_root_is_random_unless_pinned():
    assert hashes(4, seed=None) != hashes(4, seed=None)
    assert hashes(4, seed="1") == hashes(4, seed="1") != hashes(4, seed="2")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sha256", slow("sha256_cbor")])
def test_a_pinned_seed_gives_the_same_hashes_in_another_process(algorithm):
    code = (
        "from tests.unit.engine.kv_cache.test_prefix_hash import hashes;"
        f"print(hashes(8, algorithm={algorithm!r}, seed='42', salt='s')[-1].hex())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == hashes(8, algorithm=algorithm, seed="42", salt="s")[-1].hex()


def test_the_cbor_hash_is_that_of_the_documented_encoding():
    """Golden: anyone can recompute it from the canonical CBOR of [parent, tokens, extra keys]."""
    root = hashlib.sha256(b"pagemill prefix root 0").digest()
    first = hashlib.sha256(cbor2.dumps([root, [1, 2, 3, 4], [["salt", b"s", 0]]], canonical=True)).digest()
    second = hashlib.sha256(cbor2.dumps([first, [5, 6, 7, 8], None], canonical=True)).digest()
    assert hashes(8, algorithm="sha256_cbor", salt="s") == [first, second]
    assert first.hex() == "59a055e01daeba694567405b56c3015970ddb0e5b6599ce6553ef5f8d1e26d15"


@pytest.mark.parametrize(
    ("algorithm", "package"), [("xxhash", "xxhash"), ("sha256_cbor", "cbor2"), ("xxhash_cbor", "xxhash")]
)
def test_a_missing_package_is_named(monkeypatch, algorithm, package):
    real = importlib.import_module

    def refuse(name, *args):
        if name == package:
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ConfigError, match=f"{algorithm!r} needs the package {package!r}"):
        PrefixHasher(algorithm, 4)
