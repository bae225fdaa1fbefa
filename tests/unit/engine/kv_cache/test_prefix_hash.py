"""Hashes commit to everything before them, to the salt, and to the seed."""

import hashlib
import importlib
import subprocess
import sys

import cbor2
import pytest

from pagemill.engine.kv_cache.prefix_hash import PrefixHasher
from pagemill.engine.request import Request
from pagemill.errors import ConfigError
from tests.fakes.engine_setup import core_request

ALGORITHMS = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]


def hashes(prompt, *, algorithm="sha256", seed="0", salt=None, block_size=4):
    request = Request(core_request("r", prompt, salt=salt), sequence=0, max_model_len=1000)
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


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
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
    first = hashlib.sha256(cbor2.dumps([root, [1, 2, 3, 4], b"salt:s"], canonical=True)).digest()
    second = hashlib.sha256(cbor2.dumps([first, [5, 6, 7, 8], None], canonical=True)).digest()
    assert hashes(8, algorithm="sha256_cbor", salt="s") == [first, second]
    assert first.hex() == "2d736ed44cc9de966a12d9c6e0192429a24fa9666e858625f496b9d3ba38d9ea"


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


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'md5' is not one of sha256, sha256_cbor, xxhash, xxhash_cbor"):
        PrefixHasher("md5", 4)
    with pytest.raises(ConfigError, match="'sha256_json'"):
        PrefixHasher("sha256_json", 4)
