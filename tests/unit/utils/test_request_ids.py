from pagemill.utils.request_ids import random_uuid


def test_ids_are_drawn() -> None:
    drawn = {random_uuid() for _ in range(100)}
    assert len(drawn) == 100 and {len(name) for name in drawn} == {32}
