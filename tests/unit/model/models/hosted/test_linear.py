"""How linear layers are split by a plan of transformers."""

import pytest

from pagemill.errors import ConfigError
from pagemill.model.models.hosted.linear import style_of

PLAN = {"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise", "layers.*.norm": "replicated", "x": "packed"}


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("layers.12.q_proj", "colwise"),
        ("layers.0.o_proj", "rowwise"),
        ("layers.3.norm", None),
        ("layers.a.q_proj", None),
        ("outer.layers.0.q_proj", None),
        ("lm_head", None),
    ],
)
def test_a_star_is_a_number(name, style):
    assert style_of(name, PLAN) == style


def test_a_style_that_is_not_known_is_named():
    with pytest.raises(ConfigError, match="splits x as 'packed', which is not supported"):
        style_of("x", PLAN)
