"""/api/tags, /api/show, /api/ps and /api/version."""

import dataclasses
import struct
from pathlib import Path

import httpx
import pytest

from pagemill.config.pooler_config import PoolerConfig
from pagemill.serve.http.routes.ollama_models import short
from tests.fakes.engine import FACTS, make_app, make_engine
from tests.unit.serve.http.conftest import Connect


async def test_the_names_of_the_model(connect: Connect) -> None:
    client = await connect(served_model_name=("a", "b"), model_alias=("x*=default",))
    models = (await client.get("/api/tags")).json()["models"]
    assert [(card["name"], card["model"]) for card in models] == [("a", "a"), ("b", "b")]
    assert models[0]["details"]["quantization_level"] == "float32"
    assert len(models[0]["digest"]) == 64


async def test_size_and_age_are_those_of_the_weights(tmp_path: Path) -> None:
    header = b'{"a.weight": {"dtype": "F16", "shape": [1000, 1345]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "config.json").write_bytes(b"{}")
    engine = make_engine(facts=dataclasses.replace(FACTS, path=str(tmp_path), name=str(tmp_path)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine)), base_url="http://test") as client:
        card = (await client.get("/api/ps")).json()["models"][0]
        shown = (await client.post("/api/show", json={"model": str(tmp_path)})).json()
    await engine.shutdown()
    size = 8 + len(header)
    assert (card["size"], card["size_vram"], card["context_length"]) == (size, size, 256)
    assert card["details"] == shown["details"]
    assert card["details"]["parameter_size"] == "1.34M"
    assert shown["model_info"]["general.parameter_count"] == 1_345_000
    assert card["modified_at"] == shown["modified_at"] > "2020"
    assert str(tmp_path) not in str(shown), "where the files are is told to nobody"


@pytest.mark.parametrize(
    ("count", "size"),
    [(999, "999"), (2000, "2K"), (134_515_008, "134.52M"), (7_000_000, "7M"), (8_030_261_248, "8.0B"), (10**9, "1B")],
)
def test_numbers_are_written_as_ollama_writes_them(count: int, size: str) -> None:
    assert short(count) == size


async def test_what_the_model_is_and_can_do(connect: Connect) -> None:
    client = await connect(reasoning_parser="qwen3", enable_auto_tool_choice=True, tool_call_parser="hermes")
    shown = (await client.post("/api/show", json={"model": "fake:latest"})).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["template"] == "fake"
    assert shown["details"]["parameter_size"] == "" and "general.parameter_count" not in shown["model_info"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 256
    assert shown["model_info"][f"{family}.embedding_length"] == 8
    assert (await (await connect()).post("/api/show", json={"name": "fake"})).json()["capabilities"] == ["completion"]


async def test_a_model_for_vectors() -> None:
    engine = make_engine(pooler=PoolerConfig(pooling_type="LAST", normalize=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine)), base_url="http://test") as client:
        assert (await client.post("/api/show", json={"model": "fake"})).json()["capabilities"] == ["embedding"]
    await engine.shutdown()


@pytest.mark.parametrize(("body", "status"), [
    ({}, 400), ({"model": ""}, 400), ({"model": 5}, 400), ({"model": "other"}, 404), ({"model": "x" * 20_000}, 413),
])  # fmt: skip
async def test_what_is_wrong_is_told(connect: Connect, body: dict[str, object], status: int) -> None:
    answer = await (await connect()).post("/api/show", json=body)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}


async def test_the_version_is_one_that_clients_know(connect: Connect) -> None:
    major, minor, _ = (await (await connect()).get("/api/version")).json()["version"].split(".")
    assert (int(major), int(minor)) >= (0, 6)


async def test_all_of_them_need_the_key(connect: Connect) -> None:
    client = await connect(api_key=("k",))
    for path in ("/api/tags", "/api/ps", "/api/version"):
        answer = await client.get(path)
        assert (answer.status_code, set(answer.json())) == (401, {"error"})
