"""`Preparation`: all that a prompt needs before it can run: template, tokenizer, checks, the model's defaults.
Does not know the engine beyond what it said of itself: a process that only tokenizes has one too."""

from collections.abc import Mapping
from typing import Any

from pagemill.config.choices import SchedulingPolicy
from pagemill.config.facts import ModelFacts
from pagemill.config.pooler_config import PoolerConfig
from pagemill.config.sections import SchedulerConfig
from pagemill.errors import ConfigError, RequestError
from pagemill.messages.engine_io import EngineReady
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.sampling_params import SamplingParams
from pagemill.serve.chat_renderer import ChatRenderer
from pagemill.serve.processing.input_processor import InputProcessor
from pagemill.serve.processing.pooling_params import Pooling
from pagemill.tokenizers.interface import Tokenizer

_GENERATION_FIELDS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}
"""Recommended value -> field of `SamplingParams`."""


LONG_TEXT_CONTEXTS = 64
"""Of how many contexts' tokens a text may be that is split, unless the settings say."""


class Preparation:
    """The part of a front end that turns prompts into requests, for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        facts: ModelFacts,
        ready: EngineReady,
        scheduler: SchedulerConfig,
        pooler: PoolerConfig | None = None,
        num_engines: int = 1,
    ) -> None:
        """`ready` is what each of the engines says. `pooler`: of an engine that makes vectors and no text. Raises
        ConfigError for sampling values recommended by `facts` that are not allowed."""
        self.tokenizer = tokenizer
        self.max_call_tokens = _max_call_tokens(ready.num_blocks * ready.block_size, scheduler, num_engines)
        """Tokens that the completions of one call may ask for altogether; None: any number."""
        self.default_params = _default_params(facts.generation_defaults)
        self.max_new_tokens: int | None = facts.generation_defaults.get("max_new_tokens")
        """Most tokens that the model recommends to generate; None: as many as fit."""
        self.inputs = InputProcessor(
            tokenizer,
            ready,
            (*facts.eos_token_ids, *tokenizer.eos_token_ids),
            has_priorities=scheduler.scheduling_policy == SchedulingPolicy.PRIORITY,
            pooling=None if pooler is None else _pooling(pooler, facts, ready.max_model_len),
        )
        self._raw_logprobs = ready.gives_raw_logprobs
        self._max_logprobs = ready.vocab_size if ready.max_logprobs == -1 else ready.max_logprobs
        self.chats = ChatRenderer(tokenizer, self.inputs)

    def check_beams(self, beam_width: int, num_logprobs: int, field: str = "beam_width") -> None:
        """Raises RequestError where the engine does not give a beam search what it needs: so many log-probabilities of
        each beam. `field`: what the request calls the width."""
        self.inputs.check_generates()
        if not self._raw_logprobs:
            raise RequestError("beam search needs an engine that was started with --logprobs-mode raw_logprobs")
        if num_logprobs > self._max_logprobs:
            raise RequestError(
                f"{field}={beam_width} is not allowed for a beam search here: each step takes {num_logprobs} "
                f"log-probabilities of every beam, at most {self._max_logprobs} are given; start with "
                f"--max-logprobs {num_logprobs}",
                field,
            )


def _max_call_tokens(num_cache_tokens: int, scheduler: SchedulerConfig, num_engines: int) -> int | None:
    """As many as the deployment may have taken in at any time: while `max_num_seqs` completions of each engine run, and
    fill a KV cache of `num_cache_tokens` each, `max_num_queued_reqs` wait to do so after them."""
    if not scheduler.max_num_queued_reqs:
        return None
    num_slots = scheduler.max_num_seqs * num_engines
    num_completions = num_slots + scheduler.max_num_queued_reqs
    return num_engines * num_cache_tokens * num_completions // num_slots


def _pooling(pooler: PoolerConfig, facts: ModelFacts, max_model_len: int) -> Pooling:
    embeds = pooler.task.embeds
    params = PoolingParams(
        task=pooler.task,
        pooling_type=pooler.pooling_type,
        normalize=pooler.normalize and embeds,
        use_activation=pooler.use_activation and not embeds,
        dimensions=pooler.dimensions,
        step_tag_id=pooler.step_tag_id,
        returned_token_ids=pooler.returned_token_ids or None,
    )
    longest = pooler.max_embed_len or LONG_TEXT_CONTEXTS * max_model_len
    splits = pooler.enable_chunked_processing
    size = pooler.num_outputs or int(facts.hf_config.get("hidden_size", 0))
    return Pooling(params, size, pooler.labels, pooler.pairs, longest if splits else None)


def _default_params(generation_defaults: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams() with what the model recommends. Raises ConfigError for values that are not allowed."""
    given = {
        field: generation_defaults[name]
        for name, field in _GENERATION_FIELDS.items()
        if generation_defaults.get(name) is not None
    }
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise ConfigError(
            f"the generation defaults are not usable: {error}; start with --generation-config vllm, or replace the "
            "value with --override-generation-config"
        ) from error
