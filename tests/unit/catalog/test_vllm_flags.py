"""The list of vLLM's settings, against what becomes of each."""

from pagemill.catalog.vllm_flags import DEFAULTS, SECTIONS, SHORT_FLAGS


def test_every_setting_is_listed_once() -> None:
    assert len(DEFAULTS) == sum(map(len, SECTIONS.values())) == 316
    assert set(SHORT_FLAGS.values()) <= set(DEFAULTS)
