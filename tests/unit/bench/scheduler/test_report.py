import json
from pathlib import Path

import pytest

from pagemill.bench.result import write_json
from pagemill.bench.scheduler.measure import Measured, Side
from pagemill.bench.scheduler.report import figures, table
from pagemill.errors import ConfigError


def side(engine: str, **values: list[float]) -> Side:
    made = Side(lambda method: {"engine": engine, "max_num_seqs": 4})
    made.values = values
    return made


OURS = side("ours 1", step_ms_256=[1.0, 2.0, 4.0], admit_32k_ms=[3.0] * 3, hash_ns_per_token_xxhash=[5.0] * 3)
THEIRS = side("theirs 2", step_ms_256=[5.0, 4.0, 12.0], admit_32k_ms=[6.0] * 3)


def test_alone():
    result = figures(Measured(OURS, None, 99))
    assert (result["step_ms_256"], result["admit_32k_ms"], result["num_cached_blocks"]) == (2.0, 3.0, 99)
    assert result["spread"]["step_ms_256"] == [1.0, 4.0]
    assert not [name for name in result if name.startswith("ratio")] and "peer" not in result


def test_a_ratio_is_the_median_of_theirs_over_ours_within_a_repetition():
    result = figures(Measured(OURS, THEIRS, 99))
    assert (result["ratio_256"], result["ratio_admit_32k"]) == (3.0, 2.0)
    assert result["spread"]["ratio_256"] == [2.0, 5.0]
    assert "ratio_hash_ns_per_token_xxhash" not in result
    assert result["peer"]["step_ms_256"] == 5.0
    assert result["peer"]["settings"]["engine"] == "theirs 2"


def test_the_table_has_a_line_per_figure_and_the_settings():
    lines = table(Measured(OURS, THEIRS, 99)).splitlines()
    assert lines[0].split() == ["ours", "1", "theirs", "2", "ratio"]
    assert " ".join(lines[1].split()) == "step_ms_256 2 (1 - 4) 5 (4 - 12) 3 (2 - 5)"
    assert lines[3].split() == ["hash_ns_per_token_xxhash", "5", "-"]
    assert lines[-2:] == ["ours 1: max_num_seqs=4", "theirs 2: max_num_seqs=4"]
    assert "ratio" not in table(Measured(OURS, None, 99))


def test_json(tmp_path: Path):
    path = tmp_path / "f.json"
    write_json(path, figures(Measured(OURS, THEIRS, 99)), {"steps": 3})
    saved = json.loads(path.read_text())
    assert saved["arguments"] == {"steps": 3} and saved["ratio_256"] == 3.0
    with pytest.raises(ConfigError, match="cannot write"):
        write_json(tmp_path, {}, {})
