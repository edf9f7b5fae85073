"""Trackers: each step once in one run over all restarts, and nothing that they do hurts the run."""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import runs
from store.events import read_events
from training.reporting.track import Cursor, Rows, figures_of

STEPS = 40
TRACK = "training.reporting.track"


def tracked(small, run_dir, *names: str) -> list[str]:
    mine = ["train.max_steps=40", "train.sample_every=10", "train.eval_every=10"]
    return [*small, *mine, f"run.tracker=[{','.join(names)}]", f"run.dir={run_dir}"]


def killed_and_done(words, run_dir, kills, **changes) -> None:
    """Kill a run with -9 at some steps, and have it go on to its end."""
    for step in sorted(random.Random(3).sample(range(2, STEPS - 2), kills)):
        with runs.started(runs.command(*words), **changes) as process:
            runs.wait_until(partial(wrote, run_dir, step), process)
    result = runs.train(*words, **changes)
    assert result.returncode == 0, result.stderr
    warnings = re.findall(r"run\.tracker=(\w+) (.*)", result.stdout)
    for name, warning in warnings:  # a slow machine: the warning says how to send the rest
        assert "continues in the background" in warning
        rest = runs.run([sys.executable, "-m", TRACK, str(run_dir), "--to", name], **changes)
        assert rest.returncode == 0, rest.stderr


def wrote(run_dir: Path, step: int) -> bool:
    return (run_dir / "metrics.jsonl").exists() and any(
        one["step"] >= step for one in runs.metrics(run_dir)
    )


def expected(run_dir: Path) -> dict[int, float]:
    return {one["step"]: one["loss"] for one in runs.metrics(run_dir)}


def in_tensorboard(run_dir: Path) -> tuple[dict[int, list[float]], dict[int, str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (run_dir / "trackers" / "tensorboard").iterdir()
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    found: dict[int, list[float]] = {}
    for one in read.Scalars("train/loss"):
        found.setdefault(one.step, []).append(one.value)
    samples = {
        one.step: one.tensor_proto.string_val[0].decode()
        for one in read.Tensors("sample/text_summary")
    }
    return found, samples


@pytest.mark.thorough
def test_each_step_is_in_tensorboard_once_after_a_kill(small, tmp_path):
    run_dir = tmp_path / "run"
    words = tracked(small, run_dir, "tensorboard")
    killed_and_done(words, run_dir, 1)
    found, samples = in_tensorboard(run_dir)
    assert {step: len(one) for step, one in found.items()} == dict.fromkeys(range(1, 41), 1)
    for step, loss in expected(run_dir).items():
        assert found[step][0] == pytest.approx(loss, rel=1e-6)
    assert samples == {one["step"]: one["text"] for one in runs.metrics(run_dir, "sample")}
    assert sorted(samples) == [10, 20, 30, 40]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_each_step_is_there_once_after_ten_kills(small, tmp_path, name):
    run_dir = tmp_path / "run"
    there = {"TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_MODE": "offline"}
    killed_and_done(tracked(small, run_dir, name), run_dir, 10, **there)
    found = {
        "tensorboard": lambda: in_tensorboard(run_dir)[0],
        "trackio": lambda: in_trackio(tmp_path / "trackio"),
        "wandb": lambda: in_wandb(run_dir),
    }[name]()
    assert {step: len(one) for step, one in found.items()} == dict.fromkeys(range(1, 41), 1)
    for step, loss in expected(run_dir).items():
        assert found[step][0] == pytest.approx(loss, rel=1e-6)


def in_trackio(folder: Path) -> dict[int, list[float]]:
    """As trackio's own storage has them, of the only run."""
    program = (
        "import json\nfrom trackio.sqlite_storage import SQLiteStorage as s\nimport trackio\n"
        "(run,) = trackio.Api().runs('accelerate-gpt')\n"
        "rows = s.get_logs('accelerate-gpt', run.name, run_id=run.id)\n"
        "print(json.dumps([[r['step'], r['train/loss']] for r in rows if 'train/loss' in r]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=runs.environment(TRACKIO_DIR=str(folder)),
        timeout=runs.DEADLINE_SECONDS,
    )
    found: dict[int, list[float]] = {}
    for step, loss in json.loads(result.stdout.splitlines()[-1]):
        found.setdefault(step, []).append(loss)
    return found


def in_wandb(run_dir: Path) -> dict[int, list[float]]:
    """As the offline files have them, which `wandb sync` sends; all have the run's id."""
    from wandb.proto import wandb_internal_pb2

    found: dict[int, list[float]] = {}
    files = sorted((run_dir / "trackers").glob("wandb/offline-run-*/*.wandb"))
    assert len({path.stem for path in files}) == 1
    for path in files:
        for content in records_of(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") != "history":
                continue
            items = {one.key or "/".join(one.nested_key): one for one in record.history.item}
            if "train/loss" in items:
                loss = json.loads(items["train/loss"].value_json)
                found.setdefault(record.history.step.num, []).append(loss)
    return found


def records_of(content: bytes) -> list[bytes]:
    """The records of a file of wandb's: LevelDB's log format after seven bytes."""
    found, place, partial = [], 7, b""
    while place + 7 <= len(content):
        left = 32_768 - place % 32_768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        partial += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole one, or the last part of one
            found.append(partial)
            partial = b""
    return found


HANGS = """
import accelerate.tracking, time
class Hangs(accelerate.tracking.TensorBoardTracker):
    def log(self, *_, **__):
        time.sleep(600)
accelerate.tracking.LOGGER_TYPE_TO_CLASS["tensorboard"] = Hangs
"""
FAILS = HANGS.replace("time.sleep(600)", "raise ValueError('no room')")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "how"),
    [
        pytest.param(HANGS, "continues in the background", marks=pytest.mark.slow),
        (FAILS, "has failed"),
    ],
    ids=["hangs", "fails"],
)
def test_a_tracker_that_hangs_or_fails_costs_no_step(small, tmp_path, program, how):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "sitecustomize.py").write_text(program)
    run_dir = tmp_path / "run"
    words = tracked(small, run_dir, "tensorboard")
    result = runs.train(*words, PYTHONPATH=str(tmp_path / "modules"))
    assert result.returncode == 0, result.stderr
    assert sorted(expected(run_dir)) == list(range(1, STEPS + 1))
    assert result.stdout.count("run.tracker=tensorboard") == 1
    assert how in result.stdout
    assert f"python -m training.reporting.track {run_dir} --to tensorboard" in result.stdout


