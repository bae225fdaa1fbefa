"""The playground in headless Chromium, against a server with scripted answers."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.fakes.openai_server import FakeOpenAIServer

pytestmark = pytest.mark.browser
LIMIT_MS = 60_000
expect.set_options(timeout=LIMIT_MS)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = "<img src=x onerror=\"document.title='owned'\"> and <script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        say = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        say(f"no browser: none of {', '.join(BROWSERS)} is on the PATH (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[FakeOpenAIServer]:
    with FakeOpenAIServer() as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: FakeOpenAIServer) -> Iterator[Page]:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if "Content Security" in message.text else None)
    page.goto(server.url)
    expect(page.locator("#model-name")).to_have_text("fake-135m")
    yield page
    context.close()
    assert problems == []


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_an_answer_is_streamed_rendered_and_measured(page: Page, server: FakeOpenAIServer):
    say(page, "Tell me about the ocean.")
    answer = page.locator(".turn.assistant")
    expect(answer.locator(".text")).to_have_text("The ocean is wide.")
    expect(answer.locator("strong")).to_have_text("ocean")
    expect(answer.locator(".stats")).to_contain_text("4 tokens")
    expect(answer.locator(".stats")).to_contain_text("tokens/s")
    expect(answer.locator(".stats")).to_contain_text("first token")
    expect(answer.locator(".stats")).to_contain_text("prompt 7")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Tell me about the ocean."}]
    assert server.bodies[0]["model"] == "fake-135m"
    assert "temperature" not in server.bodies[0], "an empty field is left to the server"


MARKED = """() => [...CSS.highlights.get("draft")].map((range) => range.toString())"""


def test_accepted_drafts_are_marked_and_counted(page: Page, server: FakeOpenAIServer):
    server.script.pieces = ["The **oce", "an** is ", "*wi", "de*.\n\n```py\nis", " = 2\n```\n\n- a", " b"]
    server.script.accepted = [0, 2, 0, 1, 1, 0]
    say(page, "Tell me about the ocean.")
    answer = page.locator(".turn.assistant")
    answer.get_by_role("button", name="Regenerate").wait_for()
    expect(answer.locator(".stats").first).to_contain_text("10 tokens")
    expect(answer.locator(".stats").first).to_contain_text("4 of 12 drafts accepted")
    expect(answer.locator(".legend")).to_have_text("Came by accepted drafts")
    assert page.evaluate(MARKED) == ["an", " is ", "de", ".", "is = 2", "a"]
    page.get_by_role("tab", name="Completion").click()
    server.script.pieces, server.script.accepted = ["one ", "two ", "three"], [0, 1, 0]
    page.get_by_label("Text to continue").fill("zero ")
    page.get_by_role("button", name="Complete").click()
    expect(page.locator("#completion-stats")).to_contain_text("1 of 6 drafts accepted")
    expect(page.locator("#completion-legend")).to_be_visible()
    assert page.evaluate(MARKED)[-1] == "two "
    assert server.bodies[-1]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_no_drafts_no_legend(page: Page, server: FakeOpenAIServer):
    say(page, "Tell me about the ocean.")
    page.get_by_role("button", name="Regenerate").wait_for()
    expect(page.locator(".legend")).to_have_count(1)
    expect(page.locator("#completion-legend")).to_be_hidden()
    assert page.evaluate(MARKED) == []


def test_the_second_question_carries_the_first_and_the_settings(page: Page, server: FakeOpenAIServer):
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Top k").fill("40")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Stop strings").fill("END\n\\n\\n")
    say(page, "One?")
    page.get_by_role("button", name="Regenerate").wait_for()
    page.get_by_label("Message", exact=True).fill("Two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines?")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .stats")).to_have_count(2)
    page.get_by_role("button", name="Regenerate").wait_for()
    body = server.bodies[1]
    assert [message["content"] for message in body["messages"]] == [
        "Be brief.",
        "One?",
        "The **ocean** is wide.",
        "Two\nlines?",
    ]
    assert (body["temperature"], body["top_k"], body["seed"]) == (0.5, 40, 7)
    assert body["stop"] == ["END", "\n\n"]


def test_stop_ends_the_request_and_keeps_what_came(page: Page, server: FakeOpenAIServer):
    server.script.pieces = ["word "] * 200
    server.script.delay_s = 0.05
    say(page, "Go on.")
    expect(page.locator(".turn.assistant .text")).to_contain_text("word word")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".turn.assistant .stats")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.wait_for_function("document.querySelector('#log').getAttribute('aria-busy') === 'false'")
    assert 2 <= page.locator(".turn.assistant .text").inner_text().count("word") < 100
    deadline = time.monotonic() + 60
    while not server.num_aborted and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert server.num_aborted == 1


def test_an_error_is_shown_in_place_and_can_be_retried(page: Page, server: FakeOpenAIServer):
    server.script.error = (400, "max_tokens=100000 is too large")
    say(page, "Hello?")
    expect(page.locator(".turn.assistant .error")).to_have_text("max_tokens=100000 is too large")
    server.script.error = None
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".turn.assistant .text")).to_have_text("The ocean is wide.")
    expect(page.locator(".error:visible")).to_have_count(0)
    assert server.bodies[1]["messages"] == server.bodies[0]["messages"]


def test_an_error_inside_the_stream_keeps_the_text_before_it(page: Page, server: FakeOpenAIServer):
    server.script.break_after = 2
    say(page, "Hello?")
    expect(page.locator(".turn.assistant .error")).to_have_text("the engine died")
    expect(page.locator(".turn.assistant .text")).to_have_text("The ocean")


def test_a_question_that_failed_is_not_sent_again(page: Page, server: FakeOpenAIServer):
    server.script.error = (400, "no")
    say(page, "Bad one")
    page.get_by_role("button", name="Retry").wait_for()
    server.script.error = None
    say(page, "Good one")
    page.get_by_role("button", name="Regenerate").wait_for()
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["Good one"]


def test_html_of_the_model_stays_text(page: Page, server: FakeOpenAIServer):
    server.script.pieces = [HOSTILE, " **", HOSTILE, "**\n\n```\n", HOSTILE, "\n```\n\n[x](javascript:alert(1))"]
    say(page, "Attack.")
    page.get_by_role("button", name="Regenerate").wait_for()
    expect(page.locator(".turn.assistant")).to_contain_text("onerror")
    assert page.locator(".turn img, .turn script, .turn a").count() == 0
    assert "owned" not in page.title()


def test_markdown_becomes_structure(page: Page, server: FakeOpenAIServer):
    text = "# Plan\n\n1. read `config`\n   - map it\n2. serve\n\n```python\nprint('**no**')\n```\n\n> quoted"
    server.script.pieces = [text[start : start + 3] for start in range(0, len(text), 3)]
    say(page, "Plan?")
    page.get_by_role("button", name="Regenerate").wait_for()
    answer = page.locator(".turn.assistant .text")
    expect(answer.locator("h3")).to_have_text("Plan")
    expect(answer.locator("ol > li")).to_have_count(2)
    expect(answer.locator("ol > li > ul > li")).to_have_text("map it")
    expect(answer.locator("pre code")).to_have_text("print('**no**')")
    expect(answer.locator("blockquote")).to_have_text("quoted")


def test_the_conversation_survives_a_reload_until_it_is_cleared(page: Page, server: FakeOpenAIServer):
    page.get_by_label("Temperature").fill("0.5")
    say(page, "Remember me.")
    page.get_by_role("button", name="Regenerate").wait_for()
    page.reload()
    expect(page.locator(".turn.user .text")).to_have_text("Remember me.")
    expect(page.locator(".turn.assistant .text")).to_have_text("The ocean is wide.")
    expect(page.get_by_label("Temperature")).to_have_value("0.5")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.reload()
    expect(page.locator(".turn")).to_have_count(0)


def test_regenerate_asks_the_same_again(page: Page, server: FakeOpenAIServer):
    say(page, "Again?")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".turn.assistant .text")).to_have_text("The ocean is wide.")
    page.get_by_role("button", name="Regenerate").wait_for()
    assert len(server.bodies) == 2
    assert server.bodies[0]["messages"] == server.bodies[1]["messages"]


def test_completion_continues_a_text_and_its_own_output(page: Page, server: FakeOpenAIServer):
    page.get_by_role("tab", name="Completion").click()
    server.script.pieces = [" red,", " yellow"]
    page.get_by_label("Text to continue").fill("The colours are")
    page.keyboard.press("Enter")
    expect(page.locator("#completion-output")).to_have_text("The colours are red, yellow")
    expect(page.locator("#completion-stats")).to_contain_text("2 tokens")
    page.get_by_role("button", name="Continue from here").click()
    expect(page.get_by_label("Text to continue")).to_have_value("The colours are red, yellow")
    assert server.bodies[0]["prompt"] == "The colours are"
    server.script.error = (400, "prompt is too long")
    page.get_by_role("button", name="Complete").click()
    expect(page.locator("#completion-error")).to_have_text("prompt is too long")


def test_a_wrong_setting_is_not_sent(page: Page, server: FakeOpenAIServer):
    page.get_by_label("Temperature").fill("9")
    say(page, "Hello?")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Hello?")
    assert server.bodies == []


def test_a_locked_server_gets_its_key(page: Page, server: FakeOpenAIServer):
    server.script.api_key = "secret"
    say(page, "Hello?")
    page.get_by_label("API key").fill("secret")
    page.get_by_role("button", name="Use key").click()
    expect(page.locator("#notice")).to_be_hidden()
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".turn.assistant .text")).to_have_text("The ocean is wide.")
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def call_delta(arguments: str, name: str | None = None) -> dict:
    head = {"id": "call_1", "type": "function"} if name else {}
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"tool_calls": [{"index": 0, **head, "function": function}]}


def test_reasoning_is_shown_and_not_sent_again(page: Page, server: FakeOpenAIServer):
    server.script.deltas = [{"reasoning": "Seas are "}, {"reasoning": "<b>big</b>."}, {"content": "It is wide."}]
    say(page, "How wide?")
    page.get_by_role("button", name="Regenerate").wait_for()
    answer = page.get_by_role("article", name="Model")
    expect(answer.locator(".text")).to_have_text("It is wide.")
    answer.get_by_text("Reasoning").press("Enter")
    expect(answer.locator(".thoughts")).to_be_visible()
    expect(answer.locator(".thoughts")).to_have_text("Seas are <b>big</b>.")
    say(page, "And deep?")
    expect(page.locator(".turn.assistant .stats")).to_have_count(2)
    page.get_by_role("button", name="Regenerate").wait_for()
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "It is wide."}


def test_a_tool_call_is_shown_and_gets_its_result(page: Page, server: FakeOpenAIServer):
    tool = {"name": "weather", "parameters": {"type": "object"}}
    page.get_by_label("Tools", exact=True).fill(json.dumps([tool]))
    server.script.deltas = [call_delta("", "weather"), call_delta('{"city": "'), call_delta('Oslo"}')]
    say(page, "Weather?")
    call = page.get_by_role("region", name="Call of weather")
    expect(call.locator("code")).to_have_text('{\n  "city": "Oslo"\n}')
    page.get_by_label("Result of weather").fill("rain")
    server.script.deltas = None
    page.get_by_role("button", name="Send result").click()
    expect(page.locator(".turn.assistant .text").last).to_have_text("The ocean is wide.")
    page.get_by_role("button", name="Regenerate").wait_for()
    assert server.bodies[0]["tools"] == [{"type": "function", "function": tool}]
    arguments = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert server.bodies[1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_1", "type": "function", "function": arguments}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
    ]


def test_a_schema_asks_for_an_object(page: Page, server: FakeOpenAIServer):
    schema = page.get_by_label("Answer as JSON: schema")
    schema.fill('{"type":')
    say(page, "A city?")
    assert server.bodies == [], "what is no JSON is not sent"
    assert schema.evaluate("field => field.validationMessage").startswith("This is not JSON")
    schema.fill('{"type": "object"}')
    page.get_by_label("Message", exact=True).press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    form = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    assert server.bodies[0]["response_format"] == {"type": "json_schema", "json_schema": form}


def titles(page: Page) -> list[str]:
    return page.locator("#history-list .title").all_inner_texts()


def test_chats_are_kept_searched_opened_and_deleted(page: Page, server: FakeOpenAIServer):
    for text in ("About whales.", "About mills."):
        say(page, text)
        page.get_by_role("button", name="Regenerate").wait_for()
        page.get_by_role("button", name="New chat").click()
    page.reload()
    page.get_by_role("button", name="History").click()
    expect(page.locator("#history-count")).to_have_text("2 chats")
    assert titles(page) == ["About mills.", "About whales."]
    page.get_by_label("Search chats").fill("OCEAN whales")
    expect(page.locator("#history-count")).to_have_text("1 chat")
    page.get_by_role("button", name="About whales.", exact=True).click()
    expect(page.locator(".turn.user .text")).to_have_text("About whales.")
    expect(page.get_by_role("complementary", name="History")).to_be_hidden()
    page.get_by_role("button", name="History").click()
    page.get_by_label("Search chats").fill("")
    page.get_by_role("button", name="Delete About whales.").click()
    expect(page.locator("#history-count")).to_have_text("1 chat")
    expect(page.locator(".turn")).to_have_count(0)
    page.reload()
    page.get_by_role("button", name="History").click()
    assert titles(page) == ["About mills."]


def test_an_edited_message_is_a_branch(page: Page, server: FakeOpenAIServer):
    for text in ("One", "Two"):
        say(page, text)
        page.get_by_role("button", name="Regenerate").wait_for()
    page.get_by_role("article", name="You").nth(1).get_by_role("button", name="Edit message").click()
    page.get_by_role("textbox", name="Edit message").fill("Three")
    page.get_by_role("button", name="Send edited").click()
    expect(page.locator(".turn.user .text").nth(1)).to_have_text("Three")
    page.get_by_role("button", name="Regenerate").wait_for()
    asked = [message["content"] for message in server.bodies[-1]["messages"]]
    assert asked == ["One", "The **ocean** is wide.", "Three"]
    page.get_by_role("button", name="Branch from here").first.click()
    expect(page.locator(".turn")).to_have_count(2)
    kept = page.evaluate(
        "JSON.parse(localStorage.getItem('pagemill.chats')).map((chat) => chat.turns.map((t) => t.content))"
    )
    says = "The **ocean** is wide."
    assert kept == [["One", says], ["One", says, "Three", says], ["One", says, "Two", says]]


def test_a_chat_is_exported(page: Page, server: FakeOpenAIServer):
    say(page, "Keep <this>.")
    page.get_by_role("button", name="Regenerate").wait_for()
    page.get_by_role("button", name="History").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export this chat").click()
    assert download.value.suggested_filename == "Keep-this-.json"
    exported = json.loads(Path(download.value.path()).read_text())
    assert [message["content"] for message in exported["messages"]] == ["Keep <this>.", "The **ocean** is wide."]


UNNAMED = """
() => [...document.querySelectorAll("button, input, textarea, summary, [tabindex='0']")]
  .filter((node) => node.checkVisibility())
  .filter((node) => !(node.ariaLabel || node.textContent.trim() || node.labels?.length || node.closest("pre")))
  .map((node) => node.outerHTML)
