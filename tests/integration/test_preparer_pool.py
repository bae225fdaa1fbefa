"""Helper processes of an API server: what they return, and what becomes of a request that kills one."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagemill.artifacts.describe import describe
from pagemill.config.model_names import ModelNames
from pagemill.errors import EngineOverloadedError, ModelNotFoundError, RequestError, UnavailableError
from pagemill.messages.engine_io import EngineReady
from pagemill.serve.http import preparer_pool
from pagemill.serve.http.errors import GenerationFailedError
from pagemill.serve.http.preparer import CHAT, COMPLETIONS, CONTINUED_RESPONSES, AnswerForm, PreparedPrompt
from pagemill.serve.http.preparer_pool import PreparerPool
from pagemill.serve.http.preparer_process import HelperSpec
from tests.fakes.configs import model_config, scheduler_config
from tests.fakes.engine import FACTS
from tests.fakes.fake_tokenizer import BOS, VOCAB_SIZE
from tests.fakes.preparer_child import ENTRY
from tests.fakes.tiny_checkpoint import make_checkpoint

pytestmark = pytest.mark.slow

SPEC = HelperSpec(
    model=model_config(),
    facts=FACTS,
    scheduler=scheduler_config(),
    ready=EngineReady(max_model_len=4096, vocab_size=VOCAB_SIZE, num_blocks=1024, block_size=16),
    num_engines=1,
    model_names=ModelNames(("fake",)),
)


@pytest.fixture
async def pool() -> AsyncIterator[PreparerPool]:
    pool = PreparerPool(SPEC, ENTRY, max_helpers=1)
    yield pool
    await pool.close()


def completion(prompt: Any, **fields: Any) -> bytes:
    return json.dumps({"prompt": prompt, **fields}).encode()


async def test_bodies_come_back_as_the_requests_that_they_ask_for(pool: PreparerPool) -> None:
    form, one, two = await pool.prepare(COMPLETIONS, completion(["a", "bc"], stream=True, echo=True, max_tokens=3))
    assert form == AnswerForm(stream=True)
    assert isinstance(one, PreparedPrompt) and isinstance(two, PreparedPrompt)
    assert one.request.prompt_token_ids == [BOS, 97] and one.echo == "a"
    assert two.request.prompt_token_ids == [BOS, 98, 99] and two.request.params.max_tokens == 3
    assert one.request.request_id != two.request.request_id
    _, chat = await pool.prepare(CHAT, json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode())
    assert isinstance(chat, PreparedPrompt) and bytes(chat.request.prompt_token_ids) == b"[user]hi[assistant]"
    continued = b'{"before":[{"type":"message","role":"user","content":[{"text":"hi"}]}],"body":{"input":"ho"}}'
    form, response = await pool.prepare(CONTINUED_RESPONSES, continued)
    assert isinstance(form, AnswerForm) and form.response is not None and b'"text":"ho"' in form.response.items
    assert isinstance(response, PreparedPrompt)
    assert bytes(response.request.prompt_token_ids) == b"[user]hi[user]ho[assistant]"


class NeverWritten(bytes):
    """A body whose repr, which takes a quarter of a second for a large one, nobody asks for."""

    def __repr__(self) -> str:
        raise AssertionError("somebody wrote out a body")


async def test_bodies_are_not_written_out(pool: PreparerPool) -> None:
    """As deque.remove does in Python 3.11 with what it does not find."""
    assert await pool.prepare(COMPLETIONS, NeverWritten(b'{"prompt": [1, 2, 3]}'))


async def test_what_is_wrong_with_a_body_is_said_as_it_would_be_here(pool: PreparerPool) -> None:
    with pytest.raises(RequestError, match="token id 300 in the prompt") as refused:
        await pool.prepare(COMPLETIONS, completion([[1], [300]]))
    assert refused.value.field == "prompt"
    with pytest.raises(ModelNotFoundError):
        await pool.prepare(COMPLETIONS, completion("a", model="another"))
    with pytest.raises(GenerationFailedError, match="failed to prepare this request"):
        await pool.prepare(COMPLETIONS, completion("fail!"))
    assert len(await pool.prepare(COMPLETIONS, completion("a"))) == 2


async def test_a_body_that_kills_its_helper_fails_alone(pool: PreparerPool) -> None:
    bodies = [completion(prompt) for prompt in ("a", "kill!", "b", "kill!", "c")]
    results = await asyncio.gather(*(pool.prepare(COMPLETIONS, body) for body in bodies), return_exceptions=True)
    died = [isinstance(result, GenerationFailedError) and "died of this one" in str(result) for result in results]
    assert died == [False, True, False, True, False]
    assert all(len(result) == 2 for result in results if isinstance(result, list))


async def test_a_helper_that_died_while_idle_is_replaced(pool: PreparerPool) -> None:
    await pool.prepare(COMPLETIONS, completion("a"))
    (helper,) = pool._idle
    await asyncio.to_thread(helper.child.kill)
    assert len(await pool.prepare(COMPLETIONS, completion("a"))) == 2


async def test_a_body_that_never_ends_is_given_up(pool: PreparerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    await pool.prepare(COMPLETIONS, completion("a"))
    monkeypatch.setattr(preparer_pool, "JOB_S", 0.2)
    with pytest.raises(GenerationFailedError, match=r"longer than 0\.2 s"):
        await pool.prepare(COMPLETIONS, completion("hang!"))
    monkeypatch.undo()
    assert len(await pool.prepare(COMPLETIONS, completion("a"))) == 2


async def test_more_bodies_than_may_wait_are_refused(pool: PreparerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparer_pool, "MAX_JOBS", 2)
    jobs = [asyncio.ensure_future(pool.prepare(COMPLETIONS, completion("a"))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EngineOverloadedError, match="2 large requests"):
        await pool.prepare(COMPLETIONS, completion("a"))
    assert [len(await job) for job in jobs] == [2, 2]
    assert len(await pool.prepare(COMPLETIONS, completion("a"))) == 2


async def test_who_leaves_gives_up_the_turn_and_the_memory(pool: PreparerPool) -> None:
    first = asyncio.ensure_future(pool.prepare(COMPLETIONS, completion("slow!")))
    await asyncio.sleep(0.1)
    others = [asyncio.ensure_future(pool.prepare(COMPLETIONS, completion("slow!"))) for _ in range(20)]
    await asyncio.sleep(0.1)
    assert len(pool._waiting) == 20
    for job in others:
        job.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert not pool._waiting
    assert len(await first) == 2


async def test_closing_ends_helpers_and_who_waits(pool: PreparerPool) -> None:
    await pool.prepare(COMPLETIONS, completion("a"))
    (helper,) = pool._idle
    jobs = [asyncio.ensure_future(pool.prepare(COMPLETIONS, completion(text))) for text in ("hang!", "a")]
    await asyncio.sleep(0.1)
    await pool.close()
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert [type(result) for result in results] == [UnavailableError, UnavailableError]
    assert helper.child.exit_status is not None
    with pytest.raises(UnavailableError):
        await pool.prepare(COMPLETIONS, completion("a"))


async def test_a_helper_whose_memory_grew_is_started_anew(pool: PreparerPool) -> None:
    await pool.prepare(COMPLETIONS, completion("a"))
    (helper,) = pool._idle
    assert len(await pool.prepare(COMPLETIONS, completion("grow!"))) == 2
    assert await asyncio.to_thread(helper.child.wait, 10) is not None
    assert not pool._idle
    assert len(await pool.prepare(COMPLETIONS, completion("a"))) == 2


async def test_files_of_the_model_that_are_gone_for_a_while(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "model", "LlamaForCausalLM")
    spec = msgspec.structs.replace(SPEC, model=model_config(model=str(folder)), facts=describe("m", folder))
    pool = PreparerPool(spec)
    away = folder.rename(tmp_path / "away")
    try:
        with pytest.raises(UnavailableError, match="files of the model cannot be read") as refused:
            await pool.prepare(COMPLETIONS, completion("a" * 500_000))
        assert str(tmp_path) not in str(refused.value)
        away.rename(folder)
        assert len(await pool.prepare(COMPLETIONS, completion("a"))) == 2
    finally:
        await pool.close()
    log = capfd.readouterr().err
    assert log.count("large requests cannot be prepared: ") == 1
    assert "Traceback" not in log
