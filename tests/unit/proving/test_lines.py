"""The lines of a proof: bounds, columns, and what a user may ask for."""

from __future__ import annotations

import pytest

from config.compose import load_config
from config.schema import ConfigError
from proving.checks import GREEN, RED, largest_difference, within
from proving.command import folder_of, parse


def test_a_difference_beyond_its_bound_is_red():
    assert within("loss", 1e-6, 1e-5, "").status == GREEN
    assert within("loss", 1e-4, 1e-5, "").status == RED
    assert within("loss", float("nan"), 1e-5, "").status == RED


def test_attempts_with_other_steps_or_without_a_figure_differ():
    assert largest_difference({1: 2.0, 2: 4.0}, {1: 2.0, 2: 4.4}) == pytest.approx(0.1)
    for other in ({2: 2.0}, {1: 2.0, 2: 2.0}, {1: None}, {}):
        assert largest_difference({1: 2.0}, other) == float("inf")


def test_words_of_train_and_options_of_the_proof_are_told_apart():
    options, words = parse(["--stop-at-red", "model=baby", "run.name=x"])
    assert options.stop_at_red
    assert words == ["model=baby", "run.name=x"]


def test_an_option_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--fualts", "model=baby"])
    assert "there is no option --fualts" in capsys.readouterr().err


def test_a_folder_of_somebody_else_is_not_written_to(tmp_path):
    config = load_config([f"run.dir={tmp_path / 'run'}"])
    (tmp_path / "run-proof").mkdir()
    assert folder_of(config) == tmp_path / "run-proof"
    (tmp_path / "run-proof" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"run-proof, which holds other files\. Name another"):
        folder_of(config)
