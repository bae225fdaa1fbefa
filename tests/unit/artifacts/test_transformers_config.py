"""What transformers knows of a config, and what it must not be given."""

import pytest

from pagemill.artifacts.transformers_config import MAX_INTEGER, hf_config_of, why_not
from pagemill.errors import ModelError


def test_an_architecture_that_transformers_has():
    assert why_not("LlamaForCausalLM", {"model_type": "llama"}) is None


@pytest.mark.parametrize(
    ("architecture", "config", "why"),
    [
        ("FooForCausalLM", {"model_type": "foo"}, "no causal language model of model_type 'foo'"),
        ("FooForCausalLM", {"model_type": "llama"}, "no causal language model of that name"),
        ("FooForCausalLM", {"model_type": "foo", "auto_map": {"x": "y"}}, "code of a model's folder is never run"),
        ("LlamaForCausalLM", {"model_type": ["llama"]}, "no causal language model of model_type"),
    ],
)
def test_one_that_it_has_not(architecture, config, why):
    assert why in str(why_not(architecture, config))


def test_sizes_that_make_loops_without_end_are_refused():
    for field, value in (("num_decoder_layers", 10**6), ("hidden_size", MAX_INTEGER + 1)):
        with pytest.raises(ModelError, match=f"it: {field}=.* is not allowed"):
            hf_config_of("it", {"model_type": "llama", field: value})
    with pytest.raises(ModelError, match=r"it: nested\.num_layers=.* is not allowed"):
        hf_config_of("it", {"model_type": "llama", "nested": {"num_layers": 10**6}})


def test_a_config_that_transformers_refuses_is_one_line():
    with pytest.raises(ModelError, match="it: transformers cannot read its config: ") as refused:
        hf_config_of("it", {"model_type": "llama", "hidden_size": "wide\n" * 1000})
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
