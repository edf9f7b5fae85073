"""report.html: a run on one page that asks for nothing, also where the run is odd or hostile."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from itertools import pairwise

import pytest

import web_browser
from config.schema import Config, HubConfig
from store.goodput import Reading
from training.reporting.events import Events, add_sample
from training.reporting.pictures import round_ticks, write_page

VOID = {"meta", "link"}


class Page(HTMLParser):
    """The texts and attributes of a page whose elements are closed in order."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(content)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(run_dir, name="a run", records=(), **hub) -> Page:
    config = Config(hub=HubConfig(**hub))
    config.run.dir, config.run.name, config.train.max_steps = str(run_dir), name, 5
    write_page(config, records, "character")
    content = (run_dir / "report.html").read_text(encoding="utf-8")
    page = Page(content)
    assert not {"script", "img", "iframe"} & {tag for tag, _ in page.found}
    assert [link["href"] for tag, link in page.found if tag == "link"] == ["data:,"]  # no icon
    assert "://" not in content
    assert "url(" not in content
    return page


def steps(count: int) -> list[dict]:
    train = [
        {"event": "train", "step": n, "loss": 5 / n, "tokens_per_second": 1e4 + n}
        for n in range(1, count + 1)
    ]
    return [*train, {"event": "eval", "step": count, "loss": 0.5}]


def test_a_page_shows_the_run(tmp_path):
    Events(tmp_path / "events.jsonl", "0" * 32).add("start", 0, "from scratch")
    add_sample(tmp_path, 3, "To be\nor not")
    (tmp_path / "snapshots" / "step-00000003").mkdir(parents=True)
    page = page_of(tmp_path, records=steps(5))
    text = "\n".join(page.texts)
    assert "Step 5; lowest held-out loss 0.5000 nats per character, at step 5" in text
    for shown in ("To be\nor not", "from scratch", "Attempts so far: 1.", "step-00000003"):
        assert shown in text
    pictures = [attributes for tag, attributes in page.found if tag == "svg"]
    assert [one["role"] for one in pictures] == ["img", "img"]
    assert pictures[0]["aria-label"].startswith("Loss in nats per character over steps; at step 5")


def test_a_page_shows_where_the_time_of_all_attempts_went(tmp_path):
    events = Events(tmp_path / "events.jsonl", "0" * 32)
    for number, name in enumerate(("a" * 8, "b" * 8)):  # the second one resumes step 3 of 5
        seconds = {"start": 5.0, "forward and backward": 90.0, "data": 5.0}
        at = 1.7e9 + 1_000 * number
        events.read_clock(Reading(name, 3 * number, 5, 5, 1, at, 0.0, seconds))
    page = page_of(tmp_path, records=steps(5))
    text = "\n".join(page.texts)
    assert "Goodput: 72.0% of 0.06 machine-hours in 2 attempts; 1 interruption, 2 steps" in text
    for shown in ("steps in the model", "steps lost and redone", "36.0", "18.0%"):
        assert shown in text
    assert "clock" not in text, "readings are for programs"


def test_nothing_in_a_run_is_markup(tmp_path):
    bad = "<script>alert(1)</script>\x1b[31m&amp;"
    add_sample(tmp_path, 1, bad)
    (tmp_path / "events.jsonl").write_text(
        json.dumps(
            {
                "time": "2026-01-01T00:00:00Z",
                "attempt": "0" * 8,
                "event": "warning",
                "step": 1,
                "text": bad,
            }
        )
    )
    page = page_of(tmp_path, bad, steps(2))
    assert "\x1b" not in "".join(page.texts)
    assert sum("<script>alert(1)</script>" in text for text in page.texts) >= 3


def test_a_run_without_steps_or_with_one_has_a_page(tmp_path):
    assert "No step has been written yet." in page_of(tmp_path).texts
    page_of(tmp_path, records=steps(1))


def test_a_page_names_the_step_on_the_hub(tmp_path):
    records = [{**steps(1)[0], "hub_step": 20}, *steps(2)[1:2]]
    words = "me/run on the Hub had step 20 when this was drawn."
    assert words in page_of(tmp_path, records=records, repo_id="me/run").texts
    words = "me/bucket on the Hub had nothing yet when this was drawn."
    assert words in page_of(tmp_path, repo_id="me/run", bucket="me/bucket").texts


def test_a_page_loads_itself_again_until_the_run_is_finished(tmp_path):
    for count, reloads in ((4, 1), (5, 0)):
        found = [attributes for _, attributes in page_of(tmp_path, records=steps(count)).found]
        assert len([one for one in found if one.get("http-equiv") == "refresh"]) == reloads


@pytest.mark.parametrize(("width", "dark"), [(1000, False), (400, True)])
def test_a_browser_shows_it_and_asks_for_nothing(tmp_path, width, dark):
    add_sample(tmp_path, 3, "To be or not " * 30)
    Events(tmp_path / "events.jsonl", "0" * 32).add("warning", 3, "x" * 300)
    page_of(tmp_path, records=steps(4))
    with web_browser.served(tmp_path) as address, web_browser.chromium() as chromium:
        page = chromium.open(f"{address}report.html", width=width, dark=dark)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.requested == [f"{address}report.html"]
        assert page.errors == []
        colour = page.evaluate("getComputedStyle(document.documentElement).colorScheme")
        assert colour == "light dark"
        named = page.accessibility()
        assert next(name for role, name in named if role == "heading") == "a run"
        assert len([name for role, name in named if role == "image" and name]) == 2
        assert all(name for role, name in named if role in ("region", "image"))
        page.press("Tab")
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        page.press("Enter")
        assert not page.evaluate("document.querySelector('details').open")


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 0.0), (1.9, 4.6), (3.0, 3.0), (549, 24_000), (-2, 1e-9), (0, 132.8), (0, 1200)],
)
def test_axes_hold_what_they_show_in_round_numbers(low, high):
    ticks = round_ticks(float(low), float(high))
    assert ticks[0] <= low <= high <= ticks[-1]
    assert 2 <= len(ticks) <= 8
    (step,) = {round(after - before, 9) for before, after in pairwise(ticks)}
    assert round(step / 10 ** math.floor(math.log10(step)), 6) in (1, 2, 2.5, 5)
    assert all(tick / step == pytest.approx(round(tick / step), abs=1e-6) for tick in ticks)


def test_axes_read_as_a_person_would_label_them():
    assert round_ticks(0, 1200, whole=True) == [0, 200, 400, 600, 800, 1000, 1200]
    assert round_ticks(0, 132.8)[:6] == [0, 25, 50, 75, 100, 125]
    assert round_ticks(0, 3, whole=True) == [0, 1, 2, 3]
