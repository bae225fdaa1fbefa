"""`Proposer`: guesses the tokens that follow. Knows slots, not requests, and nothing about how guesses are verified."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pagemill.catalog.proposers import CUSTOM_CLASS
from pagemill.config.speculation import MATCH, SYNTHETIC, SpeculationConfig
from pagemill.messages.step import Int32Array, NewRequest
from pagemill.model.models.causal_lm import CausalLM
from pagemill.worker.batch.block_tables import BlockTables
from pagemill.worker.batch.input_batch import InputBatch, Int64Array
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.spec_decode.hidden_states import HiddenStates, WantedHidden


@dataclass(frozen=True, slots=True)
class Speculation:
    """Which proposer a worker has, and how much it may propose."""

    proposer: str
    """Name in catalog/proposers.py, or custom_class."""
    max_drafts: int
    """Tokens of one slot for one step, > 0."""
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    """Last tokens that `ngram` looks for, at least and at most."""
    suffix_decoding_max_tree_depth: int = 24
    """Last tokens that `suffix` looks for together with those that it proposes."""
    suffix_decoding_max_cached_requests: int = 10_000
    """Outputs that `suffix` remembers when their requests have ended; 0: none."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Tokens that `suffix` proposes for each of the last ones that were seen before."""
    suffix_decoding_min_token_prob: float = 0.1
    """How likely it must be, by their frequencies, that all tokens come true which `suffix` proposes."""
    custom_class: str | None = None
    """Of method custom_class, the class as `module:Class` or `module.Class`."""
    adaptive: bool = True
    """As many drafts as make tokens come fastest, by what was right so far and what steps cost; False: as many as
    there are."""
    disable_by_batch_size: int | None = None
    """Steps in which so many slots sample, or more, have no drafts; None: all may."""
    by_default: bool = False
    """Nobody has asked for drafts: there are none where steps that verify them would not be native calls, so none of
    slots whose logits are changed or told of."""
    rejection_sample_method: str = MATCH
    """When a draft is accepted: see config/speculation.py."""
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    """Where that is left to chance, one of the two: how often, by place, or how many tokens a step yields on
    average."""


def speculation_of(config: SpeculationConfig) -> Speculation | None:
    """What settings say; None where they ask for no drafts. What they leave open is as by default in `Speculation`."""
    asked = config.speculative_config
    if asked.method is None or asked.num_speculative_tokens is None:
        return None
    said: dict[str, Any] = {
        "prompt_lookup_min": asked.prompt_lookup_min,
        "prompt_lookup_max": asked.prompt_lookup_max,
        "suffix_decoding_max_tree_depth": asked.suffix_decoding_max_tree_depth,
        "suffix_decoding_max_cached_requests": asked.suffix_decoding_max_cached_requests,
        "suffix_decoding_max_spec_factor": asked.suffix_decoding_max_spec_factor,
        "suffix_decoding_min_token_prob": asked.suffix_decoding_min_token_prob,
        "custom_class": asked.model if asked.method == CUSTOM_CLASS else None,
        "adaptive": asked.rejection_sample_method != SYNTHETIC if asked.adaptive is None else asked.adaptive,
        "disable_by_batch_size": asked.disable_by_batch_size,
        "rejection_sample_method": asked.rejection_sample_method,
        "synthetic_acceptance_rates": asked.synthetic_acceptance_rates,
        "synthetic_acceptance_length": asked.synthetic_acceptance_length,
    }
    plain = Speculation(asked.method, asked.num_speculative_tokens, by_default=config.by_default)
    return replace(plain, **{name: value for name, value in said.items() if value is not None})


class GuessSteps(ABC):
    """Guesses of a network whose shapes are those of graphs."""

    max_requests: int
    num_graphs: int
    """That `capture_at_start` captures."""

    @abstractmethod
    def capture_at_start(self) -> None:
        """Capture the graphs of these steps, before requests come."""

    def takes(self, count: int) -> bool:
        """Whether `guess` takes so many slots."""
        return count <= self.max_requests

    @abstractmethod
    def has_room(self, slots: Int32Array, ends: Int32Array) -> bool:
        """Whether blocks hold all positions that are computed for guesses of [R] slots, of which the model has computed
        at most so many tokens."""

    @abstractmethod
    def guess(
        self,
        slots: Int32Array,
        rows: Int32Array | None = None,
        starts: Int32Array | None = None,
        tokens: Int32Array | None = None,
    ) -> Int32Array:
        """[L] slots, the rows of hidden states from which they go on, the positions at which the network computes its
        first guess, and their last tokens, as far as it reads them -> [L, drafts], -1 where logits are not a number.
        Blocks hold all of their positions."""


