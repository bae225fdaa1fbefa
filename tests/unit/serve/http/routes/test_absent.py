"""Routes of other servers that nothing here answers."""

import pytest

from pagemill.serve.http.routes.absent import ABSENT
from tests.unit.serve.http.conftest import Connect


@pytest.mark.parametrize("path", ABSENT)
async def test_the_reason_is_told(connect: Connect, path: str) -> None:
    client = await connect()
    for answer in (await client.get(path), await client.post(path, json={}), await client.delete(path)):
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error if path.startswith("/api/") else error["message"]) == ABSENT[path]
