"""Promises 1 and 2 over machines that come and go: the curve is that of an undisturbed run."""

from __future__ import annotations

import time

import pytest

import runs
from elastic import Machines, machines

CHANGES = {
    "joins": (
        (0,),
        [("join", 1), ("join", 2), ("kill", 1), ("join", 3), ("join", 1)],
    ),
    "notices": (
        (0, 1, 2),
        [("notify", 2), ("join", 2), ("notify", 0), ("join", 0), ("kill", 1)],
    ),
    "first": (
        (0, 1, 2),
        [("kill", 0), ("join", 0), ("lose_power", 0), ("join", 0), ("lose_power", 2)],
    ),
    "at_once": (
        (0, 1, 2, 3),
        [("kill", 1, 3), ("join", 1, 3), ("kill", 0, 2), ("join", 2), ("notify", 1)],
    ),
}
"""The hosts at the beginning, and what then happens, one after the other."""


EVERY = 10
"""Steps between two snapshots of a run whose machines lose shards."""


def words_of(small: list[str]) -> list[str]:
    return [
        *small,
        "train.max_steps=2000",
        "train.global_batch_size=16",  # which three processes fill up
        "train.log_every=1",
        "train.eval_every=1000",
        "snapshot.every=100",
        "optim.learning_rate=1e-4",
        "optim.min_learning_rate=1e-4",
        "run.collective_timeout_seconds=8",
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CHANGES)
def test_a_run_whose_machines_come_and_go_has_an_undisturbed_curve(name, small, tmp_path):
    begin, changes = CHANGES[name]
    words = words_of(small)
    with machines(4, "ddp_elastic.yaml", tmp_path, *words) as run:
        begun = time.monotonic()
        run.join(*begin)
        run.go_on()
        print(f"start: {time.monotonic() - begun:.1f} s")
        lost = [changed(run, *change) for change in changes]
        run.stop()
        last = run.newest_step()
        found = run.metrics()
    assert [record["step"] for record in found] == list(range(1, last + 1))
    compare(found, undisturbed(words, tmp_path, last))
    assert lost == [0] * len(changes)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shards_that_are_lost_come_from_the_newest_snapshot(small, tmp_path):
    words = [*words_of(small), f"snapshot.every={EVERY}"]
    with machines(3, "fsdp_elastic.yaml", tmp_path, *words) as run:
        run.join(0, 1, 2)
        run.go_on()
        runs.wait_until(lambda: run.newest_step() > EVERY + 3, run.alive[0])
        assert 0 < changed(run, "kill", 1) <= 2 * EVERY  # also those while one was being written
        assert changed(run, "join", 1) == 0
        assert changed(run, "notify", 0) == 0
        run.stop()
        last = run.newest_step()
        found = run.metrics()
    assert [record["step"] for record in found] == list(range(1, last + 1))
    compare(found, undisturbed(words, tmp_path, last))


def changed(run: Machines, how: str, *hosts: int) -> int:
    """Have machines join or leave, and wait until the others go on; returns the steps lost."""
    begun = time.monotonic()
    getattr(run, how)(*hosts)
    before = run.go_on()
    seconds, lost = time.monotonic() - begun, before - run.resumed_at()
    print(
        f"{how} {hosts} at step {before}: {len(run.alive)} go on from {run.resumed_at()}, "
        f"after {seconds:.1f} s, {lost} steps lost"
    )
    return lost


def undisturbed(words: list[str], folder, last: int) -> list[dict]:
    """The metrics of one process that nothing happens to."""
    whole = folder / "whole"
    with runs.started(runs.command(*words, f"run.dir={whole}"), folder / "said") as process:
        runs.wait_until(lambda: runs.newest_step(whole) >= last, process)
    return runs.metrics(whole)[:last]


def compare(found: list[dict], expected: list[dict]) -> None:
    """Each row of metrics equals the other's to 1e-5."""
    worst = {
        key: max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(found, expected, strict=True))
        for key in ("loss", "grad_norm")
    }
    print(f"{len(found)} rows, largest relative differences {worst}")
    assert worst["loss"] < 1e-5
    assert worst["grad_norm"] < 1e-5
