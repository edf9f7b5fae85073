"""Promise 2 of a streamed text: killed at any moment, a run reads on as if it had not been."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

import runs
import stream_data
import streams
from kills import after_a_rename, inside_a_step, kill_at

CURSOR = ("epoch", "window", "row", "token", "blocks")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sources")
    return [
        streams.parquet_folder(folder / "a", "a", files=4, rows=300),
        streams.lines_folder(folder / "b", "b", files=3, rows=300),
    ]


def words_of(sources: list, steps: int, *more: str) -> list[str]:
    """The overrides of a small run of two sources, mixed, with dropout."""
    one, other = sources
    return [
        f"data.mix=[{{source:{one},weight:0.7}},{{source:{other},weight:0.3}}]",
        "data.tokenizer=bpe:257",
        "data.window_bytes=3000",
        "data.stream_cache_bytes=300000",
        "data.held_out_bytes=4000",
        "data.block_size=16",
        "model.n_layer=2",
        "model.n_head=2",
        "model.n_embd=32",
        "model.dropout=0.1",
        "optim.warmup_steps=5",
        "train.global_batch_size=12",
        f"train.max_steps={steps}",
        "train.eval_every=25",
        "train.log_every=1",
        "snapshot.every=20",
        *more,
    ]


def cursors(run_dir: Path, step: int) -> list[list[int]]:
    """Where each source continues after a step."""
    state = json.loads((runs.snapshot(run_dir, step) / "state.json").read_text())
    return [[one[key] for key in CURSOR] for one in state["stream"]]


def soon(run_dir: Path, chosen: random.Random):
    """After a step or two more than the run has had."""
    before = (run_dir / "metrics.jsonl").stat().st_size
    return lambda: (run_dir / "metrics.jsonl").stat().st_size > before + chosen.randrange(300)


def newest_snapshot(run_dir: Path) -> str:
    return max((path.name for path in run_dir.glob("snapshots/step-*")), default="")


def kill_often(
    kills: int, run_dir: Path, words_at, said: Path, forked: bool, **changes: str
) -> None:
    """Kill a run so often, at least twice in a row before any new snapshot.

    `words_at` is the command of an attempt, by its number.
    """
    chosen = random.Random(2026)
    reached = []
    for number in range(kills):
        moment = (after_a_rename, soon, soon, inside_a_step)[number % 4](run_dir, chosen)
        assert kill_at(words_at(number), moment, said, forked, **changes), said.read_text()
        reached.append(newest_snapshot(run_dir))
    assert any(one == after for one, after in pairwise(reached)), reached


def compare(undisturbed: Path, killed: Path, steps: int, exact: bool) -> None:
    """All rows of the metrics are the same, and where each source continues."""
    assert cursors(killed, steps) == cursors(undisturbed, steps)
    for event in ("train", "eval"):
        one, other = (
            [record["loss"] for record in runs.metrics(run_dir, event)]
            for run_dir in (killed, undisturbed)
        )
        assert one == (other if exact else pytest.approx(other, abs=1e-4))
    if exact:
        runs.assert_same_bits(runs.snapshot(undisturbed, steps), runs.snapshot(killed, steps))


@pytest.mark.parametrize(
    ("kills", "steps"), [(2, 50), pytest.param(20, 500, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(900)
def test_a_killed_run_ends_with_the_same_bits(sources, tmp_path, kills, steps):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    shared = words_of(sources, steps, f"data.cache_dir={tmp_path / 'cache'}")
    runs.train(*shared, f"run.dir={undisturbed}", code=0)
    own = words_of(sources, steps, f"data.cache_dir={tmp_path / 'other'}", f"run.dir={killed}")
    kill_often(kills, killed, lambda number: runs.command(*own), tmp_path / "said", forked=True)
    runs.run(runs.command(*own), code=0)
    compare(undisturbed, killed, steps, exact=True)
    blocks = [blocks for *_, blocks in cursors(killed, steps)]
    assert blocks == [round(steps * 12 * weight) for weight in (0.7, 0.3)]
    other = runs.train(*own, "data.window_bytes=2000", code=2)
    assert "or another data.val_fraction, data.window_bytes or data.mix" in other.stderr


def on_the_hub(hub, sources) -> list[str]:
    """The same data sets on a hub, by their names there, each with a split for validation."""
    for folder in sources:
        files = {f"train-{path.name}": path.read_bytes() for path in folder.iterdir()}
        first = min(files)
        files[first.replace("train", "validation")] = files[first]
        stream_data.publish_dataset(hub, files, f"me/{folder.name}")
    return [f"me/{folder.name}" for folder in sources]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_run_streams_on_with_any_number_of_processes(sources, tmp_path, hub):
    steps, kills = 500, 20
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    names = on_the_hub(hub, sources)

    def words(run_dir: Path, processes: int, *more: str) -> list[str]:
        options = (f"--num_processes={processes}",)
        shared = words_of(names, steps, "model.dropout=0", f"run.dir={run_dir}", *more)
        return runs.launch_command("ddp_cpu.yaml", *shared, options=options)

    one, other = (f"data.cache_dir={tmp_path / name}" for name in ("cache", "other"))
    runs.run(words(undisturbed, 1, one), **hub.environment(), code=0)
    said = tmp_path / "said"

    def attempt(number: int) -> list[str]:
        return words(killed, (1, 3, 2, 1)[number * 4 // kills], other)

    kill_often(kills, killed, attempt, said, forked=False, **hub.environment())
    runs.run(words(killed, 1, other), **hub.environment(), code=0)
    compare(undisturbed, killed, steps, exact=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_under_fsdp_it_goes_on_with_other_processes(sources, tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    shared = words_of(sources, 50, "model.dropout=0", f"data.cache_dir={tmp_path / 'cache'}")
    runs.train(*shared, f"run.dir={undisturbed}", code=0)

    def attempt(number: int) -> list[str]:
        options = (f"--num_processes={2 if number < 2 else 3}",)
        words = (*shared, f"run.dir={killed}")
        return runs.launch_command("fsdp_cpu.yaml", *words, options=options)

    kill_often(2, killed, attempt, tmp_path / "said", forked=False)
    last = runs.run(attempt(2), code=0)
    assert "3 processes" in last.stdout
    compare(undisturbed, killed, 50, exact=False)


@pytest.mark.thorough
def test_a_run_stays_at_its_commit_when_the_branch_moves(sources, tmp_path, hub):
    names = on_the_hub(hub, sources)
    split = "data.held_out_split=validation"
    shared = words_of(names, 40, f"data.cache_dir={tmp_path / 'cache'}", split)
    undisturbed, stopped = tmp_path / "undisturbed", tmp_path / "stopped"
    for run_dir, steps in ((undisturbed, 20), (undisturbed, 40), (stopped, 20)):
        words = (*shared, f"run.dir={run_dir}", f"train.max_steps={steps}")
        runs.train(*words, **hub.environment(), code=0)
    new = stream_data.parquet_of(["new"])
    files = {f"{split}-part-0.parquet": new for split in ("train", "validation")}
    stream_data.publish_dataset(hub, files, names[0])
    moved = tmp_path / "moved"
    words = (f"run.dir={moved}", f"data.cache_dir={tmp_path / 'moved-cache'}")
    for more in ([*words, f"snapshot.resume={stopped}"], [f"run.dir={stopped}"]):
        runs.train(*shared, *more, **hub.environment(), code=0)
    assert cursors(stopped, 40) == cursors(moved, 40) == cursors(undisturbed, 40)
    assert runs.losses_from(moved, 21) == runs.losses_from(undisturbed, 21)
    assert [one["loss"] for one in runs.metrics(stopped, "eval")] == [
        one["loss"] for one in runs.metrics(undisturbed, "eval")
    ]
    assert runs.losses_from(stopped, 21) == runs.losses_from(undisturbed, 21)
    fixed = ("--cache-dir", str(tmp_path / "another"), "--device", "cpu", "--json")
    evaluated = runs.run(
        runs.command(str(stopped), *fixed, script="evaluate.py"), **hub.environment(), code=0
    )
    loss = runs.metrics(stopped, "eval")[-1]["loss"]
    assert json.loads(evaluated.stdout)["loss"] == pytest.approx(loss, abs=1e-6)


@pytest.mark.thorough
def test_a_server_that_misbehaves_changes_no_loss(sources, tmp_path, hub):
    steps, (undisturbed, faulty) = 60, (tmp_path / name for name in ("undisturbed", "faulty"))
    hub.lfs_above = 1000  # such files come from another address, as the Hub's do
    shared = words_of(on_the_hub(hub, sources), steps)
    runs_of = [(undisturbed, "cache"), (faulty, "other")]
    faults = []
    for run_dir, cache in runs_of:
        words = (*shared, f"run.dir={run_dir}", f"data.cache_dir={tmp_path / cache}")
        runs.train(*words, **hub.environment(), code=0)
        if not faults:
            later = {"Retry-After": "0.3"}
            faults = [
                hub.fault("blob-get", "truncated", after=12, times=2),
                hub.fault("blob-get", "reset", after=18, times=2),
                hub.fault("blob-get", "hang", after=24),
                hub.fault("resolve-get", "refuse", after=30, times=2),
                hub.fault("resolve-get", "status", status=503, after=36, times=2),
                hub.fault("resolve-get", "status", status=429, headers=later, after=42, times=2),
            ]
    assert all(fault.hits for fault in faults), faults
    compare(undisturbed, faulty, steps, exact=True)
