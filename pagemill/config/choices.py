"""Names that settings choose from and that other modules compare. Each is a string as well, as users write it."""

from enum import StrEnum


class Runner(StrEnum):
    """What a model is used for."""

    AUTO = "auto"
    """Whichever the model is for; resolved to one of the others."""
    GENERATE = "generate"
    POOLING = "pooling"


class LogprobsMode(StrEnum):
    """What is told of a token where a request asks for log-probabilities: log-probabilities or logits, as the model
    gives them or as they are sampled from."""

    RAW_LOGPROBS = "raw_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGPROBS = "processed_logprobs"
    PROCESSED_LOGITS = "processed_logits"

    @property
    def processed(self) -> bool:
        """Whether logits processors, temperature and filters come first."""
        return self in (LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS)

    @property
    def normalized(self) -> bool:
        """Whether values are log-probabilities."""
        return self in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS)


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
