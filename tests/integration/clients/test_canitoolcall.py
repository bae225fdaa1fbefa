"""`canitoolcall probe`: its scenarios of tool use, whole and streamed, against servers on scripted engines, one for
each family of formats, and against the embedded model."""

import dataclasses
from collections.abc import Sequence

import pytest
from canitoolcall.probe import BUILTIN_SCENARIOS, EQUIVALENCE_CHECK, ProbeReport, probe

from pagemill.messages.engine_io import EngineCoreRequest
from tests.fakes.engine import running_server
from tests.fakes.fake_core import FakeCore
from tests.fakes.fake_tokenizer import EOS, ByteTokenizer
from tests.fakes.model_writers import WRITERS, Call, Writer
from tests.integration import server_process

PATIENCE_S = 300
EVENT = {
    "title": "Design review",
    "start": "2026-10-01T15:00:00Z",
    "attendees": [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}],
    "location": {"city": "Berlin", "room": "4.12"},
}
NOTE = {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"}
ANSWERS: dict[str, tuple[str, list[Call]]] = {
    "single-call": ("", [Call("get_weather", {"city": "Paris"})]),
    "parallel-calls": ("", [Call("get_weather", {"city": "Paris"}), Call("get_weather", {"city": "Tokyo"})]),
    "no-call": ("42", []),
    "nested-args": ("", [Call("create_event", EVENT)]),
    "unicode-args": ("", [Call("save_note", NOTE)]),
    "empty-args": ("", [Call("get_server_time", {})]),
    "forced-tool-choice": ("", [Call("get_weather", {"city": "Lisbon"})]),
    "tool-result-followup": ("18 degrees, and the sky is clear.", []),
    "reasoning-then-call": ("", [Call("record_answer", {"answer": "9.9"})]),
}
"""Scenario -> content and calls of the answer."""
THOUGHT = "Let me see."


class Scripted:
    """Answers each scenario as one family of models writes it."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._tokenizer = ByteTokenizer()

    def __call__(self, request: EngineCoreRequest) -> Sequence[int]:
        prompt = self._tokenizer.decode(request.prompt_token_ids)
        # Two scenarios begin with the same question: that with the tool's result has the longer one.
        asked = [one for one in BUILTIN_SCENARIOS if str(one.messages[-1]["content"]) in prompt]
        scenario = max(asked, key=lambda one: len(one.messages))
        content, calls = ANSWERS[scenario.id]
        thought = "" if scenario.tool_choice != "auto" else THOUGHT
        text = self._writer.write(thought, content, calls)
        return [*text.encode(), EOS]


def passes(report: ProbeReport) -> None:
    assert {outcome.status for outcome in report.outcomes} == {"pass"}, report.render_text()
    assert not any(outcome.warnings for outcome in report.outcomes), report.render_text()


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.calls)
def test_a_scripted_engine_passes_in_full(writer: Writer) -> None:
    server = {"enable_auto_tool_choice": True, "tool_call_parser": writer.calls, "reasoning_parser": writer.reasoning}
    with running_server(FakeCore(Scripted(writer), max_model_len=8192), **server) as url:
        report = probe(f"{url}/v1", "fake", timeout_s=PATIENCE_S)
    passes(report)
    assert len(report.outcomes) == 3 * len(BUILTIN_SCENARIOS)
    reasoning = {outcome.observed.reasoning_content for outcome in report.outcomes if outcome.observed}
    assert (THOUGHT in reasoning) == (writer.reasoning is not None)


ONE_CALL = {"parallel_tool_calls": False, "max_tokens": 160}
FREE = [
    dataclasses.replace(scenario, extra_body={"max_tokens": 48})
    for scenario in BUILTIN_SCENARIOS
    if scenario.id in ("single-call", "no-call", "unicode-args", "empty-args", "tool-result-followup")
]
NAMED = [
    dataclasses.replace(scenario, extra_body=ONE_CALL)
    for scenario in BUILTIN_SCENARIOS
    if scenario.tool_choice != "auto"
]
REQUIRED = [
    dataclasses.replace(scenario, id=f"{scenario.id}-required", tool_choice="required", extra_body=ONE_CALL)
    for scenario in BUILTIN_SCENARIOS
    if scenario.id in ("single-call", "empty-args", "reasoning-then-call")
]


@pytest.mark.model
def test_the_embedded_model_writes_no_marks_and_makes_the_calls_that_are_insisted_on(smollm2_path) -> None:
    """It is too small to choose tools well. Whatever it writes, a stream is the whole answer."""
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with server_process.running_server("smollm2", *tools) as server:
        scenarios = [*FREE, *NAMED, *REQUIRED]
        report = probe(f"{server.url}/v1", "smollm2", scenarios=scenarios, timeout_s=PATIENCE_S)
    insisted = {scenario.id for scenario in (*NAMED, *REQUIRED)}
    for outcome in report.outcomes:
        assert outcome.status != "error", report.render_text()
        assert "leaked" not in (outcome.detail or ""), report.render_text()
        if outcome.check == EQUIVALENCE_CHECK or outcome.scenario_id in insisted:
            assert outcome.status == "pass", report.render_text()
