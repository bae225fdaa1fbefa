"""Encoders, and heads of encoders and decoders, against transformers on tiny random checkpoints in float32."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from pagemill import LLM, PoolingParams
from pagemill.catalog.models import ENCODERS
from pagemill.model.kernels.layer_plan import LayerPlan
from pagemill.model.kernels.native import library
from tests.conformance.test_formats import FORMATS
from tests.fakes.compressed_checkpoint import Layout, compress
from tests.fakes.stored_formats import store
from tests.fakes.tiny_encoders import make_encoder

PROMPTS = [[3 + (index * 37 + index**2) % 250 for index in range(size)] for size in (90, 1, 200, 33, 200, 7)]
PAIRS = [
    ("What is a sea?", "Much water."),
    ("What is a sea?", "A letter, as it is spoken."),
    ("a", "b"),
]
POOLED = {
    "LAST": lambda rows: rows[-1],
    "CLS": lambda rows: rows[0],
    "MEAN": lambda rows: rows.mean(0),
    "ALL": lambda rows: rows,
}
TOLERANCE = 1e-3
CASES = {
    "bert": ("BertModel", {}),
    "bert-with-a-masked-head": ("BertForMaskedLM", {"hidden_act": "gelu_new"}),
    "roberta": ("RobertaModel", {"pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaModel", {"pad_token_id": 1}),
    "camembert": ("CamembertModel", {"pad_token_id": 1}),
    "modernbert": ("ModernBertModel", {"local_attention": 16}),
    "modernbert-with-biases": (
        "ModernBertModel",
        {"local_attention": 24, "attention_bias": True, "mlp_bias": True, "norm_bias": True},
    ),
}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def close(ours, theirs):
    theirs = torch.as_tensor(theirs)
    error = float((torch.as_tensor(ours) - theirs).abs().max())
    assert error < TOLERANCE * float(theirs.abs().max()), error


def hidden_states(model):
    base = model.base_model
    with torch.inference_mode():
        return [base(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def logits_of(model, prompts=PROMPTS):
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def test_every_encoder_is_compared():
    assert {name.replace("ForMaskedLM", "Model") for name, _ in CASES.values()} == set(ENCODERS)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_equal_the_reference(tmp_path, case):
    architecture, changes = CASES[case]
    theirs = hidden_states(make_encoder(tmp_path, architecture, **changes))
    with LLM(str(tmp_path), dtype="float32", max_num_seqs=4) as llm:
        for kind, pooled in POOLED.items():
            params = PoolingParams(pooling_type=kind, normalize=False)
            for output, rows in zip(llm.encode(PROMPTS, params, use_tqdm=False), theirs, strict=True):
                close(output.outputs.data, pooled(rows))
        (output,) = llm.embed(PROMPTS[2], use_tqdm=False, pooling_params=PoolingParams(dimensions=16))
        short = theirs[2][0][:16]
        close(output.outputs.embedding, short / short.norm())
        with pytest.raises(ValueError, match="generates no text"):
            llm.generate("x", use_tqdm=False)


@pytest.mark.parametrize("parts", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3}])
@pytest.mark.parametrize("case", ["bert", "modernbert"])
def test_hidden_states_of_a_model_in_parts(tmp_path, case, parts):
    architecture, changes = CASES[case]
    theirs = hidden_states(make_encoder(tmp_path, architecture, **changes))
    params = PoolingParams(pooling_type="MEAN", normalize=False)
    with LLM(str(tmp_path), dtype="float32", **parts) as llm:
        for output, rows in zip(llm.encode(PROMPTS, params, use_tqdm=False), theirs, strict=True):
            close(output.outputs.data, rows.mean(0))


CLASSIFIERS = {
    "bert": ("BertForSequenceClassification", {}),
    "roberta": ("RobertaForSequenceClassification", {"pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", {"pad_token_id": 1}),
    "modernbert-cls": ("ModernBertForSequenceClassification", {"local_attention": 16}),
    "modernbert-mean": ("ModernBertForSequenceClassification", {"local_attention": 16, "classifier_pooling": "mean"}),
    "llama": ("LlamaForSequenceClassification", {}),
    "qwen3": ("Qwen3ForSequenceClassification", {}),
}


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_classes_equal_the_reference(tmp_path, case):
    architecture, changes = CLASSIFIERS[case]
    model = make_encoder(tmp_path, architecture, num_labels=5, **changes)
    theirs = logits_of(model)
    with LLM(str(tmp_path), dtype="float32", max_num_seqs=4) as llm:
        for output, logits in zip(llm.classify(PROMPTS, use_tqdm=False), theirs, strict=True):
            close(output.outputs.probs, logits.softmax(-1))
        plain = llm.encode(PROMPTS, PoolingParams(use_activation=False), use_tqdm=False)
        for output, logits in zip(plain, theirs, strict=True):
            close(output.outputs.data, logits)
        with pytest.raises(ValueError, match="task='embed' is not what this model does, which is classify"):
            llm.embed("x", use_tqdm=False)
        with pytest.raises(ValueError, match="scores no pairs"):
            llm.score("x", "y", use_tqdm=False)
    with LLM(str(tmp_path), dtype="float32", convert="embed") as llm:
        (output,) = llm.embed(PROMPTS[0], use_tqdm=False)
        assert np.linalg.norm(output.outputs.data) == pytest.approx(1, abs=1e-5)
        assert len(output.outputs.data) == model.config.hidden_size


@pytest.mark.parametrize("kind", ["problem_type", "sentence-transformers"])
def test_what_makes_probabilities_is_the_checkpoints_choice(tmp_path, kind):
    written = {"problem_type": "multi_label_classification"}
    if kind != "problem_type":
        written = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    model = make_encoder(tmp_path, "BertForSequenceClassification", num_labels=3, **written)
    with LLM(str(tmp_path), dtype="float32") as llm:
        for output, logits in zip(llm.classify(PROMPTS, use_tqdm=False), logits_of(model), strict=True):
            close(output.outputs.probs, logits.sigmoid() if kind == "problem_type" else logits)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("BertForTokenClassification", {}),
        ("RobertaForTokenClassification", {"pad_token_id": 1}),
        ("ModernBertForTokenClassification", {"local_attention": 16}),
        ("LlamaForTokenClassification", {}),
    ],
)
def test_classes_of_tokens_equal_the_reference(tmp_path, architecture, changes):
    theirs = logits_of(make_encoder(tmp_path, architecture, num_labels=4, **changes))
    budget = {} if "Llama" not in architecture else {"max_num_batched_tokens": 64}
    with LLM(str(tmp_path), dtype="float32", runner="pooling", max_num_seqs=4, **budget) as llm:
        for output, logits in zip(llm.encode(PROMPTS, use_tqdm=False), theirs, strict=True):
            close(output.outputs.data, logits.softmax(-1))
        steps = PoolingParams(pooling_type="STEP", step_tag_id=PROMPTS[2][5], returned_token_ids=(2, 0))
        for output, logits, prompt in zip(llm.encode(PROMPTS, steps, use_tqdm=False), theirs, PROMPTS, strict=True):
            wanted = logits[torch.tensor(prompt) == PROMPTS[2][5]][:, [2, 0]].softmax(-1)
            assert output.outputs.data.shape == wanted.shape
            if len(wanted):
                close(output.outputs.data, wanted)
        with pytest.raises(ValueError, match="task='classify' is not what this model does"):
            llm.classify("x", use_tqdm=False)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("BertForSequenceClassification", {}),
        ("XLMRobertaForSequenceClassification", {}),
        ("ModernBertForSequenceClassification", {"local_attention": 16}),
    ],
)
def test_pairs_are_scored_as_by_the_reference(tmp_path, architecture, changes):
    """A second text is told apart by the types of its tokens, where the model does so."""
    model = make_encoder(tmp_path, architecture, num_labels=1, **changes)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs = []
    for first, second in PAIRS:
        encoded = tokenizer.encode(first, second)
        given = {"input_ids": torch.tensor([encoded.ids])}
        if architecture.startswith("Bert"):
            assert set(encoded.type_ids) == {0, 1}
            given["token_type_ids"] = torch.tensor([encoded.type_ids])
        with torch.inference_mode():
            theirs.append(float(model(**given).logits[0, 0].sigmoid()))
    with LLM(str(tmp_path), dtype="float32") as llm:
        scores = llm.score([first for first, _ in PAIRS], [second for _, second in PAIRS], use_tqdm=False)
        assert [output.outputs.score for output in scores] == pytest.approx(theirs, rel=1e-3)
        one_for_all = llm.score(PAIRS[0][0], [PAIRS[0][1], PAIRS[1][1]], use_tqdm=False)
        assert [output.outputs.score for output in one_for_all] == pytest.approx(theirs[:2], rel=1e-3)
        tokenizer.enable_truncation(9)
        (cut,) = llm.score("blue", "sea " * 99, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 9})
        assert cut.prompt_token_ids == tokenizer.encode("blue", "sea " * 99).ids


def test_a_decoder_scores_by_two_of_its_tokens(tmp_path):
    """The form of Qwen3-Reranker: how much likelier yes is than no."""
    model = make_encoder(tmp_path, "Qwen3ForCausalLM")
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    with LLM(str(tmp_path), dtype="float32", hf_overrides=overrides) as llm:
        tokenizer = llm.get_tokenizer()
        no, yes = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ny")
        outputs = llm.score([first for first, _ in PAIRS], [second for _, second in PAIRS], use_tqdm=False)
        for output in outputs:
            (logits,) = logits_of(model, [output.prompt_token_ids])
            assert output.outputs.score == pytest.approx(float(logits[-1, [no, yes]].softmax(-1)[1]), rel=1e-3)
    with LLM(
        str(tmp_path), dtype="float32", convert="classify", hf_overrides={"classifier_from_token": ["n", "y", "x"]}
    ) as llm:
        (output,) = llm.classify("Is it so?", use_tqdm=False)
        (logits,) = logits_of(model, [output.prompt_token_ids])
        ids = [llm.get_tokenizer().encode(letter, add_special_tokens=False)[0] for letter in "nyx"]
        close(output.outputs.probs, logits[-1, ids].softmax(-1))


def test_a_model_that_judges(tmp_path):
    """Each token gets what the head says, as it is."""
    model = make_encoder(tmp_path, "LlamaForTokenClassification", num_labels=2)
    with LLM(str(tmp_path), dtype="float32", convert="reward", max_num_batched_tokens=64) as llm:
        for output, logits in zip(llm.reward(PROMPTS, use_tqdm=False), logits_of(model), strict=True):
            close(output.outputs.data, logits)


def test_late_interaction(tmp_path):
    """A vector of each token; a score is the sum of each query token's best likeness (ColBERT)."""
    model = make_encoder(tmp_path, "BertModel", architectures=["HF_ColBERT"], dim=24)
    weights = load_file(tmp_path / "model.safetensors")
    linear = torch.randn(24, 64, generator=torch.Generator().manual_seed(1)) * 0.1
    named = {f"bert.{name}": tensor for name, tensor in weights.items()} | {"linear.weight": linear}
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    config = (tmp_path / "config.json").read_text().replace('"BertModel"', '"HF_ColBERT"')
    (tmp_path / "config.json").write_text(config)
    states = [torch.nn.functional.normalize(rows @ linear.T, dim=-1) for rows in hidden_states(model)]
    with LLM(str(tmp_path), dtype="float32") as llm:
        for output, wanted in zip(llm.encode(PROMPTS, use_tqdm=False), states, strict=True):
            close(output.outputs.data, wanted)
        (score,) = llm.score(PROMPTS[0], [PROMPTS[3]], use_tqdm=False)
        assert score.outputs.score == pytest.approx(float((states[0] @ states[3].T).amax(1).sum()), rel=1e-4)


