"""sample.py: text on the screen as it is generated."""

from __future__ import annotations

import runs


def sample(*arguments: str):
    return runs.run(runs.command(*arguments, script="sample.py"))


def test_the_same_seed_gives_the_same_text_of_the_length_asked_for(finished_run):
    words = [str(finished_run), "--prompt", "the ", "--length", "40", "--seed", "3"]
    first, second = sample(*words), sample(*words)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert first.stdout.startswith("the ")
    assert len(first.stdout) == len("the ") + 40 + len("\n")  # past the context of 16


def test_a_snapshot_can_be_named_and_several_texts_drawn(finished_run):
    folder = runs.snapshot(finished_run, 10)
    result = sample(str(folder), "--samples", "2", "--length", "5", "--prompt", "a", "--top-k", "3")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("-" * 40) == 1


def test_a_model_that_never_saw_a_newline_speaks_without_a_prompt(small, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("no line ends here, " * 50)
    words = [*small, f"data.source={text}", f"run.dir={tmp_path / 'run'}", "train.max_steps=2"]
    assert runs.train(*words).returncode == 0
    result = sample(str(tmp_path / "run"), "--length", "5")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) == 1 + 5 + len("\n")


def test_mistakes_are_sentences(finished_run, tmp_path):
    for words, sentence in [
        ([str(tmp_path / "none")], "is not a folder"),
        ([str(finished_run), "--temperature", "-1"], "is not a number from 0 up"),
        ([str(finished_run), "--top-p", "0"], "is not above 0 and at most 1"),
        ([str(finished_run), "--length", "0"], "is not between 1 and"),
        ([str(finished_run), "--length", "1e3"], "1e3 is not a whole number"),
        ([str(finished_run), "--seed", "9" * 30], "is not between 0 and"),
        ([str(finished_run), "--device", "bogus"], "--device bogus cannot be used here"),
        ([str(finished_run), "--prompt", ""], "needs at least one character"),
    ]:
        result = sample(*words)
        assert result.returncode == 2, words
        assert sentence in result.stderr
        assert "Traceback" not in result.stderr
