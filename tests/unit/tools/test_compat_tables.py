"""docs/compat.md: every name of vLLM has one fate, and the counts are those of the tables."""

import re

import pytest

from pagemill.config.arguments import EngineArgs
from pagemill.errors import ConfigError
from tools import compat_tables, gen_docs
from tools.compat_tables import Fate

FLAGS = [(name, default) for _, name, default in compat_tables.flags()]


@pytest.mark.parametrize(("name", "default"), FLAGS, ids=[name for name, _ in FLAGS])
def test_every_flag_has_a_fate_and_a_reason(name: str, default: object) -> None:
    fate, why = compat_tables.fate_of_flag(name)
    assert why or fate is Fate.WORKS
    if fate in (Fate.REFUSED, Fate.ELSEWHERE):
        EngineArgs(**{name: default})
        with pytest.raises(ConfigError, match=f"{name} is not supported: "):
            EngineArgs(**{name: "something else"})


def test_a_name_that_nobody_knows_has_none() -> None:
    with pytest.raises(KeyError):
        compat_tables.fate_of_flag("no_such")


def test_the_counts_are_those_of_the_page() -> None:
    page = gen_docs.compat_page()
    flags = page.partition("\n## Flags\n")[2].partition("### Earlier releases")[0]
    rows = re.findall(r"^\| `--.+?` \| ([\w ]+?) \| .*\|$", flags, re.MULTILINE)
    counts = [rows.count(fate) for fate in Fate]
    assert sum(counts) == len(FLAGS)
    assert f"{compat_tables.VERSION} | {' | '.join(map(str, [*counts, len(FLAGS)]))} |" in page
    variables = re.findall(r"^\| `VLLM_\w+` \| ([\w ]+?) \| .+\|$", page, re.MULTILINE)
    counts = [variables.count(fate) for fate in Fate]
    assert f"| variables `VLLM_*` | {' | '.join(map(str, [*counts, len(variables)]))} |" in page
    for path in gen_docs.REQUEST_BODIES:
        assert f"| fields of {path} | " in page


def test_defaults_that_differ_are_told() -> None:
    assert compat_tables.fate_of_flag("model") == (Fate.WORKS, "default `smollm2`; there `Qwen/Qwen3-0.6B`")
    assert compat_tables.fate_of_flag("dtype") == (Fate.WORKS, "")