@pytest.mark.parametrize("kind", ["CLS", "MEAN"])
def test_long_texts_are_split(tmp_path, kind):
    model = make_encoder(tmp_path, "BertModel", max_position_embeddings=64)
    prompt = PROMPTS[2]
    with torch.inference_mode():
        parts = [model(torch.tensor([prompt[at : at + 64]])).last_hidden_state[0] for at in range(0, len(prompt), 64)]
    wanted = sum(POOLED[kind](rows) * len(rows) for rows in parts) / len(prompt)
    pooler = {"pooling_type": kind, "enable_chunked_processing": True, "max_embed_len": 220}
    with LLM(str(tmp_path), dtype="float32", pooler_config=pooler) as llm:
        short, long = llm.embed([prompt[:10], prompt], use_tqdm=False)
        close(long.outputs.data, wanted / wanted.norm())
        assert long.prompt_token_ids == prompt
        assert len(short.outputs.data) == 64
        with pytest.raises(ValueError, match="has 221 tokens, at most 220 fit"):
            llm.embed([5] * 221, use_tqdm=False)
    with LLM(str(tmp_path), dtype="float32") as llm, pytest.raises(ValueError, match="at most 64 fit"):
        llm.embed(prompt, use_tqdm=False)


@pytest.mark.parametrize("case", ["bert", "roberta", "modernbert", "modernbert-with-biases"])
def test_a_step_in_bfloat16_is_one_native_call(tmp_path, monkeypatch, case):
    """Of any number of tokens: a few, which each thread norms for itself, and enough for threads to share rows."""
    plans = []
    run = LayerPlan.run
    monkeypatch.setattr(LayerPlan, "run", lambda plan, *args: plans.append(plan) or run(plan, *args))
    architecture, changes = CASES[case]
    model = make_encoder(tmp_path, architecture, **changes)
    theirs = [rows.mean(0).numpy() for rows in hidden_states(model)]
    params = PoolingParams(pooling_type="MEAN", normalize=False)
    few = PROMPTS[5][:3]

    def vectors(llm, prompts):
        return [np.asarray(output.outputs.data) for output in llm.encode(prompts, params, use_tqdm=False)]

    with LLM(str(tmp_path), dtype="bfloat16") as llm:
        together = vectors(llm, PROMPTS * 3)
        alone = [vectors(llm, [prompt])[0] for prompt in (*PROMPTS, few)]
    assert len(set(plans)) == (library() is not None)
    with LLM(str(tmp_path), dtype="bfloat16", attention_backend="TORCH_SDPA") as llm:
        one_by_one = vectors(llm, [*PROMPTS, few])
    for index, wanted in enumerate(theirs):
        allowed = 2 * np.abs(one_by_one[index] - wanted).max() + 1e-2
        for found in (together[index], together[index + len(theirs)], alone[index]):
            assert np.abs(found - wanted).max() < allowed
    assert np.abs(alone[-1] - one_by_one[-1]).max() < 5e-2


