"""An executor of one worker in this process."""

import pytest

from pagemill.catalog.executors import EXECUTORS
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.errors import ConfigError
from tests.fakes.scripted_worker import ScriptedWorker


def test_the_catalogue_knows_it():
    assert EXECUTORS.resolve("uni") is UniprocExecutor


def test_a_worker_is_built_by_name_with_its_arguments_and_loaded():
    executor = UniprocExecutor("tests.fakes.scripted_worker:ScriptedWorker", {"only": "spec"})
    assert executor.kv_cache_specs() == [{"only": "spec"}]


def test_calls_reach_the_worker_and_shutdown_does_once():
    worker = ScriptedWorker(kv_bytes=123)
    executor = UniprocExecutor(worker)
    assert executor.available_kv_bytes() == [123]
    assert executor.call_all("warm_up") == [None]
    executor.shutdown()
    executor.shutdown()
    assert worker.calls == ["load_model", "available_kv_bytes", "warm_up", "shutdown"]


@pytest.mark.parametrize("path", ["no.such.module:Worker", "tests.fakes.scripted_worker:Missing", "tests", ""])
def test_a_name_that_leads_nowhere_is_refused(path):
    with pytest.raises(ConfigError, match="'module:callable' is expected"):
        UniprocExecutor(path)
