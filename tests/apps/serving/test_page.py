"""The page at `/`, in a real browser."""

import os
import shutil

import pytest

from tests.apps.serving.servers import TOKEN, Server

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(params=["light", "dark", "phone"])
def page(request, browser, server: Server):
    """The page, opened with the token; its errors fail the test. A screenshot is kept in T5X_SCREENSHOTS, if set."""
    size = {"width": 360, "height": 740} if request.param == "phone" else {"width": 1100, "height": 820}
    context = browser.new_context(color_scheme="light" if request.param == "light" else "dark", viewport=size)
    made = context.new_page()
    problems, asked = [], []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda message: problems.append(message.text) if "Content Security" in message.text else None)
    made.on("request", lambda sent: asked.append(sent.url))
    made.goto(server.url)
    made.get_by_label("Bearer token").fill(TOKEN)
    made.get_by_label("Bearer token").press("Tab")
    playwright.expect(made.get_by_label("Model")).to_have_value("tiny")
    yield made
    if directory := os.environ.get("T5X_SCREENSHOTS"):
        made.screenshot(path=f"{directory}/{request.node.name}.png", full_page=True)
    assert not problems
    assert all(url.startswith((server.url, "data:")) for url in asked)
    width = made.evaluate("document.documentElement.scrollWidth")
    assert width <= size["width"], "the page scrolls sideways"
    context.close()


def test_it_generates(page, server: Server):
    page.get_by_label("Input").fill("abc def")
    page.get_by_label("Max tokens").fill("40")
    page.get_by_label("Input").press("Control+Enter")
    expected = server.post("/v1/completions", prompt="abc def", max_tokens=40).json()
    playwright.expect(page.locator("#generate .output")).to_have_text(expected["choices"][0]["text"])
    playwright.expect(page.locator("#generate .meta")).to_contain_text("8 tokens in, 40 out · ")


def test_it_answers_and_marks_the_answer(page, server: Server):
    page.get_by_role("tab", name="Generate").press("ArrowRight")
    playwright.expect(page.get_by_role("tab", name="Ask")).to_be_focused()
    contexts = [f"😀 {a} {b} h hh hhh" for a in "abcdefgh" for b in "abcdefgh"]
    found = [server.post("/answer", question="ab", context=context, max_tokens=64).json() for context in contexts]
    located = next((pair for pair in zip(contexts, found, strict=True) if pair[1]["start"] is not None), None)
    context, answer = located or (contexts[0], found[0])
    page.get_by_label("Question").fill("ab")
    page.get_by_label("Passage", exact=True).fill(context)
    page.get_by_role("button", name="Answer").click()
    playwright.expect(page.locator("#ask .output")).to_have_text(context)
    if located:
        playwright.expect(page.locator("#ask mark")).to_have_text(context[answer["start"] : answer["end"]])


def test_it_ranks_with_bars(page, server: Server):
    page.get_by_role("tab", name="Rerank").click()
    passages = ["abc", "hg", "d e f", "a b"]
    page.get_by_label("Query").fill("ab")
    page.get_by_label("Passages").fill("\n".join(passages) + "\n\n")
    page.get_by_role("button", name="Rank").click()
    results = server.post("/v1/rerank", query="ab", documents=passages).json()["results"]
    playwright.expect(page.locator("#rerank .text")).to_have_text([passages[one["index"]] for one in results])
    widths = [page.locator("#rerank .bar div").nth(i).bounding_box()["width"] for i in range(len(passages))]
    assert widths == sorted(widths, reverse=True) and widths[0] > widths[-1]


def test_it_shows_errors(page):
    page.get_by_label("Input").fill("x" * 100)
    page.get_by_role("button", name="Generate").click()
    playwright.expect(page.get_by_role("alert")).to_contain_text("has 101 tokens, more than 64")
