"""The table of GGUF families: `general.architecture` of a file -> what its names and values are."""

from typing import Final

from pagemill.artifacts.gguf_dense import DENSE
from pagemill.artifacts.gguf_encoders import ENCODERS
from pagemill.artifacts.gguf_experts import EXPERTS
from pagemill.artifacts.gguf_family import GgufFamily
from pagemill.artifacts.gguf_file import GgufFile
from pagemill.artifacts.gguf_joined import JOINED
from pagemill.artifacts.gguf_keys import GgufKeys
from pagemill.artifacts.gguf_nano import NANO
from pagemill.artifacts.gguf_states import STATES
from pagemill.errors import ModelError
from pagemill.utils.text import shown

FAMILIES: Final[dict[str, GgufFamily]] = {**DENSE, **JOINED, **NANO, **EXPERTS, **STATES, **ENCODERS}
"""`general.architecture` -> the family."""


def family_of(file: GgufFile) -> GgufFamily:
    """Raises ModelError that lists the known ones for an architecture that is not among them."""
    keys = GgufKeys(file)
    name = keys.text("general.architecture")
    if name not in FAMILIES:
        raise ModelError(
            f"{file.path}: architecture {shown(name)} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name].of(file)
