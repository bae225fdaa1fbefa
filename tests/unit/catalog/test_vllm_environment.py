"""Variables of vLLM's environment."""

import inspect

import pytest

from pagemill import envs
from pagemill.catalog.vllm_environment import ELSEWHERE, IDLE, READ, REFUSED, why_unread


def test_every_variable_is_in_one_table() -> None:
    tables = [READ, set(ELSEWHERE), set(IDLE), set(REFUSED)]
    assert len(set.union(*map(set, tables))) == sum(map(len, tables))


@pytest.mark.parametrize("name", sorted(READ | set(ELSEWHERE) | set(IDLE) | set(REFUSED)))
def test_what_is_said_to_be_read_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"VLLM_{name}", "1")
    assert (f"VLLM_{name}" in envs.unread()) is (name not in READ)
    if name not in READ:
        assert why_unread(f"VLLM_{name}") in (ELSEWHERE | IDLE | REFUSED)[name]


def test_what_nobody_knows() -> None:
    for name in ("VLLM_NO_SUCH", "PAGEMILL_USE_V1", "PAGEMILL_LOGING_LEVEL"):
        assert why_unread(name) == "nothing reads this variable of the environment"
    assert "PAGEMILL_API_KEY" in str(inspect.getdoc(envs.api_key))
