import pytest

from pagemill.cli.main import main
from tests.unit.cli.conftest import FakeLaunch


def test_flags_reach_their_sections(launch: FakeLaunch):
    launch.code = 7
    argv = [
        "serve",
        "org/model",
        "--port",
        "9000",
        "--host",
        "::1",
        "--max-num-seqs",
        "4",
        "--no-enable-prefix-caching",
    ]
    assert main([*argv, "--hf-overrides", '{"a": 1}', "--seed", "5", "--engine-hang-timeout", "9"]) == 7
    draft = launch.engine_args[0].settings
    assert draft.model.model == "org/model"
    assert draft.model.hf_overrides == {"a": 1}
    assert draft.model.seed == 5
    assert draft.scheduler.max_num_seqs == 4
    assert draft.cache.enable_prefix_caching is False
    assert launch.fleet.engine_hang_timeout == 9.0
    assert (launch.server.host, launch.server.port) == ("::1", 9000)


def test_without_a_model_the_default_is_served(launch: FakeLaunch):
    assert main(["serve"]) == 0
    assert launch.engine_args[0].settings.model.model == "smollm2"


def test_the_model_may_be_a_flag(launch: FakeLaunch):
    assert main(["serve", "--model", "x.gguf"]) == 0
    assert launch.engine_args[0].settings.model.model == "x.gguf"


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["serve", "a", "--model", "b"], 2, "two models: MODEL is 'a', --model is 'b'"),
        (["serve", "--max-num-seqs", "0"], 1, "max_num_seqs=0 is too small: at least 1"),
        (["serve", "--port", "-1"], 1, "port=-1 is too small: at least 0"),
    ],
)
def test_bad_settings_start_nothing(
    argv: list[str], code: int, message: str, launch: FakeLaunch, capsys: pytest.CaptureFixture[str]
):
    assert main(argv) == code
    assert message in capsys.readouterr().err
    assert launch.engine_args == []
