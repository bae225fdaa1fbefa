"""Large bodies are another process's work: meanwhile the server answers everybody else, and what a body does to that
process, it does to nobody else."""

import threading
import time

import httpx
import pytest

from pagemill.config.model_names import ModelNames
from pagemill.serve.http.intake import LARGE_BODY_BYTES
from pagemill.serve.http.preparer_pool import PreparerPool
from pagemill.serve.http.preparer_process import HelperSpec
from tests.fakes.configs import model_config, scheduler_config
from tests.fakes.engine import FACTS, running_server, wait_until
from tests.fakes.fake_core import FakeCore
from tests.fakes.fake_tokenizer import ByteTokenizer
from tests.fakes.preparer_child import ENTRY
from tests.security.raw import connect, post

PATH = "/v1/completions"
PADDING = {"unknown": "x" * LARGE_BODY_BYTES}

pytestmark = pytest.mark.slow


@pytest.fixture
def url():
    core = FakeCore()
    spec = HelperSpec(
        model=model_config(),
        facts=FACTS,
        scheduler=scheduler_config(),
        ready=core.ready,
        num_engines=1,
        model_names=ModelNames(("fake",)),
    )
    with running_server(core, helpers=PreparerPool(spec, ENTRY, max_helpers=1)) as url:
        yield url


def ask(url, prompt, answers, **fields):
    answers.append(httpx.post(url + PATH, json={"prompt": prompt, "max_tokens": 4} | fields, timeout=300))


def test_others_are_answered_while_a_large_body_is_prepared(url, tmp_path):
    answers = []
    large = threading.Thread(target=ask, args=(url, f"slow!{tmp_path}", answers), kwargs=PADDING)
    large.start()
    wait_until((tmp_path / "begun").exists)
    for _ in range(10):
        assert httpx.get(f"{url}/health", timeout=300).status_code == 200
    ask(url, "hi", answers)
    (tmp_path / "end").touch()
    large.join()
    small, late = answers
    assert [answer.status_code for answer in answers] == [200, 200]
    assert small.json()["choices"][0]["text"] == "hihi" and late.json()["choices"][0]["text"] == "slow"


def test_a_body_that_kills_its_process_is_answered_with_an_error_that_says_so(url):
    answers = []
    for prompt in ("kill!", "good"):
        ask(url, prompt, answers, **PADDING)
    killed, good = answers
    assert killed.status_code == 500
    assert "died of this one" in killed.json()["error"]["message"]
    assert killed.json()["error"]["code"] == "generation_failed"
    assert good.status_code == 200


def test_large_and_small_bodies_get_the_same_answers(url):
    for body in ({"prompt": ""}, {"prompt": [300]}, {"prompt": "a", "model": "other"}, {"prompt": "a", "n": 0}):
        answers = []
        for padding in ({}, PADDING):
            ask(url, answers=answers, **body, **padding)
        small, large = answers
        assert (small.status_code, small.json()) == (large.status_code, large.json())


def test_bodies_of_clients_that_left_are_not_prepared(url):
    """One of them may be at work; the others would take three seconds each."""
    ask(url, "warm", [], **PADDING)
    for _ in range(40):
        with connect(url) as sock:
            sock.sendall(post({"prompt": "slow!", "max_tokens": 4} | PADDING, PATH))
            time.sleep(0.02)
    begun, answers = time.monotonic(), []
    ask(url, "hi", answers, **PADDING)
    assert answers[0].status_code == 200
    assert time.monotonic() - begun < 60


def test_all_bodies_are_large_where_the_tokenizer_may_take_very_long(monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "may_stall", True)
    core = FakeCore()
    spec = HelperSpec(model_config(), FACTS, scheduler_config(), core.ready, 1, ModelNames(("fake",)))
    with running_server(core, helpers=PreparerPool(spec, ENTRY, max_helpers=1)) as url:
        answers = []
        for prompt in ("kill!", "good"):
            ask(url, prompt, answers)
    killed, good = answers
    assert killed.status_code == 500 and "died of this one" in killed.json()["error"]["message"]
    assert good.status_code == 200
