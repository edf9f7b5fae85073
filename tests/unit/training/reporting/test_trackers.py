"""Trackers: every step over all restarts, and nothing that they do hurts the run."""

from __future__ import annotations

import os
import pty
import random
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

import runs
from config.compose import load_config
from config.stored import as_plain
from training.reporting.console import Console
from training.reporting.trackers import close_trackers, guard, open_trackers, values_of

STEPS = 40


def events_of(run_dir: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (run_dir / "trackers" / "tensorboard").iterdir()
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


@pytest.mark.thorough
def test_each_step_is_there_once_after_kills_and_resumes(small, tmp_path):
    run_dir = tmp_path / "run"
    words = [*small, f"train.max_steps={STEPS}", "train.sample_every=10", "train.eval_every=10"]
    words += ["run.tracker=[tensorboard]", f"run.dir={run_dir}"]
    for step in sorted(random.Random(3).sample(range(12, STEPS - 2), 2)):
        with runs.started(runs.command(*words)) as process:
            runs.wait_until(lambda step=step: runs.newest_step(run_dir) >= step, process)
    result = runs.train(*words)
    assert result.returncode == 0, result.stderr
    assert "run.tracker=" not in result.stdout
    events = events_of(run_dir)
    losses = [
        (one.step, pytest.approx(one.value, rel=1e-6)) for one in events.Scalars("train/loss")
    ]
    assert losses == [(one["step"], one["loss"]) for one in runs.metrics(run_dir)]
    samples = {
        one.step: one.tensor_proto.string_val[0].decode()
        for one in events.Tensors("sample/text_summary")
    }
    assert samples == {one["step"]: one["text"] for one in runs.metrics(run_dir, "sample")}
    assert sorted(samples) == [10, 20, 30, 40]


class Fake(GeneralTracker):
    """Takes rows, and does what a test says at one of its calls."""

    name = "fake"
    requires_logging_directory = False
    tracker = None

    def __init__(self, **acts) -> None:
        super().__init__()
        self.rows, self.acts = [], acts

    def start(self) -> None:
        self.acts.get("start", int)()

    def log(self, values, step=None, **_) -> None:
        self.acts.get("log", int)()
        self.rows.append((step, values))

    def finish(self) -> None:
        self.acts.get("finish", int)()


def started(fake: Fake) -> GeneralTracker:
    tracker = guard(fake, Console(True, 10, 0))
    tracker.start()
    return tracker


def fail() -> None:
    raise SystemExit("a library's\n reason.")


@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_off_with_one_warning_that_has_the_reason(capsys, call):
    tracker = started(Fake(**{call: fail}))
    for step in (1, 2, 3):
        tracker.log({"loss": 1.0}, step=step)
    tracker.finish()
    tracker.log({"loss": 1.0}, step=4)
    tracker.finish()
    assert capsys.readouterr().out == (
        "warning: run.tracker=fake is off until the next start: a library's reason. metrics.jsonl "
        "has every step.\n"
    )


def test_a_tracker_that_hangs_at_the_end_is_not_waited_for(capsys):
    released = threading.Event()
    accelerator = SimpleNamespace(trackers=[started(Fake(finish=released.wait))])
    close_trackers(accelerator, Console(True, 10, 0), 0.1)
    assert capsys.readouterr().out.count("it has not taken all steps in time") == 1
    assert accelerator.trackers == []  # for accelerator.end_training
    released.set()


def test_train_py_may_log_more_and_no_secret_or_folder_leaves(tmp_path):
    folder = tmp_path / "a folder"
    source = "data.source='https://example.com/a.txt?sig=secret'"
    words = ["run.tracker=tensorboard", f"run.dir={folder}", source, "run.name=mine"]
    config = load_config([*words, f"data.cache_dir={folder}"])
    folder.mkdir()
    accelerator = Accelerator(cpu=True, log_with=config.run.tracker, project_dir=folder)
    open_trackers(accelerator, Console(True, 10, 0), config, "a" * 32, 0)
    accelerator.log({"mine/figure": 2.0}, step=3)
    sent: dict = {}
    fake = Fake()
    fake.store_init_configuration = sent.update
    accelerator.trackers.append(started(fake))
    accelerator.trackers[-1].store_init_configuration(as_plain(config))
    close_trackers(accelerator, Console(True, 10, 0), 60)
    figures = events_of(folder).Scalars("mine/figure")
    assert [(one.step, one.value) for one in figures] == [(3, 2.0)]
    assert sent["run"]["name"] == "mine"
    assert sent["data"]["source"] == "https://example.com/a.txt?***"
    assert "secret" not in str(sent)
    assert str(tmp_path) not in str(sent)


WITHOUT_KEY = """
import sys
from accelerate import Accelerator
from config.compose import load_config
from training.reporting.console import Console
from training.reporting.trackers import close_trackers, open_trackers
config = load_config(["run.tracker=wandb", f"run.dir={sys.argv[1]}"])
accelerator = Accelerator(cpu=True, log_with="wandb")
console = Console(True, 10, 0)
open_trackers(accelerator, console, config, "a" * 32, 0)
close_trackers(accelerator, console, 60)
"""


@pytest.mark.thorough
def test_without_a_key_the_console_gives_the_reason_and_nobody_is_asked(tmp_path):
    """At a terminal, too, where wandb asks otherwise."""
    ours, theirs = pty.openpty()
    none = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_MODE": "online"}
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_KEY, str(tmp_path)],
        stdin=theirs,
        stderr=theirs,
        stdout=subprocess.PIPE,
        text=True,
        env=runs.environment(**none),
        timeout=runs.DEADLINE_SECONDS,
        check=False,
        cwd=runs.ROOT,
    )
    os.close(theirs)
    os.close(ours)
    assert "run.tracker=wandb is off until the next start: No API key" in result.stdout


def test_values_are_numbers_or_a_text():
    line = {"event": "train", "step": 1, "loss": 2.0, "skipped": True, "hub_error": "x", "a": None}
    assert values_of(line) == {"train/loss": 2.0, "train/skipped": 1.0}
    assert values_of({"event": "sample", "step": 1, "text": "a\nb"}) == {"sample": "a\nb"}
