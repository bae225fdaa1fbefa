"""/api/chat with tools on a real engine: random weights that begin calls, and end objects, whenever they may, held to
the default envelope. Whole and streamed."""

import json

import httpx
import pytest
from tokenizers import Tokenizer

from pagemill import LogitsProcessor
from pagemill.config.arguments import EngineArgs
from pagemill.launch import build_inproc
from tests.fakes.engine import make_app
from tests.fakes.tiny_checkpoint import VOCAB_SIZE, byte_tokenizer, make_checkpoint

CALL = "<tool_call>"
CALL_ID = 259
END_ID = byte_tokenizer().token_to_id("}")
NAMES = ("weather", "now")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": TOOLS,
    "options": {"num_predict": 200, "seed": 3, "temperature": 1},
}


class BeginsCalls(LogitsProcessor):
    """Makes the mark of a call far likelier than all else, then the end of an object: calls are short."""

    def add(self, new):
        return True

    def apply(self, logits, rows):
        assert logits.shape[1] == VOCAB_SIZE
        logits[:, CALL_ID] += 200
        logits[:, END_ID] += 100


@pytest.fixture
async def client(tmp_path):
    folder = make_checkpoint(tmp_path / "calls", "LlamaForCausalLM")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([CALL, "</tool_call>"])
    assert tokenizer.token_to_id(CALL) == CALL_ID
    tokenizer.save(str(folder / "tokenizer.json"))
    args = EngineArgs(
        str(folder),
        dtype="float32",
        max_model_len=512,
        cpu_threads=1,
        logits_processors=[f"{__name__}:BeginsCalls"],
        structured_outputs_config={"disable_any_whitespace": True},
    )
    engine = build_inproc(args).llm
    try:
        app = make_app(engine, enable_auto_tool_choice=True, tool_call_parser="hermes", served_model_name=["tiny"])
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=300) as client:
            yield client
    finally:
        await engine.shutdown()


async def test_calls_have_the_names_of_tools_and_objects_as_arguments(client):
    answer = await client.post("/api/chat", json=BODY | {"stream": False})
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    calls = whole["message"]["tool_calls"]
    assert calls
    for call in calls:
        assert call["function"]["name"] in NAMES
        assert isinstance(call["function"]["arguments"], dict)
    assert CALL not in whole["message"]["content"]

    streamed = await client.post("/api/chat", json=BODY)
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert [call for line in lines for call in line["message"].get("tool_calls", ())] == calls
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert (lines[-1]["done"], lines[-1]["done_reason"]) == (True, whole["done_reason"])
