"""Sampling as docs/sampling.md describes it, step by step, in numpy and float64; and rows of logits to try it on."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest
from pagemill.worker.batch.device_states import DeviceStates
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.sampling.device_sampler import sample_random
from pagemill.worker.sampling.history import DeviceHistory
from pagemill.worker.sampling.sampler import Sampler

Row = npt.NDArray[np.float64]


class Request(NamedTuple):
    """What the steps look at."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]


Step = Callable[[Row, Request], Row]


def allowed_ids(row: Row, request: Request) -> Row:
    allowed = request.params.allowed_token_ids
    if allowed is None:
        return row
    kept = np.isin(np.arange(len(row)), allowed)
    return np.where(kept, row, -np.inf)


def bad_words(row: Row, request: Request) -> Row:
    row = row.copy()
    for *before, last in request.params.bad_words_token_ids or ():
        if len(before) <= len(request.output) and request.output[len(request.output) - len(before) :] == before:
            row[last] = -np.inf
    return row


def min_tokens(row: Row, request: Request) -> Row:
    row = row.copy()
    if len(request.output) < request.params.min_tokens:
        row[list(request.params.stop_token_ids or ())] = -np.inf
    return row


def bias(row: Row, request: Request) -> Row:
    row = row.copy()
    for token, value in (request.params.logit_bias or {}).items():
        row[token] += value
    return row


def penalties(row: Row, request: Request) -> Row:
    params, row = request.params, row.copy()
    for token in {*request.prompt, *request.output}:
        factor = params.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(request.output):
        row[token] -= params.frequency_penalty * request.output.count(token) + params.presence_penalty
    return row


def temperature(row: Row, request: Request) -> Row:
    return row / request.params.temperature


def min_p(row: Row, request: Request) -> Row:
    probs = probabilities(row)
    return np.where(probs >= request.params.min_p * probs.max(), row, -np.inf)


def top_k(row: Row, request: Request) -> Row:
    count = request.params.top_k
    if not 0 < count < len(row):
        return row
    return np.where(row >= np.sort(row)[-count], row, -np.inf)


def top_p(row: Row, request: Request) -> Row:
    if request.params.top_p >= 1:
        return row
    probs = probabilities(row)
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    kept = np.zeros(len(row), bool)
    kept[order[before < request.params.top_p]] = True
    return np.where(kept, row, -np.inf)


def probabilities(row: Row) -> Row:
    weights: Row = np.exp(row - row.max())
    return weights / weights.sum()


CHANGES: tuple[Step, ...] = (allowed_ids, bad_words, min_tokens, bias, penalties)
"""In the order of the documentation."""
FILTERS: tuple[Step, ...] = (temperature, min_p, top_k, top_p)


def distribution(logits: Row, request: Request, steps: Sequence[Step] = (*CHANGES, *FILTERS)) -> Row:
    """[V] what a token is drawn from; of a greedy request all of it is on one token. Zeros where none is left."""
    row = logits.astype(np.float64)
    greedy = request.params.greedy
    for step in steps:
        if not (greedy and step in FILTERS):
            row = step(row, request)
        if np.isneginf(row).all():
            return np.zeros(len(row))
    return np.eye(len(row))[row.argmax()] if greedy else probabilities(row)


def may_be(token: int, distribution: Row, uniform: float, slack: float) -> bool:
    """Whether inverting the distribution at a number gives a token; at a border, either side is right."""
    end = float(np.cumsum(distribution)[token])
    begin = end - float(distribution[token])
    return distribution[token] > 0 and begin - slack <= uniform <= end + slack


class Rows(NamedTuple):
    """A batch to be sampled: a row of logits for each request."""

    requests: list[Request]
    logits: torch.Tensor
    """[L, V] float32."""


def samplers() -> Iterator[tuple[str, Callable[[Rows], list[int]]]]:
    """Every way to sample a batch, by name: on the host, and as a device does it."""
    yield "host", sampled_on_host
    yield "device", sampled_on_device


def sampled_on_host(rows: Rows) -> list[int]:
    _, sampler, batch = prepared(rows)
    tokens: list[int] = sampler.sample(rows.logits.clone(), batch).tolist()
    return tokens


def sampled_on_device(rows: Rows) -> list[int]:
    """By the tensors of a device alone, here in torch."""
    device = torch.device("cpu")
    num_slots, vocab_size = rows.logits.shape
    states, sampler, batch = prepared(rows, history=DeviceHistory(num_slots, vocab_size, device))
    logits = rows.logits.clone()
    sampler.process(logits, batch)
    settings = torch.from_numpy(DeviceStates.sampling_rows(states, batch.slots))
    tokens = sample_random(logits, settings, torch.from_numpy(batch.slots), torch.from_numpy(batch.positions))
    sampler.processed(batch, tokens)
    return [int(token) for token in tokens]


def prepared(rows: Rows, **settings: Any) -> tuple[RequestStates, Sampler, SampledRows]:
    """A sampler that knows the requests, and the batch of all of them."""
    longest = max(len(request.prompt) + len(request.output) for request in rows.requests)
    states = RequestStates(len(rows.requests), longest + 2)
    sampler = Sampler(states, rows.logits.shape[1], **settings)
    for slot, (params, prompt, output) in enumerate(rows.requests):
        known = np.array([*prompt, *output], np.int32)
        new = NewRequest(str(slot), slot, known, len(prompt), 0, ([1],), params)
        states.add(new)
        sampler.add(new)
    lengths = np.array([len(request.prompt) + len(request.output) for request in rows.requests], np.int64)
    return states, sampler, SampledRows(np.arange(len(rows.requests), dtype=np.int32), lengths)
