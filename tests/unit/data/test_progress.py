"""What is said while a text is prepared."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

import data.prepare
import data.progress
import data.reading.rows
import data.reading.text
import training.run.text
from config.schema import Config
from data.progress import Progress
from texts import TEXT


def test_what_is_quick_is_done_without_a_word(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(data.progress, "FIRST_SECONDS", 600)  # a busy machine is slow
    (tmp_path / "a.txt").write_text(TEXT)
    lines = []
    prepare(tmp_path / "a.txt", say=lines.append)

    assert lines == []
    assert not [thread for thread in threading.enumerate() if "_report" in thread.name]


@pytest.mark.parametrize("activity", ["reading", "encoding"])
def test_a_preparation_that_takes_long_says_how_far_it_is(prepare, tmp_path, monkeypatch, activity):
    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.setattr(data.progress, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(data.progress, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(data.reading.text, "PIECE_BYTES", 1000)
    for name in ("CHUNK_CHARACTERS", "CHARACTERS_AT_ONCE"):
        monkeypatch.setattr(f"data.chunks.{name}", 1000)
    said, lines = threading.Event(), []

    def say(line):
        lines.append(line)
        if f"{activity} {tmp_path / 'a.txt'}: " in line:
            said.set()

    really = data.reading.rows.text_parts
    passes = []

    def slow(tables):
        passes.append(tables)
        for number, part in enumerate(really(tables)):
            if number == 5 and len(passes) == (1 if activity == "reading" else 2):
                assert said.wait(timeout=60)
            yield part

    monkeypatch.setattr(data.reading.rows, "text_parts", slow)
    prepare(tmp_path / "a.txt", say=say)

    assert said.is_set()
    assert lines[0].startswith("text      ")
    assert str(tmp_path / "a.txt") in lines[-1]


def test_progress_is_in_percent_where_the_whole_is_known():
    progress = Progress()
    progress.doing("fetching http://x", 400_000_000)
    assert progress.line() == "text      fetching http://x: 0%"
    progress.done = 100_000_000
    assert progress.line() == "text      fetching http://x: 25%"
    progress.doing("fetching http://x")
    assert progress.line() == "text      fetching http://x"
    progress.done = 3_200_000
    assert progress.line() == "text      fetching http://x: 3 MB"
    progress.doing("reading a.txt", unit="million characters")
    progress.done = 12_000_000
    assert progress.line().endswith("reading a.txt: 12 million characters")


@pytest.mark.parametrize("first", [True, False])
def test_one_process_of_each_machine_reports(monkeypatch, capsys, first):
    def open_text(data, tokenizer, seed, access, *_):
        access.say("it takes long")

    work = {"local_main_first": lambda _, work: work(), "is_one_machine": lambda: True}
    for name, stub in {**work, "open_text": open_text}.items():
        monkeypatch.setattr(training.run.text, name, stub)
    accelerator = SimpleNamespace(is_local_main_process=first)
    training.run.text.prepare_text(accelerator, Config(), None, None)
    assert ("it takes long" in capsys.readouterr().err) is first
