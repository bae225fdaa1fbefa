"""Choosing a backend: the first that fits, the requested one, or every reason why not."""

import pytest

from pagemill.errors import ConfigError
from pagemill.model.attention.interface import AttentionLayerSpec
from pagemill.model.attention.selector import choose

SPEC = AttentionLayerSpec(4, 2, 64, 0.125)


def test_the_first_that_fits_is_taken():
    assert choose(SPEC, "cpu", "float16", None, ("CPU_ATTN", "TORCH_CPU")).name == "TORCH_CPU"


def test_a_requested_backend_that_does_not_fit_says_why():
    with pytest.raises(ConfigError, match=r"CPU_ATTN is not valid .* \['dtype float16 not supported'"):
        choose(SPEC, "cpu", "float16", "CPU_ATTN", ("TORCH_CPU",))


def test_every_reason_is_listed_when_none_fits():
    with pytest.raises(ConfigError, match=r"CPU_ATTN: device tpu not supported.*TORCH_CPU: device tpu not supported"):
        choose(SPEC, "tpu", "float32", None, ("CPU_ATTN", "TORCH_CPU"))


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match="CPU_ATTN, TORCH_CPU"):
        choose(SPEC, "cpu", "float32", "FLASH", ())
