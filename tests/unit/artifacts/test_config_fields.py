"""What a model's configuration may hold: everything else is refused by name, before anything is made of it."""

import json
import random

import pytest

from pagemill.artifacts.config_fields import FIELDS, ROPE, ModelFields, check_fields
from pagemill.errors import ModelError
from tests.fakes.tiny_checkpoint import COMMON, SPECIFIC

HOSTILE = [
    None, True, False, 0, -1, 1, 2, 3, 15, 10**5, 10**6, 2**31, 2**63, 10**15, 10**400, -(10**30), 0.0, 2.5, 1e308,
    -1e308, float("nan"), float("inf"), "2", "a", "__import__", "x" * 10_000, [], [1], ["silu"], [[]], {}, {"a": 1},
    {"rope_type": "yarn"}, {"rope_type": "yarn", "factor": 0}, {"rope_type": "llama3", "factor": 8.0},
    {"type": "dynamic", "factor": "x"}, {"full_attention": 1}, {"full_attention": {"rope_theta": "x"}},
]  # fmt: skip
"""Values that files were seen with, or could have."""


def config(**changes):
    return COMMON | SPECIFIC["LlamaForCausalLM"] | {"rms_norm_eps": 1e-5, "rope_theta": 1e4} | changes


@pytest.mark.parametrize("architecture", SPECIFIC)
def test_configurations_of_models_pass(architecture):
    given = COMMON | SPECIFIC[architecture]
    assert check_fields("m", given) == given


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**5}, "num_hidden_layers=100000 is not allowed: an integer from 1 to 1000"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2'"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_attention_heads": 2**31}, "num_attention_heads=2147483648"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"hidden_size": "a"}, "hidden_size='a'"),
        ({"hidden_size": 3, "head_dim": None}, "hidden_size // num_attention_heads=0"),
        ({"head_dim": -16}, "head_dim=-16 is not allowed: an even integer"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] is not allowed: a text"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\] is not allowed: an object"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling of type 'yarn' has no factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor=0"),
        ({"rope_parameters": {"full_attention": []}}, r"rope_parameters.full_attention=\[\]"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings=2147483648"),
        ({"vocab_size": 10**400}, "vocab_size=a number of 1329 bits"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers=4"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than the 8 experts"),
        ({"num_experts": 8, "n_group": 3}, "n_group=3 does not divide the 8 experts"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' is not allowed: true or false"),
    ],
)
def test_a_field_is_refused_by_name(changes, words):
    with pytest.raises(ModelError, match=words):
        check_fields("m", config(**changes))


def test_what_is_needed_and_missing_is_named():
    fields = ModelFields(config(rms_norm_eps=None))
    for name in ("rms_norm_eps", "query_pre_attn_scalar"):
        assert fields.get(name) is None
        with pytest.raises(ModelError, match=name):
            fields[name]


def test_whatever_a_field_holds_the_answer_is_one_line():
    rng = random.Random(0)
    for _ in range(5000):
        changes = {name: rng.choice(HOSTILE) for name in rng.sample(sorted(FIELDS), rng.randrange(1, 4))}
        if rng.random() < 0.3:
            changes["rope_scaling"] = {name: rng.choice(HOSTILE) for name in rng.sample(sorted(ROPE), 3)}
        try:
            check_fields("m", config(**changes))
        except ModelError as error:
            assert len(str(error)) < 400
            assert "\n" not in str(error)
        else:
            json.dumps(changes)
