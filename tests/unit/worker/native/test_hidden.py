"""Hidden states of steps that are one native call, and logits of those that are sampled elsewhere: the bits of steps in
parts."""

import pytest
import torch

from pagemill.catalog.proposers import PROPOSERS
from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.launch import build_config
from pagemill.model.kernels.native import library
from pagemill.worker.native.decode_path import NativeSteps
from pagemill.worker.spec_decode.hidden_states import WantedHidden
from pagemill.worker.spec_decode.interface import Speculation
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client, core_request
from tests.fakes.paged import PagedModel
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.toy_proposer import Four
from tests.marks import slow
from tests.unit.worker.native.test_decode_path import in_parts, requests

pytestmark = pytest.mark.cases(one_in=6)
EVERYTHING = WantedHidden(sampled=True, final=True, layers=(3, 0, 4))
SEEN: dict[tuple[int, ...], list[list[float]]] = {}
"""(token ids up to a position) -> what was given for it: sampled, final, layers."""
LENGTHS: list[int] = []
"""Tokens of steps that were native calls, to tokens or to logits."""


class Reader(Four):
    """Reads what `wanted` says, and proposes four tokens."""

    wanted = EVERYTHING

    def __init__(self, context):
        super().__init__(context)
        self.hidden = context.hidden

    @classmethod
    def wants(cls, draft):
        return cls.wanted

    def follow(self, slots):
        given = self.hidden
        batch = given.batch
        assert batch.slots.tolist() == slots.tolist()
        sampled = dict(zip(batch.logits_index.tolist(), given.sampled, strict=True))
        for row, (slot, position) in enumerate(zip(batch.token_slots.tolist(), batch.positions.tolist(), strict=True)):
            if position < self.states.num_computed[slot]:
                parts = [sampled[row]] if row in sampled else []
                if self.wanted is EVERYTHING:
                    parts += [given.final[row], given.layers[row]]
                text = tuple(self.states.token_ids[slot, : position + 1].tolist())
                SEEN[text] = [part.float().tolist() for part in parts]


class Sampled(Reader):
    """Reads the rows that are sampled from, and no others."""

    wanted = WantedHidden(sampled=True)


@pytest.fixture(autouse=True)
def readers(monkeypatch):
    found = library()
    if found is None or found.isa() == b"portable":
        pytest.skip("this machine has no native plan")
    for name in ("run", "compute"):
        method = getattr(NativeSteps, name)

        def counted(self, method=method):
            LENGTHS.append(self._step._num_tokens)
            return method(self)

        monkeypatch.setattr(NativeSteps, name, counted)
    PROPOSERS.add("reader", f"{__name__}:Reader")
    PROPOSERS.add("sampled", f"{__name__}:Sampled")
    yield
    PROPOSERS.remove("reader")
    PROPOSERS.remove("sampled")


def seen(checkpoint, speculation, wanted, **settings):
    """Tokens, what was given, and how many steps were native calls."""
    SEEN.clear()
    LENGTHS.clear()
    defaults = {"max_model_len": 128, "max_num_seqs": 5, "num_gpu_blocks_override": 100, "cpu_threads": 1}
    config = build_config(EngineArgs(str(checkpoint), device="cpu", dtype="bfloat16", **(defaults | settings)))
    client = Client(EngineCore(config, UniprocExecutor(Worker(config, speculation=speculation)), depth=1))
    client.add(*wanted)
    client.run()
    return client.tokens, dict(SEEN), len(LENGTHS)


SPECIAL = {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 1}
CASES = [
    ("LlamaForCausalLM", {}, {}),
    ("Gemma2ForCausalLM", {}, {"final_logit_softcapping": None, "attn_logit_softcapping": None}),
    slow("Qwen3ForCausalLM", {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 12}, {}),
]


@pytest.mark.parametrize("proposer", ["reader", "sampled"])
@pytest.mark.parametrize(("architecture", "settings", "changes"), CASES)
@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["plain", "changed"])
def test_they_are_those_of_steps_in_parts(tmp_path, monkeypatch, proposer, architecture, settings, changes, special):
    checkpoint = make_checkpoint(tmp_path, architecture, **changes)
    one = core_request("special", [5, 6, 7], max_tokens=12, **special)
    speculation = Speculation(proposer, 4, adaptive=False)
    tokens, given, num_native = seen(checkpoint, speculation, [one, *requests()], **settings)
    assert num_native > 20
    in_parts(monkeypatch)
    assert seen(checkpoint, speculation, [one, *requests()], **settings) == (tokens, given, 0)


@pytest.mark.parametrize("method", ["standard", "synthetic"])
def test_drafts_that_are_accepted_otherwise(tmp_path, monkeypatch, method):
    checkpoint = make_checkpoint(tmp_path, "LlamaForCausalLM")
    lengths = {"synthetic_acceptance_length": 2.5} if method == "synthetic" else {}
    speculation = Speculation("reader", 4, adaptive=False, rejection_sample_method=method, **lengths)
    tokens, given, num_native = seen(checkpoint, speculation, requests())
    assert num_native > 10
    in_parts(monkeypatch)
    assert seen(checkpoint, speculation, requests()) == (tokens, given, 0)


def test_layers_of_prompts_and_a_result_of_some_rows(tmp_path):
    """What the last layer gives is there for all rows, also where fewer are asked for, of so many that threads share
    them."""
    paged = PagedModel.load(make_checkpoint(tmp_path, "LlamaForCausalLM"), "bfloat16")
    model = paged.model
    model.keep_hidden((4, 0))
    text = [3 + place % 200 for place in range(300)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with torch.inference_mode():
            [(whole, (last, first))] = ((rows, kept) for rows, kept in paged._chunks(text, 300))
            whole, last, first = whole.clone(), last.clone(), first.clone()
            rows = torch.tensor([7, 299])
            [(some, kept)] = paged._chunks(text, 300, rows)
    finally:
        torch.set_num_threads(before)
    assert model._plan is not None
    assert torch.equal(some, whole[rows])
    assert torch.equal(kept[0], last)
    assert torch.equal(kept[1], first)
    assert torch.equal(first, model.embed_tokens(torch.tensor(text)))
