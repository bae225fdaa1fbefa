"""What is made of hidden states: what the model has a head for, or what is asked for; the rest is refused by name."""

from dataclasses import replace

import pytest

from pagemill.config.choices import Convert, Runner
from pagemill.config.decisions import Decisions
from pagemill.config.facts import ModelFacts
from pagemill.config.pooler_config import PoolerSettings
from pagemill.config.pooling_facts import Activation, HeadFacts
from pagemill.config.rules.pooling import resolve_convert, resolve_pooler
from pagemill.errors import ConfigError
from pagemill.messages.pooling_params import PoolingTask, PoolingType

FACTS = ModelFacts("m", "/m", "safetensors", "LlamaForCausalLM", {"hidden_size": 64}, "float32", 2048, 100)
CLASSES = replace(FACTS, head=HeadFacts(3, labels=("a", "b", "c")))
JUDGE = replace(FACTS, head=HeadFacts(1, per_token=True, activation=Activation.NONE))
TAGS = replace(FACTS, head=HeadFacts(5, per_token=True))
VECTORS = replace(FACTS, head=HeadFacts(32, per_token=True, embeds=True), pooling_type=PoolingType.ALL)


def convert(asked, facts, runner=Runner.POOLING):
    return resolve_convert(asked, runner, facts, Decisions())


def pooler(facts, asked=Convert.AUTO, runner=Runner.POOLING, **settings):
    found = convert(asked, facts, runner)
    return resolve_pooler(PoolerSettings(**settings), found, runner, facts, Decisions())


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (FACTS, Convert.EMBED),
        (CLASSES, Convert.CLASSIFY),
        (TAGS, Convert.CLASSIFY),
        (JUDGE, Convert.REWARD),
        (VECTORS, Convert.EMBED),
    ],
)
@pytest.mark.parametrize("asked", [Convert.AUTO, Convert.NONE])
def test_what_the_checkpoint_has_a_head_for(facts, expected, asked):
    assert convert(asked, facts) is expected


def test_what_is_asked_for_comes_first():
    assert convert(Convert.EMBED, CLASSES) is Convert.EMBED
    assert convert(Convert.REWARD, FACTS) is Convert.REWARD
    assert convert(Convert.AUTO, CLASSES, Runner.GENERATE) is Convert.NONE


def test_what_cannot_be_converted():
    with pytest.raises(ConfigError, match="convert='classify' needs a head that classifies, and m has none"):
        convert(Convert.CLASSIFY, FACTS)
    with pytest.raises(ConfigError, match="convert=embed has no effect on a model that generates text"):
        convert(Convert.EMBED, FACTS, Runner.GENERATE)


@pytest.mark.parametrize(
    ("facts", "settings", "task", "pooling_type", "num_outputs"),
    [
        (FACTS, {}, PoolingTask.EMBED, PoolingType.LAST, 0),
        (FACTS, {"pooling_type": "MEAN"}, PoolingTask.EMBED, PoolingType.MEAN, 0),
        (FACTS, {"pooling_type": "ALL"}, PoolingTask.TOKEN_EMBED, PoolingType.ALL, 0),
        (CLASSES, {}, PoolingTask.CLASSIFY, PoolingType.LAST, 3),
        (CLASSES, {"pooling_type": "ALL"}, PoolingTask.TOKEN_CLASSIFY, PoolingType.ALL, 3),
        (JUDGE, {}, PoolingTask.REWARD, PoolingType.ALL, 1),
        (VECTORS, {}, PoolingTask.TOKEN_EMBED, PoolingType.ALL, 32),
    ],
)
def test_what_is_not_given_is_the_models(facts, settings, task, pooling_type, num_outputs):
    found = pooler(facts, **settings)
    assert (found.task, found.pooling_type, found.num_outputs) == (task, pooling_type, num_outputs)


def test_a_head_of_classes_brings_names_and_an_activation():
    found = pooler(CLASSES)
    assert (found.labels, found.activation, found.pairs) == (("a", "b", "c"), Activation.SOFTMAX, False)
    assert pooler(replace(CLASSES, head=HeadFacts(1))).pairs
    given_up = pooler(CLASSES, Convert.EMBED)
    assert (given_up.labels, given_up.activation, given_up.num_outputs) == ((), Activation.NONE, 0)
    assert pooler(JUDGE).activation is Activation.NONE


def test_with_a_head_for_each_token_its_pooling_is_given_up():
    tags = replace(TAGS, pooling_type=PoolingType.ALL)
    assert pooler(tags).pooling_type is PoolingType.ALL
    assert pooler(tags, Convert.EMBED).pooling_type is PoolingType.LAST


@pytest.mark.parametrize("says", [True, False])
def test_vectors_are_normalized_as_the_files_say_unless_told_otherwise(says):
    facts = replace(FACTS, normalizes=says)
    assert pooler(facts).normalize is says
    assert pooler(facts, normalize=not says).normalize is not says


@pytest.mark.parametrize(
    ("facts", "settings", "message"),
    [
        (FACTS, {"dimensions": 65}, "pooler_config.dimensions=65 is not allowed: 1 to 64"),
        (CLASSES, {"returned_token_ids": (0, 3)}, "returned_token_ids holds 3; there are 0 to 2"),
        (CLASSES, {"enable_chunked_processing": True}, "enable_chunked_processing=true takes the mean of vectors"),
    ],
)
def test_settings_that_cannot_be_met(facts, settings, message):
    with pytest.raises(ConfigError, match=message):
        pooler(facts, **settings)


def test_a_model_that_generates_has_no_pooler():
    with pytest.raises(ConfigError, match="pooler_config has no effect on a model that generates text"):
        pooler(FACTS, runner=Runner.GENERATE, dimensions=8)
