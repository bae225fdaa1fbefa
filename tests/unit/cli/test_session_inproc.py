import asyncio
import os
import signal

import pytest

from pagemill.cli.session import Delta, Usage
from pagemill.cli.session_inproc import InprocSession
from pagemill.errors import RequestError
from tests.fakes.launched_engine import FakeLaunched, FakeLLM

PIECES = [Delta("one "), Delta("two "), Delta("three", "stop", Usage(3, 3, 2))]


@pytest.fixture
def launched() -> FakeLaunched:
    return FakeLaunched(temperature=0.6, top_p=0.9)


@pytest.fixture
def session(launched: FakeLaunched):
    session = InprocSession(launched, "fake")
    yield session
    session.close()
    assert launched.closed


def test_a_completion(session: InprocSession, launched: FakeLaunched):
    assert list(session.stream_completion("Hi", {"temperature": 0.0})) == PIECES
    prompt, params = launched.llm.requests[0]
    assert prompt == {"prompt": "Hi"}
    assert (params.temperature, params.top_p, params.max_tokens) == (0.0, 0.9, None)


def test_a_chat_goes_through_the_template(session: InprocSession, launched: FakeLaunched):
    deltas = list(session.stream_chat([{"role": "user", "content": "Hi"}], {}))
    assert "".join(delta.text for delta in deltas) == "one two three"
    assert deltas[-1].usage == Usage(len("<user>Hi"), 3, 2)
    prompt, params = launched.llm.requests[0]
    assert prompt == {"prompt_token_ids": [ord(char) for char in "<user>Hi"]}
    assert params.temperature == 0.6


def test_closing_an_answer_aborts_its_request(session: InprocSession, launched: FakeLaunched):
    deltas = session.stream_completion("Hi", {})
    next(deltas)
    assert launched.llm.num_closed == 0
    deltas.close()
    assert launched.llm.num_closed == 1
    assert len(list(session.stream_completion("Again", {}))) == 3


def test_ctrl_c_while_waiting_aborts_and_the_session_goes_on(session: InprocSession, launched: FakeLaunched):
    def interrupt_at_the_second(number: int) -> None:
        if number == 1:
            os.kill(os.getpid(), signal.SIGINT)

    launched.llm.before_piece = interrupt_at_the_second
    seen = []
    with pytest.raises(KeyboardInterrupt):
        seen.extend(session.stream_completion("Hi", {}))
    assert launched.llm.num_closed == 1
    launched.llm.before_piece = None
    assert list(session.stream_completion("Again", {})) == PIECES


def test_errors_of_the_engine_pass(launched: FakeLaunched):
    class Refusing(FakeLLM):
        async def generate(self, prompt, sampling_params):
            await asyncio.sleep(0)
            raise RequestError("the prompt is too long", "prompt")
            yield

    session = InprocSession(FakeLaunched(Refusing()), "fake")
    with pytest.raises(RequestError, match="too long"):
        list(session.stream_completion("Hi", {}))
    session.close()
