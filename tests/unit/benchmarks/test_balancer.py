"""benchmarks/balancer.py in small: the same work for every policy, and affinity finds more of it in the caches."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "balancer.py"


@pytest.mark.slow
def test_affinity_finds_more_than_taking_turns(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("balancer_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    small = "--engines 4 --conversations 12 --turns 3 --system-prompts 8 --system-tokens 200 --concurrency 6"
    rows = {row.policy: row for row in script.main(small.split())}
    assert set(rows) == {"prefix", "queue", "round_robin"}
    assert len({row.queries for row in rows.values()}) == 1, "every policy gets the same prompts"
    assert all(sum(row.chosen.values()) == 36 for row in rows.values())
    assert rows["prefix"].hit_rate > 1.2 * rows["round_robin"].hit_rate
    assert all(rows["prefix"].chosen[index] for index in range(4)), "no engine is left idle"
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 5
    assert f"{rows['prefix'].hit_rate:.1%}" in table[2]
