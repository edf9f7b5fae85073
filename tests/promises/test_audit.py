"""python -m snapshot audit: whether a published snapshot is what its recipe gives."""

from __future__ import annotations

import sys

import pytest

import hubs
import runs
from proving.audit import distance

COMMAND = [sys.executable, "-m", "snapshot", "audit"]


@pytest.fixture(scope="module")
def audited(small, tmp_path_factory):
    """The directory of a run with dropout, of 30 steps."""
    run_dir = tmp_path_factory.mktemp("audited") / "run"
    words = [*small, "model.dropout=0.1", "run.adapt_threads=false", f"run.dir={run_dir}"]
    assert runs.train(*words).returncode == 0
    return run_dir


def folders(run_dir, *steps):
    return [str(runs.snapshot(run_dir, step)) for step in steps]


@pytest.mark.slow
def test_the_same_machine_gives_the_same_bits(audited, tmp_path):
    result = runs.run([*COMMAND, *folders(audited, 10, 20)], forked=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "10 steps of run" in result.stdout
    assert "green  same bits" in result.stdout


@pytest.mark.slow
def test_another_shape_differs_as_rounding_explains(audited, small):
    """Without dropout, whose masks are those of a shape, this is a matter of 1e-6."""
    command = runs.launch_command("ddp_cpu.yaml", "audit", *folders(audited, 10, 20))
    at = command.index(str(runs.ROOT / "train.py"))
    command[at : at + 1] = ["-m", "snapshot"]
    result = runs.run(command, forked=False)
    assert "on 2 processes" in result.stdout, result.stdout + result.stderr
    assert "as rounding explains" in result.stdout


@pytest.mark.slow
def test_another_recipe_is_found(audited):
    words = [*folders(audited, 10, 20), "optim.weight_decay=0.2"]
    result = runs.run([*COMMAND, *words], forked=False)
    assert result.returncode == 1
    assert "red    same bits" in result.stdout


@pytest.mark.slow
def test_snapshots_of_the_hub_are_audited(small, tmp_path, hub):
    words = [*small, *hubs.words(tmp_path / "run"), "run.adapt_threads=false"]
    words += ["hub.milestone_every=10"]
    assert runs.train(*words, **hub.environment()).returncode == 0
    names = [f"{hubs.REPO}@step-{step:08d}" for step in (10, 20)]
    text = next(word for word in small if word.startswith("data.source="))
    result = runs.run([*COMMAND, *names, text], forked=False, **hub.environment())
    assert result.returncode == 0, result.stdout + result.stderr
    assert "green  same bits" in result.stdout


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (20, 10, "Name the earlier one first"),
        (10, 10, "Name the earlier one first"),
        (10, None, "neither a folder nor the name of a repo"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_audited_is_told(audited, one, other, said):
    names = [*folders(audited, one), *(folders(audited, other) if other else ["nowhere/at/all"])]
    result = runs.run([*COMMAND, *names], forked=False)
    assert result.returncode == 2
    assert said in result.stderr


@pytest.mark.slow
def test_distance_is_relative_to_the_way(audited):
    begin, middle, end = (runs.snapshot(audited, step) for step in (10, 20, 30))
    assert distance(begin, end, end)[0] == 0
    assert distance(begin, end, begin)[0] == pytest.approx(1)
    assert 0.1 < distance(begin, end, middle)[0] < 1
