"""Requests that killed, filled or opened other servers, by the advisory: each is refused before it reaches the engine.
Those about connections, keys and what a server says are in the files beside this one."""

import httpx
import pytest

from tests.fakes.engine import running_server
from tests.fakes.fake_core import FakeCore

TEXT, CHAT, VECTORS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
CLAUDE, OLLAMA, TOKENIZE = "/v1/messages", "/api/chat", "/tokenize"
HI = [{"role": "user", "content": "hi"}]


def image(url):
    """A conversation with a picture from there."""
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


SOURCE = {"type": "url", "url": "http://169.254.169.254/latest/meta-data"}
CLAUDES_IMAGE = [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]
REFUSED = [
    ("CVE-2024-8768", TEXT, {"prompt": ""}),
    ("CVE-2024-8768", TEXT, {"prompt": []}),
    ("CVE-2024-8768", TEXT, {"prompt": [[]]}),
    ("CVE-2024-8939", TEXT, {"prompt": "a", "best_of": 10**6}),
    ("CVE-2025-62164", TEXT, {"prompt": "a", "prompt_embeds": "AAAA"}),
    ("CVE-2026-56340", CHAT, {"messages": HI, "prompt_embeds": ["AAAA"]}),
    ("CVE-2025-48942", TEXT, {"prompt": "a", "guided_json": {"type": "no such type"}}),
    ("CVE-2025-48943", TEXT, {"prompt": "a", "guided_regex": "("}),
    ("CVE-2026-54235", TEXT, b'{"prompt": "a", "temperature": NaN}'),
    ("CVE-2026-54235", TEXT, b'{"prompt": "a", "top_p": 1e999}'),
    ("CVE-2026-54235", CHAT, b'{"messages": [{"role": "user", "content": "a"}], "temperature": -Infinity}'),
    ("CVE-2026-93592", TEXT, {"prompt": [-1]}),
    ("CVE-2026-93592", TEXT, {"prompt": [10**6]}),
    ("CVE-2026-93592", VECTORS, {"input": [-1]}),
    ("CVE-2026-93840", TEXT, {"prompt": "a", "allowed_token_ids": [10**6]}),
    ("CVE-2026-93841", TEXT, {"prompt": [2**31], "repetition_penalty": 1.5}),
    ("CVE-2026-105756", TEXT, {"prompt": "a", "cache_salt": "a/b"}),
    ("CVE-2026-105756", TEXT, {"prompt": "a", "cache_salt": "a" * 129}),
    ("GHSA-4xqp-c3mv-qff7", TEXT, {"prompt": "a", "min_tokens": 2**31 - 1, "max_tokens": 5}),
    ("GHSA-4xqp-c3mv-qff7", TEXT, {"prompt": "a", "min_tokens": 2**31 - 1}),
    ("CVE-2026-93436", TEXT, {"prompt": "a", "max_tokens": -1}),
    ("CVE-2025-61620", CHAT, {"messages": HI, "chat_template": "{% for i in range(10**9) %}{% endfor %}"}),
    ("CVE-2025-61620", CHAT, {"messages": HI, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
    ("CVE-2025-62426", CHAT, {"messages": HI, "chat_template_kwargs": {"tokenize": True}}),
    ("CVE-2026-34756", TEXT, {"prompt": "a", "n": 10**9}),
    ("CVE-2026-34756", CHAT, {"messages": HI, "n": 10**9}),
    ("CVE-2026-73559", TEXT, {"prompt": ["a"] * 10**5}),
    ("CVE-2026-73559", VECTORS, {"input": ["a"] * 10**5}),
    ("GHSA-83mh-6mwq-3hg9", CHAT, {"messages": HI * 10**5}),
    ("CVE-2025-6242", CHAT, {"messages": image("http://169.254.169.254/latest/meta-data")}),
    ("CVE-2026-73560", CHAT, {"messages": image("file:///etc/passwd")}),
    ("CVE-2025-48944", CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": 5}}]}),
    ("CVE-2025-48944", CLAUDE, {"max_tokens": 5, "messages": HI, "tools": [{"name": "f", "input_schema": "x"}]}),
    ("CVE-2026-105757", TEXT, {"prompt": "a", "guided_choice": []}),
    ("CVE-2026-105757", TEXT, {"prompt": "a", "guided_grammar": "start: nowhere"}),
    ("CVE-2026-73557", TEXT, {"prompt": "a", "prompt_embeds": ["AAAA"] * 3}),
    ("GHSA-h3rc-6mm3-gc2m", CHAT, {"messages": HI, "mm_processor_kwargs": {"code_revision": "x"}}),
    ("CVE-2026-94622", TEXT, {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}}),
    ("CVE-2026-94623", TEXT, {"prompt": ["a", "b"], "kv_transfer_params": {"do_remote_decode": True}}),
    ("CVE-2026-94624", CHAT, {"messages": HI, "kv_transfer_params": {"remote_host": "10.0.0.1", "remote_port": 1}}),
    ("CVE-2026-94625", CHAT, {"messages": HI, "kv_transfer_params": {"transfer_id": "x"}}),
    ("CVE-2026-94626", TEXT, {"prompt": "a", "kv_transfer_params": {"tp_size": 10**9}}),
    ("CVE-2026-94627", CHAT, {"messages": HI, "kv_transfer_params": {"transfer_id": "same"}}),
    ("CVE-2026-55514", TEXT, {"prompt_embeds": "AAAA"}),
    ("CVE-2026-105922", TEXT, {"prompt_embeds": "AAAA", "repetition_penalty": 1.5}),
    ("GHSA-x9pq-jx6q-p3qv", CHAT, {"messages": HI, "prompt_embeds": "AAAA", "presence_penalty": 1.0}),
    ("CVE-2026-93989", TEXT, {"prompt": "a", "bad_words": [""]}),
    ("CVE-2026-93989", CHAT, {"messages": HI, "bad_words": ["a"] * 10**5}),
    ("CVE-2026-24779", CHAT, {"messages": image("http://127.0.0.1\\@example.org/x.png")}),
    ("CVE-2026-25960", CHAT, {"messages": image("https://example.org#@10.0.0.1/x.png")}),
    # The same on the routes beside them, which elsewhere were forgotten.
    ("CVE-2024-8768", CLAUDE, {"max_tokens": 5, "messages": []}),
    ("CVE-2024-8768", TOKENIZE, {"prompt": ""}),
    ("CVE-2025-48942", OLLAMA, {"model": "fake", "messages": HI, "format": {"type": "no such type"}}),
    ("CVE-2026-54235", CLAUDE, b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "top_p": NaN}'),
    ("CVE-2026-54235", OLLAMA, b'{"model": "fake", "messages": [], "options": {"temperature": Infinity}}'),
    ("CVE-2026-93592", "/detokenize", {"tokens": [-1]}),
    ("CVE-2026-71486", "/detokenize", {"tokens": [2**62]}),
    ("CVE-2026-115918", CLAUDE, {"max_tokens": 5, "messages": HI, "chat_template": "{{ 1 }}"}),
    ("CVE-2026-115918", TOKENIZE, {"messages": HI, "chat_template": "{{ 1 }}"}),
    ("CVE-2026-115918", TOKENIZE, {"messages": HI, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
    ("CVE-2026-115918", VECTORS, {"messages": HI, "chat_template": "{{ 1 }}"}),
    ("CVE-2026-115918", VECTORS, {"messages": HI, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
    ("CVE-2026-115918", f"{CHAT}/render", {"messages": HI, "chat_template": "{{ 1 }}"}),
    ("CVE-2026-115918", "/api/generate", {"model": "fake", "prompt": "a", "template": "{{ 1 }}"}),
    ("CVE-2026-73559", f"{TEXT}/render", {"prompt": ["a"] * 10**5}),
    ("GHSA-83mh-6mwq-3hg9", CLAUDE, {"max_tokens": 5, "messages": HI * 10**5}),
    ("GHSA-83mh-6mwq-3hg9", OLLAMA, {"model": "fake", "messages": HI * 10**5}),
    ("CVE-2025-6242", CLAUDE, {"max_tokens": 5, "messages": CLAUDES_IMAGE}),
    ("GHSA-823j-m4cj-hmjf", TOKENIZE, {"messages": image("http://169.254.169.254/latest/meta-data")}),
]  # fmt: skip


@pytest.fixture(scope="module")
def core():
    return FakeCore()


@pytest.fixture(scope="module")
def url(core):
    with running_server(core) as url:
        yield url


@pytest.mark.parametrize(
    ("advisory", "path", "body"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_refused(url, core, advisory, path, body):
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    steps = core.num_steps
    answer = httpx.post(url + path, headers={"content-type": "application/json"}, timeout=300, **content)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert path.startswith(("/v1/messages", "/api/")) or set(error) == {"message", "type", "param", "code"}
    assert len(answer.text) < 2000
    assert core.num_steps == steps, "it reached the engine"


def test_a_request_for_no_tokens_leaves_nothing_behind(url, core):
    """CVE-2026-93436: elsewhere max_tokens=0 was refused too late. Here it computes the prompt, and that is all."""
    answer = httpx.post(url + TEXT, json={"prompt": "a", "max_tokens": 0}, timeout=300)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 0
    assert answer.json()["choices"][0]["text"] == ""
    assert not core.has_work()


def test_large_uploads_are_refused_before_they_are_read(url):
    """CVE-2026-55646: by what they say of their length; and where they say nothing, when there is too much."""

    def parts():
        for _ in range(100):
            yield b"a" * 2**20

    for content in (b"a" * (16 * 2**20 + 1), parts()):
        try:
            answer = httpx.post(url + TEXT, content=content, headers={"content-type": "application/json"}, timeout=300)
        except httpx.WriteError:
            continue  # the server was done with it
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


def test_requests_of_one_name_are_not_mixed_up(url):
    """CVE-2026-105755: a client chooses X-Request-Id, and may choose that of another."""
    with httpx.Client(headers={"x-request-id": "same"}) as client:
        answers = [client.post(url + TEXT, json={"prompt": f"<{i}>", "max_tokens": 3}) for i in range(10)]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [f"<{i}>"[:3] for i in range(10)]
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
