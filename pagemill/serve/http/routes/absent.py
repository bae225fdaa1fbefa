"""Routes of servers that clients also know, which nothing here answers: 404, with the reason."""

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import APIRouter, Response

from pagemill.serve.http.errors import NotHereError
from pagemill.serve.http.site_guard import ANY_CONTENT_TYPE

router = APIRouter(include_in_schema=False)

_NO_AUDIO = "this server takes text only: no model here hears"
_NO_HEADS = "no model here has OpenAI's categories; /classify tells the classes of a model that was made for some"
_NO_ADAPTERS = "adapters are not loaded; serve a checkpoint into which the adapter is merged"
_WEIGHTS_STAY = "weights and cache stay where they are as long as the server runs"
_NO_TRAINING = "weights are read when the server starts, and not changed"
_ONE_MODEL = "the model is the one that the server was started with: no other is fetched, made, copied or removed"
_PROFILES = "set PAGEMILL_SERVER_DEV_MODE=1 and PAGEMILL_TORCH_PROFILER_DIR, or use `pagemill bench --profile`"
_FLEET = "the number of engines is chosen when the server is started: --data-parallel-size"

ABSENT: Final[dict[str, str]] = {
    "/v1/audio/transcriptions": _NO_AUDIO,
    "/v1/audio/translations": _NO_AUDIO,
    "/v1/realtime": _NO_AUDIO,
    "/v1/audio/speech": "no model here speaks",
    "/v1/images/generations": "no model here makes images",
    "/v1/moderations": _NO_HEADS,
    "/v1/load_lora_adapter": _NO_ADAPTERS,
    "/v1/unload_lora_adapter": _NO_ADAPTERS,
    "/sleep": _WEIGHTS_STAY,
    "/wake_up": _WEIGHTS_STAY,
    "/is_sleeping": _WEIGHTS_STAY,
    "/release_kv_cache_memory": _WEIGHTS_STAY,
    "/update_weights": _NO_TRAINING,
    "/init_weight_transfer_engine": _NO_TRAINING,
    "/scale_elastic_ep": _FLEET,
    "/is_scaling_elastic_ep": _FLEET,
    "/start_profile": _PROFILES,
    "/stop_profile": _PROFILES,
    "/collective_rpc": "start the server with PAGEMILL_SERVER_DEV_MODE=1",
    "/reset_mm_cache": "models here take text only: there is no cache of media",
    "/reset_encoder_cache": "models here take text only: there is no cache of media",
    "/invocations": "send the body to the route that it is for: /v1/chat/completions, /v1/completions, /v1/embeddings",
    "/inference/v1/generate": "send token ids to /v1/completions, with return_token_ids",
    "/tokenizer_info": "what is known of the tokenizer is at /props; use /tokenize and /detokenize",
    "/cohere/v2/chat": "use /v1/chat/completions",
    "/v1/systemone": "there is one model, and no router",
    "/v1/chat/completions/derender": "use /detokenize",
    "/v1/completions/derender": "use /detokenize",
    "/generative_scoring": "use /v1/completions with logprobs",
    "/api/create": _ONE_MODEL,
    "/api/copy": _ONE_MODEL,
    "/api/push": _ONE_MODEL,
    "/api/pull": _ONE_MODEL,
    "/api/delete": _ONE_MODEL,
}
"""Path -> why nothing is there."""


def _teller(reason: str) -> Callable[[], Awaitable[Response]]:
    async def tell() -> Response:
        raise NotHereError(reason)

    return tell


for _path, _reason in ABSENT.items():
    router.add_api_route(
        _path,
        _teller(_reason),
        methods=["GET", "POST", "DELETE"],
        response_model=None,
        openapi_extra=ANY_CONTENT_TYPE,  # sounds come as forms, and pulls as curl sends them: the reason is the answer
    )
