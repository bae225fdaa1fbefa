import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from pagemill.cli.session import Delta, Usage
from pagemill.cli.session_inproc import InprocSession
from pagemill.errors import RequestError
from tests.fakes.async_llm import FakeLLM

PIECES = [Delta("one "), Delta("two "), Delta("three", "stop", Usage(3, 3, 2))]


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM(temperature=0.6, top_p=0.9)


@pytest.fixture
def session(llm: FakeLLM) -> Iterator[InprocSession]:
    session = InprocSession(llm, "fake")
    yield session
    session.close()
    assert llm.is_shut_down


def test_a_completion(session: InprocSession, llm: FakeLLM):
    assert list(session.stream_completion("Hi", {"temperature": 0.0})) == PIECES
    prompt, params = llm.requests[0]
    assert prompt == {"prompt": "Hi"}
    assert (params.temperature, params.top_p, params.max_tokens) == (0.0, 0.9, None)


def test_a_chat_goes_through_the_template(session: InprocSession, llm: FakeLLM):
    deltas = list(session.stream_chat([{"role": "user", "content": "Hi"}], {}))
    assert "".join(delta.text for delta in deltas) == "one two three"
    assert deltas[-1].usage == Usage(len("<user>Hi"), 3, 2)
    prompt, params = llm.requests[0]
    assert prompt == {"prompt_token_ids": [ord(char) for char in "<user>Hi"]}
    assert params.temperature == 0.6


def test_closing_an_answer_aborts_its_request(session: InprocSession, llm: FakeLLM):
    deltas = session.stream_completion("Hi", {})
    next(deltas)
    assert llm.num_closed == 0
    deltas.close()
    assert llm.num_closed == 1
    assert len(list(session.stream_completion("Again", {}))) == 3


def test_ctrl_c_while_waiting_aborts_and_the_session_goes_on(session: InprocSession, llm: FakeLLM):
    def interrupt_at_the_second(number: int) -> None:
        if number == 1:
            os.kill(os.getpid(), signal.SIGINT)

    llm.before_piece = interrupt_at_the_second
    seen = []
    with pytest.raises(KeyboardInterrupt):
        seen.extend(session.stream_completion("Hi", {}))
    assert llm.num_closed == 1
    llm.before_piece = None
    assert list(session.stream_completion("Again", {})) == PIECES


def test_errors_of_the_engine_pass():
    class Refusing(FakeLLM):
        async def generate(self, prompt, sampling_params):
            await asyncio.sleep(0)
            raise RequestError("the prompt is too long", "prompt")
            yield

    session = InprocSession(Refusing(), "fake")
    with pytest.raises(RequestError, match="too long"):
        list(session.stream_completion("Hi", {}))
    session.close()
