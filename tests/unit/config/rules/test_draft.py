"""The model that proposes drafts, as settings and its files say it: completed, or refused by name."""

from dataclasses import replace

import pytest

from pagemill.config.arguments import EngineArgs
from pagemill.config.facts import DeviceFacts, ModelFacts
from pagemill.config.resolve import resolve
from pagemill.config.rules.draft import DraftSource, draft_source
from pagemill.errors import ConfigError

FACTS = ModelFacts("m", "/m", "safetensors", "LlamaForCausalLM", {"num_hidden_layers": 2}, "float32", 2048, 100)
SMALL = replace(FACTS, name="small", path="/small", weights_format="gguf", dtype="bfloat16", max_position=512)
CPU = DeviceFacts("cpu", 6, 2**34, ("float32",))
ASKED = {"method": "draft_model", "model": "small"}


def resolved(draft=SMALL, device=CPU, **given):
    return resolve(EngineArgs("m", **given).settings, FACTS, device, draft=draft)[0]


def test_it_runs_as_the_model_does_and_as_far_as_both_can():
    config = resolved(speculative_config=ASKED | {"quantization": "int8"}, dtype="float32", max_model_len=1024, seed=3)
    draft = config.draft
    assert draft.facts is SMALL
    assert (draft.model.model, draft.model.dtype, draft.model.quantization) == ("small", "float32", "int8")
    assert (draft.model.max_model_len, config.model.max_model_len, draft.model.seed) == (512, 1024, 3)
    assert resolved(speculative_config=ASKED | {"max_model_len": 100}).draft.model.max_model_len == 100
    assert resolved(speculative_config=ASKED | {"draft_tensor_parallel_size": 1}).draft is not None


def test_weights_of_the_model_are_not_looked_for_in_the_format_of_the_other():
    assert resolved(speculative_config=ASKED, load_format="safetensors").draft.model.load_format == "auto"
    assert resolved(speculative_config=ASKED, load_format="dummy").draft.model.load_format == "dummy"


def source(**given):
    return draft_source(EngineArgs("m", **given).settings.speculation)


def test_a_model_without_a_method_proposes_drafts():
    assert source(spec_model="small") == DraftSource("small", None)
    assert source(speculative_config=ASKED | {"revision": "r"}) == DraftSource("small", "r")
    config = resolved(spec_model="small")
    assert config.speculation.speculative_config.method == "draft_model"
    assert config.speculation.speculative_config.num_speculative_tokens == 4


def test_it_runs_on_a_device_that_works_ahead():
    config = resolved(speculative_config=ASKED, device=replace(CPU, kind="cuda", runs_ahead=True))
    assert config.draft is not None


def test_other_methods_have_none():
    assert source() is None
    assert source(spec_method="ngram") is None
    assert resolved(draft=None, spec_method="ngram").draft is None


REFUSED = [
    ({"draft": replace(SMALL, vocab_size=99)}, ASKED, "'small' has a vocabulary of 99 tokens, and m one of 100"),
    ({"draft": replace(SMALL, has_head=False)}, ASKED, "'small' has no output head"),
    ({}, ASKED | {"max_model_len": 513}, "max_model_len=513 is more than the 512 tokens"),
    ({}, ASKED | {"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2 is not .* tensor_parallel_size=1"),
    ({}, ASKED | {"parallel_drafting": True}, "parallel_drafting is not supported: a draft model runs"),
    ({}, ASKED | {"prompt_lookup_max": 3}, "prompt_lookup_max=3 is not read by method='draft_model'"),
]


@pytest.mark.parametrize(("where", "asked", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(where, asked, message):
    with pytest.raises(ConfigError, match=message):
        resolved(speculative_config=asked, **where)


def test_the_method_needs_a_model():
    with pytest.raises(ConfigError, match="method='draft_model' needs model"):
        source(spec_method="draft_model")