@pytest.mark.parametrize(("architecture", "base", "head"), [
    ("Qwen3ForSequenceClassification", "model", ("score",)),
    ("BertForSequenceClassification", "bert", ("classifier", "bert.pooler.dense")),
    ("RobertaForSequenceClassification", "roberta", ("classifier.dense", "classifier.out_proj")),
    ("ModernBertForSequenceClassification", "model", ("head.dense", "classifier")),
])  # fmt: skip
def test_heads_that_a_quantized_checkpoint_names_are_floats(tmp_path, architecture, base, head):
    make_encoder(tmp_path / "model", architecture, num_labels=3)
    layout = Layout(ignore=(*head, rf"re:{base}\.embed.*"))
    packed, plain = compress(tmp_path / "model", tmp_path, layout)
    found, wanted = (logits_of_classes(folder) for folder in (packed, plain))
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("architecture", ["Qwen3ForSequenceClassification", "RobertaForSequenceClassification"])
@pytest.mark.parametrize("name", ["gptq-4", "awq"])
def test_heads_are_floats_where_layers_are_integers(tmp_path, architecture, name):
    """GPTQ and AWQ quantize what is in layers, and name nothing else."""
    make_encoder(tmp_path / "model", architecture, num_labels=3, intermediate_size=128)
    packed, plain = store(tmp_path / "model", tmp_path, *FORMATS[name], only=r"\.layers?\.\d+\.")
    for ours, theirs in zip(logits_of_classes(packed), logits_of_classes(plain), strict=True):
        close(ours, theirs)


def logits_of_classes(folder):
    with LLM(str(folder), runner="pooling", dtype="float32") as llm:
        outputs = llm.encode(PROMPTS, PoolingParams(use_activation=False), use_tqdm=False)
    return [output.outputs.data for output in outputs]
