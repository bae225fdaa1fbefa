"""What proposes is loaded whole on the last pipeline stage, with the embeddings of the model where it has none."""

from dataclasses import replace

import pytest
import torch

from pagemill.config.arguments import EngineArgs
from pagemill.errors import ConfigError, ModelError
from pagemill.launch import build_config
from pagemill.model.distributed.parallel_groups import solo_groups
from pagemill.model.factory import load_model
from pagemill.platforms.cpu import CpuPlatform
from pagemill.utils.timing import PhaseTimer
from pagemill.worker.spec_decode.load_draft import PREFIX, load_draft, reads_embeddings
from tests.fakes.ranks import weight_bytes
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_heads import make_head
from tests.fakes.tiny_mtp import make_mtp
from tests.fakes.tiny_row_heads import make_medusa
from tests.unit.worker.spec_decode.test_stage_states import StageGroup

LAST = replace(solo_groups(), pp=StageGroup(1, 2))
TOKENS = torch.arange(5, 25)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def target(folder):
    """Whose output head has the weight of its embedding."""
    return make_checkpoint(folder / "model", "LlamaForCausalLM")


def config_of(path, asked):
    return build_config(
        EngineArgs(str(path), dtype="float32", pipeline_parallel_size=2, max_model_len=96, speculative_config=asked)
    )


def load(config, groups=LAST, embeds_at_end=True):
    model = load_model(
        config.facts, config.model, CpuPlatform(), PhaseTimer(), groups, config.cache, False, embeds_at_end
    )
    if groups is not LAST:
        return model, None
    return model, load_draft(config.draft, model, CpuPlatform(), PhaseTimer(), groups, config.cache).model


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_a_head_embeds_on_the_last_stage_as_the_model_does_on_the_first(folder, target, kind):
    asked = {"method": "mtp"} if kind == "mtp" else {"model": str(make_head(folder / kind, kind))}
    config = config_of(make_mtp(folder / "deepseek") if kind == "mtp" else target, asked)
    assert reads_embeddings(config.draft)
    first, _ = load(config, replace(solo_groups(), pp=StageGroup(0, 2)))
    last, head = load(config)
    assert torch.equal(head.embed_tokens(TOKENS), first.embed_tokens(TOKENS))
    without = load_model(config.facts, config.model, CpuPlatform(), PhaseTimer(), LAST, config.cache)
    table = 320 * 64 * 4 if kind == "mtp" else 0
    assert weight_bytes(last) - weight_bytes(without) == table, "a tied head has the same weight"
    assert len(head.cache_layers()) == 1
    assert all(name.startswith(PREFIX) for name in head.cache_layers())
    assert len(last.cache_layers()) == 2
    with pytest.raises(ModelError, match="has no embed_tokens of its own"):
        load(config, embeds_at_end=False)


def test_a_draft_model_and_heads_with_embeddings_need_no_others(folder, target):
    own = make_head(folder / "own", "eagle3", own_embeddings=True)
    draft = make_checkpoint(folder / "draft", "LlamaForCausalLM", num_hidden_layers=2)
    for path in (own, draft, make_medusa(folder / "medusa", 0)):
        config = config_of(target, {"model": str(path)})
        assert not reads_embeddings(config.draft)
        last, proposing = load(config, embeds_at_end=False)
        assert not hasattr(last, "embed_tokens")
        assert proposing.is_first
        assert proposing.is_last
    assert not reads_embeddings(None)


def test_a_draft_model_that_keeps_states_is_refused(folder, target):
    mamba = make_checkpoint(folder / "mamba", "MambaForCausalLM")
    config = config_of(target, {"method": "draft_model", "model": str(mamba)})
    with pytest.raises(ConfigError, match=r"speculative_config: model='.*mamba': layer 'layers.0.mixer' keeps a state"):
        load(config, embeds_at_end=False)
