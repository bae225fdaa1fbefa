"""How much longer a pipeline of `tokenizers` may make a text: a file whose replacements multiply would otherwise take
all memory at the first prompt, in native code, which ends the process. Knows nothing about where the file is."""

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import tokenizers

from pagemill.errors import ModelError

MAX_GROWTH: Final = 16.0
"""Of all replacements together. Models replace a blank by one character, or take some away."""
MAX_STEPS: Final = 64
MAX_FRAME_TOKENS: Final = 64
"""Special tokens around a text."""
MAX_MAPPED_BYTES: Final = 128
"""What one character may become by a compiled table; the longest of Unicode's own takes 33."""
_PARTS: Final = ("normalizers", "pretokenizers", "decoders", "processors")
"""What the members of a sequence are called."""


def check_expansion(where: object, backend: tokenizers.Tokenizer) -> None:
    """Raises ModelError for a pipeline that would make much of little; `where`: the file, for the message."""
    for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        part = getattr(backend, name)
        steps = [] if part is None else list(_steps(json.loads(part.__getstate__())))
        if len(steps) > MAX_STEPS:
            raise ModelError(f"{where}: its {name} has {len(steps)} steps; at most {MAX_STEPS} are allowed")
        growth = 1.0
        for step in steps:
            growth *= _growth(step)
            if len(step.get("single") or ()) > MAX_FRAME_TOKENS:
                raise ModelError(
                    f"{where}: its {name} puts {len(step['single'])} tokens around a text; at most {MAX_FRAME_TOKENS} "
                    "are allowed"
                )
        if growth > MAX_GROWTH:
            raise ModelError(
                f"{where}: its {name} can make a text {growth:.3g} times as long; at most {MAX_GROWTH:g} is allowed"
            )


def _steps(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    members = next((part[name] for name in _PARTS if isinstance(part.get(name), list)), None)
    if members is None:
        yield part
        return
    for member in members:
        yield from _steps(member)


def _growth(step: Mapping[str, Any]) -> float:
    """Characters that may come of one."""
    content = step.get("content")
    pattern = step.get("pattern")
    if isinstance(content, str) and isinstance(pattern, dict):
        found = pattern.get("String")
        # A regular expression may match single characters, and the gaps between them.
        return max(1.0, len(content) / len(found)) if found else max(1.0, len(content) + 0.0)
    if isinstance(step.get("prepend"), str):
        return max(1.0, len(step["prepend"]) / MAX_GROWTH)
    table = step.get("precompiled_charsmap")
    if isinstance(table, str):
        return max(1.0, _longest(table) / MAX_MAPPED_BYTES * MAX_GROWTH)
    return 1.0


def _longest(table: str) -> int:
    """Bytes of the longest text in a table of SentencePiece: a trie, preceded by its size, then texts that end with a
    zero."""
    content = base64.b64decode(table)
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return max(map(len, texts.split(b"\0")))
