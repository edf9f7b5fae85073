"""The browser of the tests: it types, waits, and sees the requests and errors of pages."""

from __future__ import annotations

import pytest

import web_browser
from web_browser import BrowserError

PAGE = """<!doctype html><title>A page</title>
<label>Text <input id="text" autofocus></label><p id="seen"></p>
<script>
text.addEventListener("keydown", (event) => { seen.textContent += event.key; });
new Worker("worker.js").onmessage = (event) => { seen.dataset.worker = event.data; };
</script>"""
WORKER = "fetch('asked.txt').then(() => { postMessage('done'); throw new Error('in it'); });"


@pytest.fixture(scope="module")
def chromium():
    with web_browser.chromium() as running:
        yield running


@pytest.fixture
def address(tmp_path):
    for name, content in (("index.html", PAGE), ("worker.js", WORKER), ("asked.txt", "")):
        (tmp_path / name).write_text(content)
    with web_browser.served(tmp_path) as served:
        yield served


def test_keys_sizes_and_colours_reach_the_page(chromium, address, tmp_path):
    page = chromium.open(address, width=400, height=300, dark=True)
    page.evaluate("text.focus()")
    page.type("é🙂")
    page.press("Enter", control=True)
    page.press("Escape")
    page.wait_for("seen.textContent === 'EnterEscape'")
    assert page.evaluate("[text.value, innerWidth]") == ["é🙂", 400]
    dark = "matchMedia('(prefers-color-scheme: dark)').matches"
    assert page.evaluate(dark)
    page.set_colours(dark=False)
    assert not page.evaluate(dark)
    assert ("textbox", "Text") in page.accessibility()
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_requests_and_errors_of_workers_are_seen(chromium, address):
    page = chromium.open(address)
    page.wait_for("seen.dataset.worker === 'done'")
    assert {f"{address}{name}" for name in ("", "worker.js", "asked.txt")} <= set(page.requested)
    page.evaluate("console.error('said')")
    chromium.wait_until(lambda: len(page.errors) >= 2, "both errors")
    assert "said" in page.errors
    assert any("in it" in error for error in page.errors)


def test_what_raises_or_never_happens_is_an_error(chromium, address):
    page = chromium.open(address)
    with pytest.raises(BrowserError, match="the reason"):
        page.evaluate("(() => { throw new Error('the reason'); })()")
    with pytest.raises(BrowserError, match="not true"):
        page.wait_for("false", seconds=0.1)
