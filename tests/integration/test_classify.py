"""Classifiers and cross-encoders over HTTP, against transformers."""

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.fakes.tiny_encoders import make_encoder
from tests.integration.server_process import running_server

FLAGS = ("--dtype", "float32", "--served-model-name", "tiny", "--cpu-threads", "1")
PROMPTS = [list(range(3, 3 + size)) for size in (40, 1, 200, 7)]


def serve(folder, **config):
    """The reference's model, and a running server of it."""
    model = make_encoder(folder, "BertForSequenceClassification", **config)
    model.folder = folder
    return model, running_server(str(folder), *FLAGS)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    labels = {"id2label": {0: "bad", 1: "so-so", 2: "good"}, "label2id": {"bad": 0, "so-so": 1, "good": 2}}
    model, server = serve(tmp_path_factory.mktemp("classifier"), **labels)
    with server as process:
        yield model, process.url


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    model, server = serve(tmp_path_factory.mktemp("cross_encoder"), num_labels=1)
    with server as process:
        yield model, process.url


def ask(url, path, **body):
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(url, path, **body):
    answer = httpx.post(url + path, json=body, timeout=60)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def logits_of(model, ids, types=None):
    with torch.inference_mode():
        return model(torch.tensor([ids]), token_type_ids=None if types is None else torch.tensor([types])).logits[0]


def pair(model, query, text, most=None):
    """Ids and types of two texts, as the tokenizer of the model joins them, and cuts them to so many tokens."""
    tokenizer = Tokenizer.from_file(f"{model.folder}/tokenizer.json")
    if most is not None:
        tokenizer.enable_truncation(most)
    joined = tokenizer.encode(query, text)
    return joined.ids, joined.type_ids


def test_classes_are_those_of_the_reference(classifier):
    model, url = classifier
    for path in ("/classify", "/v1/classify"):
        body = ask(url, path, model="tiny", input=PROMPTS)
        for item, prompt in zip(body["data"], PROMPTS, strict=True):
            wanted = logits_of(model, prompt).softmax(0).numpy()
            np.testing.assert_allclose(item["probs"], wanted, atol=1e-5)
            assert (item["label"], item["num_classes"]) == (("bad", "so-so", "good")[wanted.argmax()], 3)
        assert [item["index"] for item in body["data"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))


def test_logits_of_a_classifier(classifier):
    model, url = classifier
    body = ask(url, "/pooling", input=PROMPTS[0], use_activation=False)
    np.testing.assert_allclose(body["data"][0]["data"], logits_of(model, PROMPTS[0]).numpy(), atol=1e-4)


def test_what_a_classifier_cannot_do_has_a_reason(classifier):
    _, url = classifier
    status, _, message = refused(url, "/v1/embeddings", input="a")
    assert status == 404 and "/classify" in message
    assert refused(url, "/score", text_1="a", text_2="b")[0] == 404
    assert refused(url, "/classify", input="x" * 900)[0] == 400
    assert refused(url, "/classify", input=[])[:2] == (400, "input")


def test_a_cross_encoder_scores_pairs(cross_encoder):
    model, url = cross_encoder
    texts = ["blue water", "a", "stone"]
    wanted = [float(logits_of(model, *pair(model, "sea", text)).sigmoid()) for text in texts]
    body = ask(url, "/score", text_1="sea", text_2=texts)
    np.testing.assert_allclose([item["score"] for item in body["data"]], wanted, atol=1e-5)
    ranked = ask(url, "/rerank", query="sea", documents=texts, top_n=2)["results"]
    order = np.argsort(wanted)[::-1][:2]
    assert [item["index"] for item in ranked] == order.tolist()
    np.testing.assert_allclose([item["relevance_score"] for item in ranked], np.asarray(wanted)[order], atol=1e-5)


def test_pairs_that_are_too_long_are_cut_when_asked(cross_encoder):
    model, url = cross_encoder
    body = {"query": "sea", "documents": ["stone and water " * 40, "a"]}
    assert refused(url, "/rerank", **body)[:2] == (400, "documents")
    for cut, texts, most in (
        ({"truncate_prompt_tokens": -1}, body["documents"], model.config.max_position_embeddings),
        ({"truncate_prompt_tokens": 20}, body["documents"], 20),
        ({"max_tokens_per_doc": 9}, [text[:9] for text in body["documents"]], None),
    ):
        wanted = [float(logits_of(model, *pair(model, "sea", text, most)).sigmoid()) for text in texts]
        found = {item["index"]: item["relevance_score"] for item in ask(url, "/rerank", **body, **cut)["results"]}
        np.testing.assert_allclose([found[index] for index in range(2)], wanted, atol=1e-5)
