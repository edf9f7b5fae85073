"""The model card shows what was trained on what, and nothing else of whose machine it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

import runs
from model.gpt import GPTConfig
from snapshot.disk.folder import read_json
from snapshot.disk.state import read_state
from store.card import card_text


@pytest.fixture(scope="module")
def card(finished_run):
    """The card of a finished run, with another run.name, data source or sample."""
    folder = runs.snapshot(finished_run, 30)
    state = read_state(folder)
    shape = GPTConfig.read(read_json(folder / "config.json"))

    def with_changes(
        name: str = "plain",
        source: str = "python-docs",
        sample: str = "",
        **facts: str,
    ) -> str:
        config = {**state.config, "run": {**state.config["run"], "name": name}}
        changed = replace(state, config=config, data={**state.data, **facts, "name": source})
        return card_text("me/run", changed, shape, {"torch": "1"}, sample=sample)

    return with_changes


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("/home/jane/secret-client/letters.txt", "letters.txt"),
        ("~/secret-client/letters", "letters"),
        ("secret-client/letters.jsonl.gz", "letters.jsonl.gz"),
        ("secret-client/2024/letters", "letters"),
        ("../secret-client/*.md", r"\*.md"),
        ("https://secret:word@example.org:8000/a/b.txt?token=secret#x", "example.org:8000/a/b.txt"),
        ("python-docs", "python-docs"),
        ("owner/data", "owner/data"),
    ],
)
def test_the_text_is_named_without_folders_and_credentials(card, source, shown):
    text = card(source=source)
    assert f"{shown}, " in text
    assert "secret" not in text
    assert "token=" not in text


def test_what_the_tokens_do_not_hold_is_named(card):
    assert "not in the tokens" not in card()
    lost = "44 % of the tokens are unknown to the tokenizer"
    assert f"| not in the tokens | {lost} |" in card(lost=lost)


def test_a_name_is_shown_as_it_is_and_never_is_markup(card):
    text = card(name="<img src=x onerror=alert(1)> ![a](http://b) `c` | d\n# e \x1b[31m")
    heading = next(line for line in text.splitlines() if line.startswith("# "))
    assert heading == (
        r"# &lt;img src=x onerror=alert(1)&gt; !\[a\](http://b) \`c\` \| d # e \\x1b\[31m"
    )
    assert "<img" not in text


def test_a_sample_cannot_leave_its_block_in_the_card(card):
    text = card(sample="one\n```\n<script>\x1b[2J\ttwo\r")
    assert "````text\none\n```\n<script>\\x1b[2J\ttwo\n````" in text
    assert "\x1b" not in text


def test_the_sources_of_a_stream_are_shown_with_their_blocks(finished_run):
    folder = runs.snapshot(finished_run, 30)
    shape = GPTConfig.read(read_json(folder / "config.json"))
    place = {"epoch": 1, "window": 2, "row": 3, "token": 4}
    stream = [
        {"source": "me/words", "revision": "c0ffee", "blocks": 7000, **place},
        {"source": "/home/jane/secret-client/*.jsonl", "revision": None, "blocks": 3000, **place},
    ]
    state = replace(read_state(folder), stream=stream)
    text = card_text("me/run", state, shape, {"torch": "1"})
    assert "me/words@c0ffee: 7,000 blocks, to row 3 of window 2 in epoch 2 |" in text
    assert r"| \*.jsonl: 3,000 blocks" in text
    assert "secret-client" not in text
