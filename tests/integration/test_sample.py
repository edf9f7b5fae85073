"""sample.py: text on the screen as it is generated."""

from __future__ import annotations

import io
import sys

import pytest

import runs
import sample as script
from data.errors import DataError
from small_snapshots import trained, write


@pytest.fixture
def sample(capsys):
    """What sample.py prints for these arguments."""

    def printed(*words: object) -> str:
        assert script.main([*map(str, words)]) == 0
        return capsys.readouterr().out

    return printed


def test_the_same_seed_gives_the_same_text_of_the_length(finished_run, sample):
    words = [finished_run, "--prompt", "the ", "--length", "40", "--seed", "3"]
    text = sample(*words)
    assert text == sample(*words)
    assert text.startswith("the ")
    assert len(text) == len("the ") + 40 + len("\n")  # past the context of 16
    several = ["--samples", "2", "--length", "5", "--prompt", "a", "--top-k", "3"]
    assert sample(runs.snapshot(finished_run, 10), *several).count("-" * 40) == 1


def test_a_model_that_never_saw_a_newline_needs_no_prompt(sample, tmp_path):
    assert len(sample(write(tmp_path, 1, *trained(1)), "--length", "5")) == 1 + 5 + len("\n")


def test_mistakes_are_sentences(finished_run, tmp_path, capsys):
    for words, sentence in [
        ([str(tmp_path / "none")], "is neither a folder that exists"),
        ([str(finished_run), "--system", "x"], "--system is for --chat"),
        ([str(finished_run), "--prompt", ""], "--prompt '' has no tokens in this tokenizer"),
        ([str(finished_run), "--chat", "--samples", "2"], "leave out --prompt and --samples"),
        ([str(finished_run), "--chat"], "has no chat template"),
        *(
            ([str(finished_run), "--device", device], f"--device {device} cannot be used here: ")
            for device in ("bogus", "meta", "cpu:-1")
        ),
        (["x" * 300], "File name too long"),
    ]:
        try:
            code = script.main(words)
        except SystemExit as ended:  # by argparse
            code = ended.code
        assert code == 2, words
        assert sentence in capsys.readouterr().err


def test_a_question_that_the_locale_does_not_decode_is_refused(monkeypatch):
    typed = io.TextIOWrapper(io.BytesIO("the cät\n".encode()), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", typed)
    with pytest.raises(DataError, match="set PYTHONUTF8=1"):
        next(script.questions())


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def says(monkeypatch):
    """What sample.py writes to a stream of this kind when the model has these pieces to say."""

    def written(pieces, stream) -> str:
        monkeypatch.setattr(script, "generate_texts", lambda options: iter(pieces))
        monkeypatch.setattr(sys, "stdout", stream)
        assert script.main(["anything"]) == 0
        return stream.buffer.getvalue().decode(stream.encoding)

    return written


@pytest.mark.parametrize(
    ("encoding", "pieces", "on_terminal", "in_file"),
    [
        ("utf-8", "é\x1b[2J\x9b\r\t\n", "é\\x1b[2J\\x9b\\r\t\n", "é\x1b[2J\x9b\r\t\n"),
        ("ascii", "日é\n", "\\u65e5\\xe9\n", "\\u65e5\\xe9\n"),
    ],
)
def test_a_terminal_shows_control_characters_a_file_gets_them(
    says, encoding, pieces, on_terminal, in_file
):
    """A terminal of ASCII shows other letters as escapes."""
    assert says(pieces, Terminal(io.BytesIO(), encoding)) == on_terminal
    assert says(pieces, io.TextIOWrapper(io.BytesIO(), encoding)) == in_file


def test_a_full_disk_is_a_sentence_and_a_closed_output_is_none(monkeypatch, capsys):
    monkeypatch.setattr(script, "generate_texts", lambda options: iter(["a text"]))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert script.main(["anything"]) == 1
    assert "error: the output: No space left on device" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", None)
    assert script.main(["anything"]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--temperature", "abc"], "abc is not a number"),
        (["--temperature", "nan"], "nan is not between 0 and 1000000.0"),
        (["--temperature", "-1"], "-1 is not between 0 and 1000000.0"),
        (["--top-p", "0"], "0 is not between 1e-06 and 1"),
        (["--top-k", "1e3"], "1e3 is not a whole number"),
        (["--length", "0"], "0 is not between 1 and 1000000000"),
        (["--seed", ""], " is not a whole number"),
        (["--seed", "9" * 30], f"{'9' * 30} is not between 0 and {2**63 - 1}"),
        (["--prompt", "caf\udce9"], script.UNDECODED),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(words, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        script.parse(["a-run", *words])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument {words[0]}: {sentence}\n")
