"""The steps of a pattern: few for what checkpoints have, many for what takes long."""

import math
import re

import pytest

from pagemill.model.quantization.fields import Names
from pagemill.model.quantization.pattern_steps import num_steps

LAYERS = "|".join(map(str, range(24)))
USUAL = [
    ".*lm_head",
    r".*mlp\.gate$",
    ".*self_attn.(q|k|v)_proj",
    rf".*\.layers\.(?:{LAYERS})\..*(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)$",
    r"^model\.layers\.(1[0-9]|2[0-9])\.mlp\.(gate|up)_proj",
    r"(model\.)?layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj",
    r".*\.mlp\.gate_up_proj[|]?$",
]  # fmt: skip
NAME = "model.layers.17.self_attn.q_proj"


@pytest.mark.parametrize("pattern", USUAL)
def test_patterns_of_checkpoints_are_read(pattern: str) -> None:
    assert Names([f"re:{pattern}"]).has(NAME) == bool(re.match(pattern, NAME))
    assert num_steps(pattern) < 200_000


def test_what_counts() -> None:
    assert num_steps("abc") == num_steps(r"a\.b[c|d?*]") == num_steps("(?:ab|ba|c)d") == num_steps("a{3}") == 1
    assert num_steps(".*") == num_steps(".*?") == num_steps(".+") == num_steps("a{2,}") == 65
    assert num_steps("a?b??c?+") == 8
    assert num_steps("(1|10|2|20|200)") == 3
    assert num_steps("(a|.)(b|.|c)") == 6
    assert num_steps("a|b|ab") == 2
    assert num_steps(".?" * 40 + "!") == 1 << 40
    assert num_steps(".*.*.*") == math.comb(67, 3)
    assert num_steps("(") == num_steps(")") == num_steps("[") == 1
