"""What a run says: shown to the letter but for what would act on a terminal, and never its end."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys

import pytest

from common.command import say_error
from training.reporting.console import Console, make_output_lossy
from training.reporting.report import Report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def lossy(monkeypatch):
    """sys.stdout and sys.stderr on this descriptor, as a run has them."""

    @contextlib.contextmanager
    def on(descriptor: int):
        with open(descriptor, "w", closefd=False, encoding="ascii") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            monkeypatch.setattr(sys, "stderr", stream)
            make_output_lossy()
            yield
            monkeypatch.undo()

    return on


def test_a_full_disk_under_the_output_raises_nothing(lossy, tmp_path):
    full = os.open("/dev/full", os.O_WRONLY)
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    with lossy(full):
        console = Console(shown=True, max_steps=3, step=0)
        console.say("lost")
        console.progress(1, 1.0, 1.0, 1.0)
        say_error("lost")
        print("lost")
        os.dup2(file, full)  # there is room again
        console.say("kept, é")
        say_error("kept")
    assert (tmp_path / "log").read_text() == "kept, \\xe9\nkept\n"
    assert console.shown
    os.close(full)
    os.close(file)


def test_a_terminal_that_is_gone_raises_nothing(lossy):
    ours, theirs = pty.openpty()
    with lossy(theirs):
        console = Console(shown=True, max_steps=3, step=0)
        assert console.bar is not None
        console.say("a line")
        os.close(ours)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(theirs, b"is it gone?")
        for step in (1, 2, 3):
            console.say("a line")
            console.bar.last_print_t = 0  # draw it each time
            console.progress(step, 1.0, 1.0, 1.0)
        console.close()
        say_error("a line")
    os.close(theirs)


def at_terminal(monkeypatch) -> Terminal:
    """What stdout and stderr are from now on."""
    opened = Terminal()
    monkeypatch.setattr(sys, "stdout", opened)
    monkeypatch.setattr(sys, "stderr", opened)
    return opened


@pytest.mark.parametrize(("columns", "cut"), [("80", ""), ("120", ", rate 0.0011")])
def test_the_bar_has_the_time_left_and_the_figures_that_fit(monkeypatch, columns, cut):
    terminal = at_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", columns)
    console = Console(shown=True, max_steps=1200, step=1000)
    console.progress(1018, 1.1075, 6050.0, 1.0, ["norm 0.52", "rate 0.0011"])
    console.close()
    _bar, last = terminal.getvalue().strip().split("\r")[-1].split(" | step ")
    figures = re.escape("loss 1.1075, 6.05k tokens/s, norm 0.52" + cut)
    assert re.match(r"1018/1200 \[00:0\d<00:0\d\], " + figures, last)


def test_the_bar_of_a_finished_run_is_full(monkeypatch):
    terminal = at_terminal(monkeypatch)
    console = Console(shown=True, max_steps=1200, step=1446)  # max_steps was larger before
    console.close()
    assert terminal.getvalue().endswith("\n")
    assert "| step 1446/1446 [" in terminal.getvalue()


def test_a_log_has_the_steps_and_its_terminal_no_bar(monkeypatch, tmp_path):
    """As with `> log` and `| tee log`, which may print on the same terminal."""
    terminal = at_terminal(monkeypatch)
    with open(tmp_path / "log", "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        console = Console(shown=True, max_steps=3, step=0)
        console.progress(2, 1.5, 10.0, 1.0, ["norm 0.50"])
    line = "step 2/3, loss 1.5000, norm 0.50, 10 tokens/s, 0:01 left\n"
    assert (tmp_path / "log").read_text() == line
    assert terminal.getvalue() == ""


def test_control_characters_are_shown_and_secrets_are_not(capsys):
    console = Console(shown=True, max_steps=3, step=0)
    console.say("a\x1b[2Jb\u202e\r")
    console.warn("https://u:p@h/x?t=1 is\x07 not there.")
    report = Report(console, tokens_per_step=1, last_snapshot=None)
    report.sample(7, "\x1b]0;title\x07é\n\tb")
    console.progress(1, 1.0, 1.0, 1.0, ["the Hub says \x1b[31mno"])
    say_error("error: \x9b31m")
    said, errors = capsys.readouterr()
    assert said.splitlines()[:5] == [
        r"a\x1b[2Jb\u202e\r",
        r"warning: https://h/x?*** is\x07 not there.",
        "----- sample at step 7 -----",
        r"\x1b]0;title\x07é",
        "\tb",
    ]
    assert r"the Hub says \x1b[31mno, 1 tokens/s, 0:01 left" in said
    assert errors == "error: \\x9b31m\n"