class FollowSteps(GuessSteps):
    """Also what a network keeps of a step of the model."""

    hidden: Tensor
    """[R, E] what `guess` goes on from."""

    @abstractmethod
    def fits(self, batch: InputBatch) -> bool:
        """Whether `follow` takes a batch."""

    @abstractmethod
    def follow(self, batch: InputBatch, source: Int64Array | None = None) -> Tensor:
        """A batch of the network; [T] the rows of the model's hidden states, where it reads these -> `hidden`, its
        first L after sampled rows."""

    @abstractmethod
    def place(self, hidden: Tensor) -> Tensor:
        """[L, E] of another step, for `guess`: `hidden`, or the same where there is no room."""


@dataclass(frozen=True, slots=True)
class DraftNetwork:
    """A model that proposes, loaded and bound to its cache."""

    model: CausalLM
    groups: AttentionGroups
    """Of its layers."""
    tables: BlockTables
    """Of all layers: blocks of a slot hold what both models keep of its tokens."""
    max_model_len: int
    """Tokens of a slot beyond which it computes nothing."""
    device: torch.device
    steps: GuessSteps | None = None
    """On a device; `FollowSteps` of what keeps something in the cache."""

    def follow_steps(self) -> FollowSteps | None:
        """`steps`, where they are such."""
        return self.steps if isinstance(self.steps, FollowSteps) else None


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What a proposer is built with. It reads it and changes nothing in it."""

    states: RequestStates
    """By slot: all tokens that are known are there when `propose` is called."""
    max_drafts: int
    """Longer guesses are cut."""
    settings: Speculation
    network: DraftNetwork | None = None
    """The model that proposes, where settings name one."""
    hidden: HiddenStates | None = None
    """What `Proposer.wants` asks for, of the step that ran last: there when `follow` is called."""


class Proposer(ABC):
    """One per worker. The ranks of a replica must propose the same: a guess follows from the slots' tokens and from
    nothing that differs between ranks."""

    def __init__(self, context: ProposerContext) -> None:  # noqa: B027 - for those that need nothing of it
        """`context` lives as long as the worker has a KV cache."""

    computes: ClassVar[bool] = False
    """Whether guesses take a time that counts beside that of a step."""
    is_asked = True
    """Whether `propose` may come after `follow`; False: nobody has drafts in the next step."""
    repeats: ClassVar[bool] = False
    """Whether it proposes nothing but tokens of texts: these are all valid."""

    @classmethod
    def wants(cls, draft: CausalLM | None) -> WantedHidden | None:
        """The hidden states of the model that it reads; None: none. `draft`: the model that proposes, where settings
        name one."""
        return None

    def begin(self, new: NewRequest) -> None:  # noqa: B027 - for those that keep nothing of a slot
        """A slot has another request, or one again that was preempted; `states` have its tokens."""

    def replace(self, slot: int, position: int) -> None:  # noqa: B027 - for those that keep nothing of a slot
        """The slot's tokens are others from that position on."""

    def end(self, slot: int) -> None:  # noqa: B027 - for those that keep nothing of a slot
        """The slot's request ended or was preempted; `states` still have its tokens. May be told twice, and never
        of a slot that only warmed up."""

    def follow(self, slots: Int32Array) -> None:  # noqa: B027 - for those that keep nothing in the cache
        """The [R] slots of a step that is done; `states` have what they sampled. Told after every step, before
        `propose`: what blocks keep for a proposer must be there when the step is over, for others may share them."""

    def went_on(self, slots: Int32Array) -> None:  # noqa: B027 - for those that note nothing of a slot
        """In place of `follow` and `propose`: a device has done both for [L] slots that have sampled
        (`DraftNetwork.steps`)."""

    @abstractmethod
    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        """[L] of the slots that have sampled just now -> for each, the tokens that may follow its last one; none is a
        guess too. Valid token ids; a wrong one costs time and changes no output."""


class NoProposer(Proposer):
    """On ranks that are told what others propose."""

    def propose(self, slots: Int32Array) -> Sequence[Int32Array]:
        return [slots[:0]] * len(slots)
