"""Quantized checkpoints of models that transformers computes: every format, against the same weights as floats."""

from pathlib import Path

import pytest

from tests.conformance.test_architectures import relative_error
from tests.conformance.test_formats import FORMATS, SIZES, TOKENS
from tests.fakes.paged import PagedModel
from tests.fakes.stored_formats import store
from tests.fakes.tiny_checkpoint import make_checkpoint

HOST = "transformers"


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hosted_formats"), "LlamaForCausalLM", **SIZES)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_computed_by_hosted_models_as_by_ours(plain_folder: Path, tmp_path: Path, name: str) -> None:
    packed, plain = store(plain_folder, tmp_path, *FORMATS[name])
    hosted = PagedModel.load(packed, max_len=128, model_impl=HOST)
    assert type(hosted.model).__name__ == "TransformersForCausalLM"
    wanted = PagedModel.load(plain, max_len=128).logits(TOKENS)
    assert relative_error(hosted.logits(TOKENS), wanted) < 1e-4


@pytest.mark.parametrize("name", ["awq", "gptq-4", "nf4", "torchao-int8"])
def test_formats_of_models_with_a_head_of_their_own(tmp_path: Path, name: str) -> None:
    """GPTQ leaves the head as it is, and does not say so."""
    folder = make_checkpoint(tmp_path / "model", "Qwen2ForCausalLM", **SIZES, tie_word_embeddings=False)
    packed, plain = store(folder, tmp_path, *FORMATS[name])
    found, wanted = (PagedModel.load(path, max_len=128, model_impl=HOST).logits(TOKENS) for path in (packed, plain))
    assert relative_error(found, wanted) < 1e-4


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_formats_in_bfloat16_lose_no_more_in_hosted_models_than_in_ours(
    plain_folder: Path, tmp_path: Path, name: str
) -> None:
    case = next(found for found in FORMATS if found.startswith(name))
    packed, plain = store(plain_folder, tmp_path, *FORMATS[case])
    wanted = PagedModel.load(plain, max_len=128).logits(TOKENS)
    ours, hosted = (
        relative_error(PagedModel.load(packed, "bfloat16", max_len=128, model_impl=impl).logits(TOKENS).float(), wanted)
        for impl in ("native", HOST)
    )
    assert hosted < 1.5 * ours + 0.01
