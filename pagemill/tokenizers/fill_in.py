"""`FillInTokens`: the tokens of which models are shown a text with a gap, to write what stands there.

Vocabularies name them differently; a GGUF file may say which they are. Knows nothing about prompts.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

PREFIX = "fim_pre"
SUFFIX = "fim_suf"
MIDDLE = "fim_mid"
PADDING = "fim_pad"
REPOSITORY = "fim_rep"
FILE = "fim_sep"
END = "eot"

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    PREFIX: (
        "<|fim_prefix|>",
        "<fim_prefix>",
        "<fim-prefix>",
        "<\uff5cfim\u2581begin\uff5c>",
        "<PRE>",
        "\u2581<PRE>",
        "<|code_prefix|>",
    ),
    SUFFIX: (
        "<|fim_suffix|>",
        "<fim_suffix>",
        "<fim-suffix>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<SUF>",
        "\u2581<SUF>",
        "<|code_suffix|>",
    ),
    MIDDLE: (
        "<|fim_middle|>",
        "<fim_middle>",
        "<fim-middle>",
        "<\uff5cfim\u2581end\uff5c>",
        "<MID>",
        "\u2581<MID>",
        "<|code_middle|>",
    ),
    PADDING: ("<|fim_pad|>", "<fim_pad>", "<fim-pad>"),
    REPOSITORY: ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    FILE: ("<|file_sep|>", "<file_sep>"),
    END: ("<EOT>", "\u2581<EOT>", "<|endoftext|>"),
}
"""Part -> what vocabularies call it: those of Qwen, StarCoder and Granite, DeepSeek, Code Llama and GLM, in the order
in which they are looked for."""


class FillInTokens(NamedTuple):
    """Ids of the tokens of a prompt with a gap: [prefix]text before it[suffix]text after it[middle]."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    """Before the name of a repository; None: there is no such token."""
    file: int | None
    """Before the name of a file; None: there is no such token."""
    ends: tuple[int, ...]
    """Tokens by which the model says that the gap is filled, besides those that end any text."""

    @property
    def all(self) -> frozenset[int]:
        """Every one of them."""
        return frozenset(token for token in (*self[:5], *self.ends) if token is not None)


def find_fill_in(token_id: Callable[[str], int | None], given: Mapping[str, int]) -> FillInTokens | None:
    """Those of a vocabulary; None when it lacks one of the first three. `token_id`: the id of a token by its text.
    `given`: ids by the names of parts, where the model says so itself."""
    found = dict(given)
    for part, names in NAMES.items():
        ids = [known for name in names if (known := token_id(name)) is not None]
        if part not in found and ids:
            found[part] = ids[0]
    if not {PREFIX, SUFFIX, MIDDLE} <= set(found):
        return None
    ends = [found[part] for part in (PADDING, REPOSITORY, FILE, END) if part in found]
    return FillInTokens(
        found[PREFIX], found[SUFFIX], found[MIDDLE], found.get(REPOSITORY), found.get(FILE), tuple(dict.fromkeys(ends))
    )
