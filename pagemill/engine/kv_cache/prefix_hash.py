"""Chained hashes of full blocks: equal hash, equal tokens from the first to the block's last, and equal extra keys.

Knows nothing about where blocks are, or whether anybody caches them.
"""

import hashlib
import importlib
import os
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from pagemill.engine.request import Request
from pagemill.errors import ConfigError

HashFunction = Callable[[bytes], bytes]
ExtraKeys = list[tuple[str, bytes, int]]
"""(kind, name, number): what besides its tokens makes a block's contents unique."""
HashChain = Callable[[bytes, "array[int]", int, dict[int, ExtraKeys]], list[bytes]]
"""(hash of the block before, tokens of whole blocks, tokens per block, extra keys by index of block) -> the hash of
each block. Whole chains at once, because a prompt of 32k tokens has 2,000 blocks."""

ROOT_BYTES = 32


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _optional(package: str, algorithm: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"prefix_caching_hash_algo={algorithm!r} needs the package {package!r}, which is not installed; "
            f"install it, or use --prefix-caching-hash-algo sha256"
        ) from error


def _packed(hash_bytes: HashFunction) -> HashChain:
    """Parent and tokens have a fixed size each, so that their plain concatenation is unambiguous; extra keys follow
    as msgpack."""

    def hash_chain(parent: bytes, token_ids: "array[int]", size: int, extra: dict[int, ExtraKeys]) -> list[bytes]:
        data, num_bytes = token_ids.tobytes(), size * token_ids.itemsize
        blocks = [data[start : start + num_bytes] for start in range(0, len(data), num_bytes)]
        for index, keys in extra.items():
            blocks[index] += msgspec.msgpack.encode(keys)
        hashes = []
        for block in blocks:
            parent = hash_bytes(parent + block)
            hashes.append(parent)
        return hashes

    return hash_chain


def _cbor(hash_bytes: HashFunction, dumps: Callable[..., bytes]) -> HashChain:
    """Canonical CBOR of [parent, tokens, extra keys]: the same on every machine and in every language."""

    def hash_chain(parent: bytes, token_ids: "array[int]", size: int, extra: dict[int, ExtraKeys]) -> list[bytes]:
        ids, hashes = token_ids.tolist(), []
        for index, start in enumerate(range(0, len(ids), size)):
            parent = hash_bytes(dumps([parent, ids[start : start + size], extra.get(index)], canonical=True))
            hashes.append(parent)
        return hashes

    return hash_chain


def hash_chain_function(algorithm: str) -> HashChain:
    """One of sha256, sha256_cbor, xxhash, xxhash_cbor. Raises ConfigError for a name that is none of them, or that
    names the package that is missing."""
    name, _, encoding = algorithm.partition("_")
    if name not in ("sha256", "xxhash") or encoding not in ("", "cbor"):
        raise ConfigError(
            f"prefix_caching_hash_algo={algorithm!r} is not one of sha256, sha256_cbor, xxhash, xxhash_cbor"
        )
    hash_bytes: HashFunction = _sha256 if name == "sha256" else _optional("xxhash", algorithm).xxh3_128_digest
    return _cbor(hash_bytes, _optional("cbor2", algorithm).dumps) if encoding else _packed(hash_bytes)


class PrefixHasher:
    """Hashes blocks of `block_size` tokens. The first block's parent is random, so that nobody outside can find
    colliding prompts, unless `seed` pins it: the same seed gives the same hashes in every process."""

    def __init__(self, algorithm: str, block_size: int, seed: str | None = None) -> None:
        self.block_size = block_size
        self._hash_chain = hash_chain_function(algorithm)
        self.root = os.urandom(ROOT_BYTES) if seed is None else _sha256(b"pagemill prefix root " + seed.encode())

    def extend(self, request: Request) -> None:
        """Hash those full blocks of `request.token_ids` that have no hash yet."""
        hashes, tokens, size = request.block_hashes, request.token_ids, self.block_size
        first, end = len(hashes), len(tokens) // size
        if first == end:
            return
        parent = hashes[-1] if hashes else self.root
        hashes += self._hash_chain(parent, tokens[first * size : end * size], size, _extra_keys(request, first, end, size))


def _extra_keys(request: Request, first: int, end: int, block_size: int) -> dict[int, ExtraKeys]:
    """Those of the blocks first to end - 1 that have any, by index from `first` on."""
    indexes = range(first, end) if request.mm_items else range(first, min(end, 1))
    return {index - first: keys for index in indexes if (keys := extra_keys(request, index, block_size))}


def extra_keys(request: Request, block_index: int, block_size: int) -> ExtraKeys:
    """The keys of one block; none for most.

    Salt and adapter are named in the first block only, because later ones inherit them through their parent. A
    multimodal item is named in every block that holds some of its placeholders, with the place in it where the block
    begins: placeholders are equal tokens whatever they stand for.
    """
    keys: ExtraKeys = []
    if not block_index:
        if request.cache_salt is not None:
            keys.append(("salt", request.cache_salt.encode("utf-8", "surrogatepass"), 0))
        if request.lora is not None:
            keys.append(("lora", request.lora.name.encode("utf-8", "surrogatepass"), request.lora.lora_id))
    start = block_index * block_size
    for item in request.mm_items:
        if item.offset < start + block_size and item.offset + item.num_tokens > start:
            keys.append(("item", item.content_hash.encode("utf-8", "surrogatepass"), start - item.offset))
    return keys
