"""How long matching a name of a layer with a pattern out of a file may take. Knows nothing about layers.

Python's engine tries one way after the other. There are as many as places where each repeat may end, times two for
each part that may be left out, times the alternatives of each group that may match in the same place.
"""

import math
import re
from typing import Final

NAME_CHARS: Final = 64
"""Of most names of layers."""
_TOKEN: Final = re.compile(
    r"(?P<escape>\\.)|(?P<class>\[\^?\]?[^\]]*\])|(?P<open>\((?:\?:)?)|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<many>[*+]|\{\d*,\d*\})|(?P<option>\?)|(?P<count>\{\d+\})|(?P<char>.)",
    re.DOTALL,
)
_SPECIAL: Final = frozenset(".^$")


def num_steps(pattern: str) -> int:
    """At most about so many steps, of a pattern without lookaround, references and repeated groups."""
    groups: list[list[str | None]] = [[""]]
    repeats = 0
    ways = 1
    after_quantifier = False
    for found in _TOKEN.finditer(pattern):
        kind = found.lastgroup
        quantifier = kind in ("many", "option", "count") and not after_quantifier
        if kind == "open":
            groups.append([""])
        elif kind == "close" and len(groups) > 1:
            ways *= _alike(groups.pop())
            groups[-1][-1] = None
        elif kind == "bar":
            groups[-1].append("")
        else:
            groups[-1][-1] = _longer(groups[-1][-1], str(kind), found.group())
        if quantifier and kind == "many":
            repeats += 1
        elif quantifier and kind == "option":
            ways *= 2
        after_quantifier = quantifier
    for branches in groups:
        ways *= _alike(branches)
    return math.comb(NAME_CHARS + repeats, repeats) * ways


def _longer(branch: str | None, kind: str, text: str) -> str | None:
    """A branch and one more piece of it; None for one that is not a fixed text."""
    fixed = (kind == "char" and text not in _SPECIAL) or (kind == "escape" and not text[1].isalnum())
    return branch + text[-1] if fixed and branch is not None else None


def _alike(branches: list[str | None]) -> int:
    """How many branches may match in the same place: of fixed texts, those that others begin with."""
    texts = [branch for branch in branches if branch is not None]
    if len(texts) < len(branches):
        return len(branches)
    return max(sum(text.startswith(other) for other in texts) for text in texts)
