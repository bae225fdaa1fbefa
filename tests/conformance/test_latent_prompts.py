"""Models with latent attention, whose prompts have keys and values of their own for each head, beside transformers: the
kernels in Triton's interpreter, steps as on a device."""

import random

import pytest
import torch

from pagemill.catalog.attention import ATTENTION, register_backend
from pagemill.model.attention.backends import latent_prompts
from tests.conformance.reference import compare_greedy
from tests.fakes.engine_setup import core_request
from tests.fakes.queued_platform import QueuedPlatform
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.triton_interpreter import DEVICE
from tests.marks import slow
from tests.unit.worker.forward.test_device import engine

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="for the interpreter"),
    pytest.mark.usefixtures("plain_kernels"),
]
LENGTHS = (70, 3, 90, 20)
BUDGET = 64
"""Tokens of a step: prompts come in parts, beside requests that decode."""


@pytest.fixture(autouse=True)
def own_backend(monkeypatch):
    monkeypatch.setattr(latent_prompts, "TOKENS_PER_KEY", 8)
    register_backend("TEST_LATENT", "tests.fakes.latent_backend:InterpretedBackend")
    yield
    del ATTENTION._paths["TEST_LATENT"]


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [
        ("DeepseekV3ForCausalLM", "NONE"),
        slow("DeepseekV2ForCausalLM", "NONE"),
        slow("DeepseekV3ForCausalLM", "PIECEWISE"),
    ],
)
def test_tokens_are_those_of_the_reference(architecture, mode, tmp_path, monkeypatch):
    folder = make_checkpoint(
        tmp_path, architecture, num_hidden_layers=2, first_k_dense_replace=1 if mode == "NONE" else 2
    )  # the experts of a CPU read on the host who is chosen, which no graph does
    attended = noted_attention(monkeypatch)
    check_tokens(folder, mode)
    assert len(attended) >= 4, "steps with parts of prompts, two layers each"
    if mode == "NONE":  # graphs compute all rows
        assert attended == [False, True] * (len(attended) // 2), "in the last one, only last tokens are read"


@pytest.mark.slow
def test_compiled_models_have_no_keys_for_each_head(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, "DeepseekV3ForCausalLM", num_hidden_layers=2, first_k_dense_replace=2)
    attended = noted_attention(monkeypatch)
    torch._dynamo.reset()
    check_tokens(folder, "PIECEWISE", mode=3, backend="eager", cache_dir=str(tmp_path / "cache"))
    torch._dynamo.reset()
    assert not attended


def noted_attention(monkeypatch):
    """Whether only last tokens were attended for, each time that keys were made for each head."""
    attended = []
    attend = latent_prompts.attend

    def noted(*given):
        *_, ends_only = given
        attended.append(ends_only)
        return attend(*given)

    monkeypatch.setattr(latent_prompts, "attend", noted)
    return attended


def check_tokens(folder, graphs, **compilation):
    from transformers import AutoModelForCausalLM

    rng = random.Random(3)
    prompts = [[rng.randrange(3, 300) for _ in range(length)] for length in LENGTHS]
    settings = {"attention_backend": "TEST_LATENT", "max_num_batched_tokens": BUDGET}
    client, _ = engine(folder, QueuedPlatform(), graphs, compilation=compilation, **settings)
    for index, prompt in enumerate(prompts):
        client.add(core_request(str(index), prompt, temperature=0.0, max_tokens=4))
    client.run()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for index, prompt in enumerate(prompts):
        difference = compare_greedy(model, prompt, client.tokens[str(index)])
        assert difference is None or difference.gap < 2e-3, difference
