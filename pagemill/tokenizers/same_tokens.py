"""`check_same_tokens`: whether the ids of one model's tokenizer mean the same to another's."""

from pathlib import Path

from pagemill.errors import ConfigError, ModelError
from pagemill.tokenizers.load import load_tokenizer

_MOST_COMPARED = 4096


def check_same_tokens(draft: Path, target: Path, draft_name: str, target_name: str) -> None:
    """Compare ids that are spread over both vocabularies. Without a tokenizer on either side there is nothing to
    compare, and ids that only one of them knows fill up a vocabulary. Raises ConfigError for an id that stands for
    something else."""
    try:
        ours = load_tokenizer(draft)
        theirs = load_tokenizer(target)
    except ModelError:
        return
    count = min(ours.vocab_size, theirs.vocab_size)
    for token in range(0, count, max(1, count // _MOST_COMPARED)):
        found, expected = ours.token_bytes(token), theirs.token_bytes(token)
        if found and expected and found != expected:
            raise ConfigError(
                f"speculative_config: model={draft_name!r} has another vocabulary than {target_name}: token {token} is "
                f"{found.decode(errors='replace')!r} there, and {expected.decode(errors='replace')!r} here"
            )
