"""The browser of the tests: it types, waits, and sees the requests and errors of pages."""

from __future__ import annotations

import pytest

import web_browser
from web_browser import BrowserError

PAGE = """data:text/html,<!doctype html><input id="text" autofocus><p id="seen"></p><script>
text.addEventListener("keydown", (event) => { seen.textContent %2B= event.key; });
const code = "fetch('data:,asked').then(() => { postMessage('done'); throw new Error('in it'); });";
const worker = new Worker(URL.createObjectURL(new Blob([code])));
worker.onmessage = (event) => { seen.dataset.worker = event.data; };
</script>"""


def test_the_browser_types_and_sees_requests_and_errors_also_of_workers():
    with web_browser.chromium() as chromium:
        page = chromium.open(PAGE)
        page.evaluate("text.focus()")
        page.type("é🙂")
        page.press("Enter")
        page.wait_for("seen.textContent === 'Enter'")
        assert page.evaluate("text.value") == "é🙂"
        page.wait_for("seen.dataset.worker === 'done'")
        assert "data:,asked" in page.requested
        page.evaluate("console.error('said')")
        chromium.wait_until(lambda: len(page.errors) >= 2, "both errors")
        assert "said" in page.errors
        assert any("in it" in error for error in page.errors)
        with pytest.raises(BrowserError, match="the reason"):
            page.evaluate("(() => { throw new Error('the reason'); })()")
        with pytest.raises(BrowserError, match="not true"):
            page.wait_for("false", seconds=0.1)