@pytest.mark.thorough
def test_a_tracker_is_built_from_a_run_that_had_none(small, finished_run, tmp_path):
    """Afterwards, and again: what is there already is not sent twice."""
    command = [sys.executable, "-m", TRACK, str(finished_run)]
    for _ in range(2):
        result = runs.run([*command, "--to", "tensorboard"])
        assert result.returncode == 0, result.stderr
    found, _ = in_tensorboard(finished_run)
    assert {step: len(one) for step, one in found.items()} == dict.fromkeys(range(1, 31), 1)
    result = runs.run([*command, "--to", "nothing"])
    assert result.returncode == 2
    assert "run.tracker=nothing is not installed" in result.stderr


def lines(run_dir: Path, *steps: int) -> None:
    with open(run_dir / "metrics.jsonl", "a") as opened:
        for step in steps:
            line = {"event": "train", "step": step, "loss": 1 / step, "skipped": True}
            opened.write(f"{json.dumps(line)}\n")


def test_rows_are_steps_that_are_known_to_be_complete(tmp_path):
    rows = Rows(tmp_path, 0, None)
    assert list(rows.next(False)) == []
    lines(tmp_path, 1, 2)
    event = {"time": "2026-01-01T00:00:00Z", "attempt": "0" * 8, "event": "start", "step": 0}
    (tmp_path / "events.jsonl").write_text(json.dumps({**event, "text": "from scratch"}) + "\n")
    assert len(read_events(tmp_path / "events.jsonl")) == 1
    ((step, row),) = rows.next(False)
    assert (step, row["train/loss"], row["train/skipped"]) == (1, 1.0, 1.0)
    assert row["events"] == "2026-01-01T00:00:00Z start from scratch"
    with open(tmp_path / "metrics.jsonl", "a") as opened:
        opened.write('{"event": "eval", "step": 2, "loss": 3.0, "text": null}\n')
        opened.write('{"event": "sample", "step": 2, "text": "second"}\n')
    assert list(rows.next(False)) == []
    ((step, row),) = rows.next(True)
    assert (step, row["train/loss"], row["eval/loss"], row["sample"]) == (2, 0.5, 3.0, "second")
    assert list(rows.next(True)) == []
    assert "eval/text" not in row


def test_a_long_run_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("training.reporting.track.MOST_BYTES", 200)
    lines(tmp_path, *range(1, 50))
    assert [step for step, _ in Rows(tmp_path, 7, None).next(True)] == list(range(8, 50))


def test_figures_are_numbers_only():
    found = figures_of([{"event": "train", "step": 1, "loss": 2.0, "hub_error": "x", "a": None}])
    assert found == {"train/loss": 2.0}


def test_a_damaged_cursor_begins_again(tmp_path):
    (tmp_path / "one.json").write_text("{")
    cursor = Cursor(tmp_path / "one.json")
    assert (cursor.step, cursor.event) == (0, None)
    cursor.write(3, {"step": 2})
    assert Cursor(tmp_path / "one.json").step == 3
    assert Cursor(tmp_path / "one.json").event == {"step": 2}


def test_events_come_once_and_in_their_order_also_after_a_kill(tmp_path):
    """The next attempt starts at an earlier step than the last warning of the one before."""
    lines(tmp_path, *range(1, 201))
    events = [
        {"time": f"2026-01-01T00:00:0{n}Z", "attempt": "0" * 8, "event": "start", "step": step}
        for n, step in enumerate((0, 150, 100, 100, 200))
    ]
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps({**one, "text": str(n)}) + "\n" for n, one in enumerate(events))
    )
    rows = Rows(tmp_path, 0, None)
    found = {step: row["events"] for step, row in rows.next(True) if "events" in row}
    assert list(found) == [1, 150, 200]
    assert [line[-1] for text in found.values() for line in text.splitlines()] == list("01234")
    assert list(Rows(tmp_path, 150, rows.event).next(True))[-1][1].keys() == {
        "train/loss",
        "train/skipped",
    }
