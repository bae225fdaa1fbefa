"""The tokenizer section of a GGUF file, checked. Knows nothing about how its tokens are merged."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pagemill.artifacts.gguf_file import GgufFile
from pagemill.artifacts.gguf_keys import GgufKeys
from pagemill.artifacts.gguf_metadata import NO_TOKEN
from pagemill.errors import ModelError

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6


@dataclass(frozen=True)
class GgufVocab:
    """The vocabulary of a .gguf file: its tokens by id."""

    tokens: list[str]
    kinds: "np.ndarray[Any, Any]"
    """One of the constants above per token, int."""

    def ids_of(self, kind: int) -> list[int]:
        """Ids of one kind, ascending."""
        return [int(i) for i in np.flatnonzero(self.kinds == kind)]

    def table(self) -> dict[str, int]:
        """token -> id, without unused ones; of equal tokens, the first."""
        used = self.kinds != UNUSED
        if used.all():
            table = {token: i for i, token in enumerate(self.tokens)}
            if len(table) == len(self.tokens):
                return table
        table = {}
        for i in np.flatnonzero(used):
            table.setdefault(self.tokens[i], int(i))
        return table


def read_vocab(file: GgufFile) -> GgufVocab:
    """Tokens and their kinds. Raises ModelError when they are missing or do not fit together."""
    keys = GgufKeys(file)
    tokens = keys.strings("tokenizer.ggml.tokens")
    if "tokenizer.ggml.token_type" in keys:
        kinds = keys.numbers("tokenizer.ggml.token_type")
    else:
        kinds = np.full(len(tokens), NORMAL)
    if not tokens or len(kinds) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens, but {len(kinds)} token types")
    return GgufVocab(tokens, kinds)


def token_id(file: GgufFile, name: str, num_tokens: int) -> int | None:
    """A special token such as "bos"; None when the file names none. Raises ModelError for an id out of range."""
    keys = GgufKeys(file)
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in keys:
        return None
    found = keys.integer(key)
    if found == NO_TOKEN:
        return None
    if not 0 <= found < num_tokens:
        raise ModelError(f"{file.path}: {key}={found} is not one of the {num_tokens} tokens")
    return found
