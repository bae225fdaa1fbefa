"""Names that settings choose from and that other modules compare. Each is a string as well, as users write it."""

from enum import StrEnum


class Runner(StrEnum):
    """What a model is used for."""

    AUTO = "auto"
    """Whichever the model is for; resolved to one of the others."""
    GENERATE = "generate"
    POOLING = "pooling"


class SchedulingPolicy(StrEnum):
    """Order of waiting requests."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class HashAlgorithm(StrEnum):
    """Hash of a KV block, and whether what is hashed is packed or canonical CBOR."""

    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"
    XXHASH = "xxhash"
    XXHASH_CBOR = "xxhash_cbor"
