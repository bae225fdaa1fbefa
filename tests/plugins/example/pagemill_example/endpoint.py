"""An endpoint of one's own."""

from fastapi import APIRouter

router = APIRouter()


@router.get("/example")
async def example() -> dict[str, str]:
    """Says where it comes from."""
    return {"from": "pagemill_example"}
