"""POST /infill: what stands in the gap of a text, as editors ask llama.cpp's server."""

import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from pagemill.messages.outputs import CompletionOutput, RequestOutput
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.http.described import describes
from pagemill.serve.http.errors import ApiError, NotHereError
from pagemill.serve.http.generation import Generation, answer
from pagemill.serve.http.preparer import INFILL
from pagemill.serve.http.responses import ResponseHead, Usage, now
from pagemill.serve.http.schemas.answers import Infilled
from pagemill.serve.http.schemas.infill import InfillBody, InfillForm
from pagemill.serve.http.state import services

router = APIRouter()
NO_TOKENS = (
    "this model cannot fill in: its vocabulary has no tokens for what is before, after and in a gap, such as "
    "<|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>"
)
_STOP_TYPES: Final = {"length": "limit", "stop": "eos"}
"""Why an answer ended -> what clients are told; any other end has no type."""
_SETTINGS: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
    "max_tokens": "n_predict",
    "seed": "seed",
    "stop": "stop",
}
"""Sampling parameter -> what clients call it."""
_encode = msgspec.json.encode


@router.post("/infill", response_model=None, openapi_extra=describes(Infilled, body=InfillBody, event=Infilled))
async def infill(request: Request) -> Response:
    """Write what stands between two texts.

    Raises RequestError, NotHereError for a model without tokens for that, EngineOverloadedError, EngineDeadError.
    """
    here = services(request)
    if here.engine.tokenizer.fill_in is None:
        raise NotHereError(NO_TOKENS)
    form, prepared, echoes = await here.intake.prepare(INFILL, request)
    head = ResponseHead(request.scope["request_id"], here.model.name, now())
    params = prepared[0].request.params
    settings = _settings(params) if isinstance(params, SamplingParams) else {}
    deltas = InfillDeltas(
        head, Usage(prepared, here.engine.block_size), form.infill or InfillForm(), echoes[0], settings
    )
    return await answer(request, form, Generation(here.engine, prepared, deltas))


class InfillDeltas:
    """One answer, as events or as a body; both are made of outputs that come one by one."""

    def __init__(
        self, head: ResponseHead, usage: Usage, form: InfillForm, prompt: str, settings: dict[str, Any]
    ) -> None:
        """`prompt`: all that the model was shown. `settings`: how the text was sampled."""
        self.head = head
        self.usage = usage
        self._form = form
        self._told = {"model": head.model, "prompt": prompt, "generation_settings": settings}
        self._has_new_line = False
        self._began_at = time.monotonic()
        self._first_at: float | None = None

    def events(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> bytes:
        """An event for what is new, and the last one with the counts."""
        part = self.choice(prompt_index, completion, output)
        events = b""
        if part["content"] or part["tokens"]:
            events = self._event(self._part(part["content"], part["tokens"]))
        if completion.finish_reason is not None:
            events += self._event(self._last(completion, "", []))
        return events

    def parts(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> Iterator[bytes]:
        """`events`, in one piece."""
        yield self.events(prompt_index, completion, output)

    def choice(self, prompt_index: int, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        """What is new."""
        self._first_at = self._first_at or time.monotonic()
        text = "" if self._form.is_silent else completion.text
        self._has_new_line = self._has_new_line or "\n" in text
        token_ids = list(completion.token_ids) if self._form.token_ids and not self._form.is_silent else []
        return {"index": 0, "content": text, "tokens": token_ids, "completion": completion}

    def end(self) -> bytes:
        """Nothing: the last event says that it is the last."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """An event with the error."""
        return b"data: " + error.body() + b"\n\n"

    def body(self, choices: list[dict[str, Any]]) -> bytes:
        """The whole answer."""
        text = "".join([part["content"] for part in choices])
        token_ids = [token for part in choices for token in part["tokens"]]
        return _encode(self._chosen(self._last(choices[-1]["completion"], text, token_ids)))

    def _event(self, fields: dict[str, Any]) -> bytes:
        return b"data: " + _encode(self._chosen(fields)) + b"\n\n"

    def _chosen(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Those that are asked for, as far as there are such: members of others are called by their own names."""
        if not self._form.fields:
            return fields
        found = {}
        for path in self._form.fields:
            value: Any = fields
            *_, name = names = path.split("/")
            for step in names:
                value = value.get(step) if isinstance(value, dict) else None
            if value is not None:
                found[name] = value
        return found

    def _part(self, text: str, token_ids: list[int], is_last: bool = False) -> dict[str, Any]:
        return {
            "index": 0,
            "content": text,
            "tokens": token_ids,
            "stop": is_last,
            "id_slot": 0,
            "tokens_predicted": 0 if self._form.is_silent else self.usage.num_completion_tokens,
            "tokens_evaluated": self.usage.num_prompt_tokens,
        }

    def _last(self, completion: CompletionOutput, text: str, token_ids: list[int]) -> dict[str, Any]:
        """The last part, with what is known at the end."""
        reason = completion.stop_reason
        word = reason if isinstance(reason, str) and completion.finish_reason == "stop" else ""
        part = self._part(text, token_ids, is_last=True)
        return (
            part
            | self._told
            | {
                "has_new_line": self._has_new_line,
                "truncated": self._form.is_cut,
                "stop_type": "word" if word else _STOP_TYPES.get(completion.finish_reason or "", "none"),
                "stopping_word": word,
                "tokens_cached": part["tokens_evaluated"] + part["tokens_predicted"],
                "timings": self._timings(part["tokens_predicted"]),
            }
        )

    def _timings(self, num_predicted: int) -> dict[str, float]:
        at = time.monotonic()
        first = self._first_at or at
        num_prompt = self.usage.num_prompt_tokens - self.usage.num_cached_tokens
        prompt_ms = (first - self._began_at) * 1000
        predicted_ms = (at - first) * 1000
        num_drafts = self.usage.num_draft_tokens
        return {
            "cache_n": self.usage.num_cached_tokens,
            **_speed("prompt", num_prompt, prompt_ms),
            **_speed("predicted", num_predicted, predicted_ms),
            **({} if num_drafts == 0 else {"draft_n": num_drafts, "draft_n_accepted": self.usage.num_accepted_tokens}),
        }


def _speed(name: str, num_tokens: int, took_ms: float) -> dict[str, float]:
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": took_ms,
        f"{name}_per_token_ms": took_ms / num_tokens if num_tokens else 0.0,
        f"{name}_per_second": num_tokens / took_ms * 1000 if took_ms else 0.0,
    }


def _settings(params: SamplingParams) -> dict[str, Any]:
    """How a text is sampled, as clients know it."""
    return {name: getattr(params, field) for field, name in _SETTINGS.items()}
