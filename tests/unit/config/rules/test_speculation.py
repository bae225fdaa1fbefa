"""Who proposes drafts, as settings say it: what fits is completed, what does not is refused by name."""

import argparse
from dataclasses import replace

import pytest

from pagemill.catalog.proposers import PROPOSERS
from pagemill.config.arguments import EngineArgs
from pagemill.config.facts import DeviceFacts, ModelFacts
from pagemill.config.resolve import resolve
from pagemill.errors import ConfigError
from pagemill.worker.spec_decode.interface import Speculation, speculation_of

FACTS = ModelFacts("m", "/m", "safetensors", "LlamaForCausalLM", {"num_hidden_layers": 2}, "float32", 2048, 100)
CPU = DeviceFacts("cpu", 6, 2**34, ("float32",))


def resolved(facts=FACTS, device=CPU, **given):
    config, _ = resolve(EngineArgs("m", **given).settings, facts, device)
    return config.speculation


def test_nobody_proposes_by_default():
    assert not resolved().active
    assert speculation_of(resolved()) is None


PAYS = replace(CPU, fast_dtypes=("bfloat16", "float32"), quantized_dtype="bfloat16", drafts_pay=True)
BFLOAT16 = replace(FACTS, dtype="bfloat16")


def test_where_drafts_may_pay_ngram_proposes_for_few_requests():
    floats = replace(BFLOAT16, weights_format="safetensors")
    speculation = speculation_of(resolved(floats, PAYS))
    assert speculation == Speculation("ngram", 8, disable_by_batch_size=7, by_default=True)
    few = Speculation("ngram", 8, disable_by_batch_size=4, by_default=True)
    assert speculation_of(resolved(floats, PAYS, quantization="int8")) == few
    assert speculation_of(resolved(replace(BFLOAT16, weights_format="gguf"), PAYS)) == few
    asked = speculation_of(resolved(BFLOAT16, PAYS, spec_method="ngram"))
    assert asked == Speculation("ngram", 4)


@pytest.mark.parametrize(
    ("facts", "device", "settings"),
    [
        (BFLOAT16, PAYS, {"spec_method": "none"}),
        (BFLOAT16, PAYS, {"dtype": "float32"}),
        (BFLOAT16, PAYS, {"runner": "pooling"}),
        (BFLOAT16, PAYS, {"max_model_len": 8}),
        (replace(BFLOAT16, implementation="transformers"), PAYS, {}),
        (BFLOAT16, replace(PAYS, drafts_pay=False), {}),
    ],
)
def test_where_they_may_not_nobody_does(facts, device, settings):
    assert speculation_of(resolved(facts, device, **settings)) is None


def test_none_is_a_method_that_proposes_nothing():
    assert not resolved(speculative_config={"method": "none"}).active
    assert not resolved(spec_method="none").active
    with pytest.raises(ConfigError, match="num_speculative_tokens=3 needs a method"):
        resolved(speculative_config={"method": "none", "num_speculative_tokens": 3})


def test_whether_drafts_are_as_many_as_pay_is_said_too():
    assert speculation_of(resolved(speculative_config={"method": "ngram"})).adaptive
    assert not speculation_of(resolved(speculative_config={"method": "ngram", "adaptive": False})).adaptive


def test_an_object_is_completed():
    found = resolved(speculative_config={"method": "ngram", "prompt_lookup_max": 3})
    assert found.active
    speculation = speculation_of(found)
    assert (speculation.proposer, speculation.max_drafts, speculation.disable_by_batch_size) == ("ngram", 4, None)


def test_flags_of_their_own_say_the_same():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    words = ["--spec-method", "ngram", "--spec-tokens", "3", "-sc", '{"disable_by_batch_size": 5}']
    given = EngineArgs.from_cli_args(parser.parse_args(words))
    config, _ = resolve(given.settings, FACTS, CPU)
    assert speculation_of(config.speculation) == Speculation("ngram", 3, disable_by_batch_size=5)


