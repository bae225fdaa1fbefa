"""The playground in headless Chromium, against a server with scripted answers."""

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.fakes.openai_server import FakeOpenAIServer

pytestmark = pytest.mark.browser

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
    page.set_default_timeout(10_000)
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
    for _ in range(40):
        if server.num_aborted:
            break
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
    expect(page.locator(".turn.user")).to_have_text("Remember me.")
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
