"""Values of the environment that are not free text."""

import pytest

from pagemill import envs
from pagemill.errors import ConfigError


def test_the_interval_of_the_log(monkeypatch):
    monkeypatch.delenv("PAGEMILL_LOG_STATS_INTERVAL", raising=False)
    monkeypatch.delenv("VLLM_LOG_STATS_INTERVAL", raising=False)
    assert envs.log_stats_interval_s() == 5
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "10.0")
    assert envs.log_stats_interval_s() == 10
    monkeypatch.setenv("PAGEMILL_LOG_STATS_INTERVAL", "0.5")
    assert envs.log_stats_interval_s() == 0.5


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "often"])
def test_intervals_that_are_not_allowed(monkeypatch, value):
    monkeypatch.setenv("PAGEMILL_LOG_STATS_INTERVAL", value)
    with pytest.raises(
        ConfigError, match=f"PAGEMILL_LOG_STATS_INTERVAL='{value}' is not allowed: seconds, more than 0"
    ):
        envs.log_stats_interval_s()


def test_a_secret_that_is_too_short_is_no_secret(monkeypatch):
    monkeypatch.setenv("PAGEMILL_IPC_SECRET", "sixteen letters!")
    assert envs.ipc_secret() == "sixteen letters!"
    monkeypatch.setenv("PAGEMILL_IPC_SECRET", "fifteen letters")
    with pytest.raises(ConfigError, match="PAGEMILL_IPC_SECRET has 15 characters; at least 16 are needed"):
        envs.ipc_secret()


def test_variables_that_nothing_reads(monkeypatch):
    before = envs.unread()
    monkeypatch.setenv("VLLM_USE_V1", "1")
    monkeypatch.setenv("PAGEMILL_LOGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("PAGEMILL_PLUGINS", "")
    assert set(envs.unread()) - set(before) == {"PAGEMILL_LOGING_LEVEL", "VLLM_USE_V1"}


@pytest.mark.parametrize(("value", "has"), [("true", True), ("4", True), ("False", False), ("0", False), ("", False)])
def test_threads_of_the_tokenizers_package(monkeypatch, value, has):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
    envs.leave_tokenizers_one_thread()
    assert envs.tokenizers_have_threads() is has


def test_servers_leave_it_one_thread(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    assert envs.tokenizers_have_threads()
    envs.leave_tokenizers_one_thread()
    assert not envs.tokenizers_have_threads()
