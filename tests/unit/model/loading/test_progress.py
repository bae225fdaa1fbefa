"""How far loading is: nothing of what is quick, a line now and then where it is not."""

import logging
import sys

import pytest

from pagemill.artifacts.describe import describe
from pagemill.model import factory
from pagemill.model.factory import load_model
from pagemill.model.loading.progress import LoadProgress
from pagemill.platforms.cpu import CpuPlatform
from pagemill.utils.timing import PhaseTimer
from tests.fakes.configs import model_config
from tests.fakes.tiny_checkpoint import make_checkpoint


class Clock:
    """Moves by `step` seconds at every look."""

    def __init__(self, step):
        self.now = 0.0
        self.step = step

    def __call__(self):
        self.now += self.step
        return self.now


def lines_of(caplog, step, **options):
    with caplog.at_level(logging.INFO):
        progress = LoadProgress(100, clock=Clock(step), **options)
        for _ in range(100):
            progress.add(1)
        progress.close()
    return [record.getMessage() for record in caplog.records]


def test_a_log_gets_lines(caplog):
    lines = lines_of(caplog, 1.0, shown=True)
    assert 3 < len(lines) < 20
    assert lines[0].startswith("loading weights: ")
    assert lines[-1].startswith("loading weights took ")


@pytest.mark.parametrize(("step", "options"), [(0.01, {"shown": True}), (1.0, {"shown": False})])
def test_what_is_quick_or_not_wanted_is_silent(caplog, step, options):
    assert lines_of(caplog, step, **options) == []


def test_a_terminal_gets_a_bar(caplog, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("pagemill.model.loading.progress.PATIENCE_S", 0.0)
    assert lines_of(caplog, 1.0, shown=True) == []
    assert "loading weights:" in capsys.readouterr().err


@pytest.mark.parametrize("wanted", [True, False])
def test_only_the_first_rank_shows_it_and_only_if_wanted(tmp_path, monkeypatch, wanted):
    seen = []
    monkeypatch.setattr(factory, "load_weights", lambda *_, shows_progress, **__: seen.append(shows_progress))
    facts = describe("m", make_checkpoint(tmp_path, "LlamaForCausalLM"))
    load_model(facts, model_config("m", dtype="float32", use_tqdm_on_load=wanted), CpuPlatform(), PhaseTimer())
    assert seen == [wanted]
