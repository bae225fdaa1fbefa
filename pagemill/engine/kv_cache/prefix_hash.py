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

from pagemill.config.choices import HashAlgorithm
from pagemill.engine.request import Request
from pagemill.errors import ConfigError

HashFunction = Callable[[bytes], bytes]
ExtraKeys = list[tuple[str, bytes, int]]
"""(kind, name, number): what besides its tokens makes a block's contents unique."""
BlockHashFunction = Callable[[bytes, bytes, ExtraKeys], bytes]
"""(hash of the block before, tokens of the block as 32-bit integers, extra keys) -> hash of the block."""

ROOT_BYTES = 32
GROUP_BYTES = 2
"""A block's key in the pool is its hash and, in this many bytes, big-endian, the KV group that it belongs to."""


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _optional(package: str, algorithm: HashAlgorithm) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"prefix_caching_hash_algo={str(algorithm)!r} needs the package {package!r}, which is not installed; "
            f"install it, or use --prefix-caching-hash-algo sha256"
        ) from error


def _packed(hash_bytes: HashFunction) -> BlockHashFunction:
    """Parent and tokens have a fixed size each, so that their plain concatenation is unambiguous; extra keys follow
    as msgpack."""

    def hash_block(parent: bytes, token_bytes: bytes, extra: ExtraKeys) -> bytes:
        packed = parent + token_bytes
        return hash_bytes(packed + msgspec.msgpack.encode(extra) if extra else packed)

    return hash_block


def _cbor(hash_bytes: HashFunction, dumps: Callable[..., bytes]) -> BlockHashFunction:
    """Canonical CBOR of [parent, tokens, extra keys]: the same on every machine and in every language."""

    def hash_block(parent: bytes, token_bytes: bytes, extra: ExtraKeys) -> bytes:
        token_ids = array("i", token_bytes).tolist()
        return hash_bytes(dumps([parent, token_ids, extra or None], canonical=True))

    return hash_block


def block_hash_function(algorithm: HashAlgorithm) -> BlockHashFunction:
    """The function of that name. Raises ConfigError that names the package that is missing."""
    is_sha256 = algorithm in (HashAlgorithm.SHA256, HashAlgorithm.SHA256_CBOR)
    is_packed = algorithm in (HashAlgorithm.SHA256, HashAlgorithm.XXHASH)
    hash_bytes: HashFunction = _sha256 if is_sha256 else _optional("xxhash", algorithm).xxh3_128_digest
    return _packed(hash_bytes) if is_packed else _cbor(hash_bytes, _optional("cbor2", algorithm).dumps)


class PrefixHasher:
    """Hashes blocks of `block_size` tokens. The first block's parent is random, so that nobody outside can find
    colliding prompts, unless `seed` pins it: the same seed gives the same hashes in every process."""

    def __init__(self, algorithm: HashAlgorithm, block_size: int, seed: str | None = None) -> None:
        self.block_size = block_size
        self._hash_block = block_hash_function(algorithm)
        self._is_sha256 = algorithm == HashAlgorithm.SHA256
        self.root = os.urandom(ROOT_BYTES) if seed is None else _sha256(b"pagemill prefix root " + seed.encode())

    def extend(self, request: Request) -> None:
        """Hash those full blocks of `request.token_ids` that have no hash yet."""
        hashes = request.block_hashes
        tokens = request.token_ids
        size = self.block_size
        first = len(hashes)
        end = len(tokens) // size
        if first == end:
            return
        hash_block = self._hash_block
        parent = hashes[-1] if hashes else self.root
        # Whether none of the blocks has extra keys, as in nearly all requests.
        plain = not request.mm_items and (first or (request.cache_salt is None and request.lora is None))
        extra: ExtraKeys = []
        # All bytes at once: a prompt of 32k tokens has 2,000 blocks.
        data = tokens[first * size : end * size].tobytes()
        num_bytes = size * tokens.itemsize
        if plain and self._is_sha256:  # the usual case, without the two calls per block that the others make
            sha256 = hashlib.sha256
            for start in range(0, len(data), num_bytes):
                parent = sha256(parent + data[start : start + num_bytes]).digest()
                hashes.append(parent)
            return
        for start in range(0, len(data), num_bytes):
            if not plain:
                extra = extra_keys(request, first + start // num_bytes, size)
            parent = hash_block(parent, data[start : start + num_bytes], extra)
            hashes.append(parent)

    def past(self, request: Request, block_index: int) -> bytes:
        """What a block's contents depend on besides its own tokens: the hash of the block before it, and the block's
        own extra keys. The blocks before it must be hashed."""
        parent = request.block_hashes[block_index - 1] if block_index else self.root
        extra = extra_keys(request, block_index, self.block_size)
        return parent + msgspec.msgpack.encode(extra) if extra else parent


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