NGRAM = {"method": "ngram"}
SYNTHETIC = NGRAM | {"rejection_sample_method": "synthetic"}
LENGTH = {"synthetic_acceptance_length": 3}
REFUSED = [
    ({"speculative_config": {"method": "dspark"}}, "method='dspark': no such proposer .*; known: .*ngram"),
    ({"speculative_config": {"method": "ngram", "model": "m"}}, "model='m' is not read by method='ngram', which reads"),
    ({"speculative_config": {"prompt_lookup_max": 3}}, "prompt_lookup_max=3 needs a method"),
    ({"speculative_config": NGRAM, "spec_method": "suffix"}, "spec_method='suffix' contradicts method='ngram'"),
    ({"speculative_config": NGRAM, "spec_tokens": 0}, "spec_tokens=0 is too small: at least 1"),
    (
        {"speculative_config": NGRAM, "spec_tokens": 64, "max_model_len": 64},
        "num_speculative_tokens=64 is .* at most 63",
    ),
    ({"speculative_config": NGRAM | {"quantization": "fp8"}}, "quantization='fp8' is not read by method='ngram'"),
    ({"speculative_config": NGRAM | {"k": 3}}, "speculative_config: unknown field 'k'; known: method, model"),
    (
        {"speculative_config": NGRAM | {"rejection_sample_method": "block"}},
        "rejection_sample_method='block' is not one of match, standard, synthetic",
    ),
    (
        {"speculative_config": NGRAM | {"synthetic_acceptance_length": 2.0}},
        "synthetic_acceptance_length=2.0 needs rejection_sample_method='synthetic', not 'match'",
    ),
    (
        {"speculative_config": NGRAM | {"rejection_sample_method": "synthetic"}},
        "'synthetic' needs one of synthetic_acceptance_rates and synthetic_acceptance_length",
    ),
    ({"speculative_config": SYNTHETIC | LENGTH | {"synthetic_acceptance_rates": [0.5] * 4}}, "needs one of"),
    (
        {"speculative_config": SYNTHETIC | {"synthetic_acceptance_length": 5.5}},
        "synthetic_acceptance_length=5.5 is more than a step yields with num_speculative_tokens=4: 1 to 5",
    ),
    ({"speculative_config": SYNTHETIC | {"synthetic_acceptance_length": 0.5}}, "is too small: at least 1"),
    (
        {"speculative_config": SYNTHETIC | {"synthetic_acceptance_rates": [0.5]}},
        "has 1 numbers; one for each of num_speculative_tokens=4",
    ),
    (
        {"speculative_config": SYNTHETIC | {"synthetic_acceptance_rates": [0.5, 0.6, 0, 0]}},
        "is not allowed: 0 to 1, and none above the one before",
    ),
    ({"speculative_config": SYNTHETIC | {"synthetic_acceptance_rates": [1.5, 1, 0, 0]}}, "is not allowed: 0 to 1"),
    ({"speculative_config": SYNTHETIC | {"synthetic_acceptance_rates": ["a"]}}, "'a' is not of type float"),
    (
        {"speculative_config": NGRAM | {"prompt_lookup_min": 3, "prompt_lookup_max": 2}},
        "prompt_lookup_min=3 is more than prompt_lookup_max=2",
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(given, message):
    with pytest.raises(ConfigError, match=message):
        resolved(**given)


@pytest.mark.parametrize("method", ["ngram", "mtp", "eagle3"])
def test_drafts_go_with_pipeline_stages(method):
    asked = {"method": method} | ({"model": "head"} if method == "eagle3" else {})
    assert speculation_of(resolved(speculative_config=asked, pipeline_parallel_size=2)) == Speculation(method, 4)


def test_a_window_bounds_the_drafts():
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=8 is .* window of 8 tokens; at most 7"):
        resolved(replace(FACTS, hf_config={"sliding_window": 8}), speculative_config=NGRAM, spec_tokens=8)


def test_there_are_no_drafts_where_nothing_can_verify_them():
    with pytest.raises(ConfigError, match="prompts become vectors"):
        resolved(runner="pooling", convert="embed", speculative_config=NGRAM)


def test_each_method_reads_what_concerns_it(monkeypatch):
    monkeypatch.setitem(PROPOSERS._paths, "suffix", "somewhere:Suffix")
    asked = {
        "method": "suffix",
        "suffix_decoding_max_tree_depth": 12,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 2,
        "suffix_decoding_min_token_prob": 0.5,
    }
    found = speculation_of(resolved(speculative_config=asked))
    assert (found.suffix_decoding_max_tree_depth, found.suffix_decoding_max_cached_requests) == (12, 0)
    assert (found.suffix_decoding_max_spec_factor, found.suffix_decoding_min_token_prob) == (2.0, 0.5)
    with pytest.raises(ConfigError, match="prompt_lookup_min=2 is not read by method='suffix'"):
        resolved(speculative_config=asked | {"prompt_lookup_min": 2})
    with pytest.raises(ConfigError, match=r"suffix_decoding_min_token_prob=1.5 is not allowed: 0 to 1"):
        resolved(speculative_config=asked | {"suffix_decoding_min_token_prob": 1.5})


@pytest.mark.parametrize("flags", [{"spec_method": "ngram", "spec_model": "m"}])
def test_a_model_is_for_methods_that_have_one(flags):
    with pytest.raises(ConfigError, match="model='m' is not read by method='ngram'"):
        resolved(**flags)


def test_drafts_may_be_accepted_in_other_ways():
    assert speculation_of(resolved(speculative_config=NGRAM)).rejection_sample_method == "match"
    standard = speculation_of(resolved(speculative_config=NGRAM | {"rejection_sample_method": "standard"}))
    assert (standard.rejection_sample_method, standard.adaptive) == ("standard", True)
    synthetic = speculation_of(resolved(speculative_config=SYNTHETIC | LENGTH))
    assert (synthetic.synthetic_acceptance_length, synthetic.adaptive) == (3.0, False)
    rates = speculation_of(resolved(speculative_config=SYNTHETIC | {"synthetic_acceptance_rates": [1, 0.5, 0.5, 0]}))
    assert rates.synthetic_acceptance_rates == (1.0, 0.5, 0.5, 0.0)


@pytest.mark.parametrize("method", ["match", "standard", "synthetic"])
def test_every_way_is_taken_on_a_device_that_works_ahead(method):
    device = DeviceFacts("cuda", 6, 2**34, ("float32",), runs_ahead=True)
    more = LENGTH if method == "synthetic" else {}
    found = resolved(device=device, speculative_config=NGRAM | {"rejection_sample_method": method} | more)
    assert found.speculative_config.rejection_sample_method == method
