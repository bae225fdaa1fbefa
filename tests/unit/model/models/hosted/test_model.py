"""What plans of transformers are followed."""

import pytest

from pagemill.errors import ConfigError
from pagemill.model.models.hosted.model import check_plan

PLAN = {"layers.*.q_proj": "colwise"}


def test_a_plan_that_can_be_followed():
    check_plan("it", PLAN, {"num_attention_heads": 4, "num_key_value_heads": 2}, 2)


@pytest.mark.parametrize(
    ("plan", "heads", "why"),
    [
        ({}, 4, "transformers has no plan to split it"),
        (PLAN, 3, "does not divide num_key_value_heads=3 of it"),
        ({"layers.*.q_proj": "packed"}, 4, "'packed', which is not supported"),
    ],
)
def test_one_that_cannot_is_refused(plan, heads, why):
    with pytest.raises(ConfigError, match=why):
        check_plan("it", plan, {"num_attention_heads": heads}, 2)