"""


def test_everything_has_a_name_and_changes_are_announced(page: Page, server: FakeOpenAIServer):
    server.script.deltas = [{"reasoning": "Hm."}, {"content": "Yes."}, call_delta("{}", "weather")]
    say(page, "Hello?")
    expect(page.get_by_role("status")).to_have_text("The answer is complete")
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name="Edit message").click()
    assert page.evaluate(UNNAMED) == []
    expect(page.get_by_role("log", name="Conversation")).to_have_attribute("aria-busy", "false")
    landmarks = [page.get_by_role("main"), page.get_by_role("complementary", name="Settings")]
    for landmark in landmarks:
        expect(landmark).to_have_count(1)


def test_the_keyboard_is_enough(page: Page, server: FakeOpenAIServer):
    """Ask, edit, search, open and close: no mouse, and the focus is never lost."""
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("One")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    page.get_by_role("button", name="Edit message").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("textbox", name="Edit message")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Edit message")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type(" more")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Send edited")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".turn.user .text")).to_have_text("One more")
    page.get_by_role("button", name="Regenerate").wait_for()
    toggle = page.get_by_role("button", name="History")
    toggle.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Search chats")).to_be_focused()
    page.keyboard.type("more")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="One more", exact=True)).to_be_focused()
    page.keyboard.press("Escape")
    expect(toggle).to_be_focused()
    expect(toggle).to_have_attribute("aria-expanded", "false")
    toggle.press("Enter")
    page.get_by_label("Search chats").press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_a_phone_has_everything_within_reach(browser: Browser, server: FakeOpenAIServer):
    context = browser.new_context(viewport={"width": 360, "height": 640})
    page = context.new_page()
    page.goto(server.url)
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Temperature")).to_be_visible()
    page.get_by_role("button", name="Close").click()
    say(page, "Hello?")
    page.get_by_role("button", name="Regenerate").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    context.close()
