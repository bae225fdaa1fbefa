"""/props and /slots: what clients of llama.cpp's server ask about the model and its load."""

from typing import Any

from fastapi import APIRouter, Request

from pagemill import __version__
from pagemill.serve.http.described import describes
from pagemill.serve.http.schemas.answers import Props, Slot
from pagemill.serve.http.state import services

router = APIRouter()


@router.get("/props", openapi_extra=describes(Props))
async def props(request: Request) -> dict[str, Any]:
    """The model, its chat template, and how requests are sampled that say nothing."""
    here = services(request)
    engine = here.engine
    defaults = engine.default_params
    return {
        "default_generation_settings": {
            "n_ctx": engine.max_model_len,
            "params": {
                "temperature": defaults.temperature,
                "top_k": defaults.top_k,
                "top_p": defaults.top_p,
                "min_p": defaults.min_p,
                "repeat_penalty": defaults.repetition_penalty,
            },
        },
        "total_slots": engine.num_slots,
        "model_alias": here.model.name,
        "model_path": engine.facts.public_name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": engine.tokenizer.chat_template or "",
        "bos_token": _text_of(request, engine.tokenizer.bos_token_id),
        "eos_token": _text_of(request, next(iter(engine.tokenizer.eos_token_ids), None)),
        "build_info": f"pagemill {__version__}",
    }


@router.get("/slots", openapi_extra=describes(list[Slot]))
async def slots(request: Request) -> list[dict[str, Any]]:
    """A slot for each request that may run at once. Slots are no places here: of those that work, there are as many as
    requests run."""
    engine = services(request).engine
    num_running = sum(stats.num_running for stats in engine.control.stats().values())
    return [
        {"id": number, "n_ctx": engine.max_model_len, "is_processing": number < num_running}
        for number in range(engine.num_slots)
    ]


def _text_of(request: Request, token_id: int | None) -> str:
    tokenizer = services(request).engine.tokenizer
    return "" if token_id is None else tokenizer.decode([token_id], skip_special_tokens=False)
