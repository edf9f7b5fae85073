"""The snapshot comes before the evaluation of its step, and a kill between them costs neither."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

import runs
from config.compose import load_config
from snapshot.disk.folder import verify
from snapshot.disk.state import RunState, read_state
from snapshot.start import Start
from training.reporting.metrics import MetricsFile, read_metrics
from training.run.records import evaluation_is_pending


def test_a_killed_evaluation_is_repeated_at_the_resume(finished_run, small, tmp_path):
    run_dir = tmp_path / "run"
    words = [*small, "model.dropout=0.1", "train.eval_every=10", f"run.dir={run_dir}"]
    for step in (10, 30):
        runs.run(runs.command(f"evaluates-{step}", *words, script=str(runs.ALTERED)), code=9)
        verify(runs.snapshot(run_dir, step))
        assert [r["step"] for r in runs.metrics(run_dir, "eval")] == list(range(10, step, 10))
    last = runs.train(*words, code=0)
    assert "held out  " in last.stdout
    assert "sample at step" not in last.stdout
    evaluations = runs.metrics(run_dir, "eval")
    assert [record["step"] for record in evaluations] == [10, 20, 30]
    assert read_state(runs.snapshot(run_dir, 30)).best_loss == evaluations[1]["loss"]
    runs.assert_same_bits(runs.snapshot(finished_run, 30), runs.snapshot(run_dir, 30))
    assert runs.losses(run_dir) == runs.losses(finished_run)


def test_no_sample_is_drawn_from_broken_weights(small, tmp_path):
    rare = ["snapshot.every=100", "train.eval_every=100", f"run.dir={tmp_path / 'run'}"]
    broken = ["optim.learning_rate=1e38", "optim.warmup_steps=0", "train.sample_every=1"]
    result = runs.train(*small, *rare, *broken, code=1)
    assert "stopped: the model's logits are not finite" in result.stderr
    assert "Traceback" not in result.stderr


class Resumed:
    """An attempt that resumes from step 10 of a run that evaluates every 5 steps."""

    def __init__(self, run_dir: Path, *events: dict) -> None:
        self.config = load_config(
            [f"run.dir={run_dir}", "train.eval_every=5", "train.max_steps=20"]
        )
        self.state = RunState("run", "attempt", 10, 0, 1337, 3.0, {}, {})
        folder = run_dir / "snapshots" / "step-00000010"
        folder.mkdir(parents=True)
        self.start = Start(folder, self.state, "")
        metrics = MetricsFile(run_dir / "metrics.jsonl", 0)
        metrics.append([{"event": "train", "step": 10, "loss": 2.0}, *events])

    def is_pending(self) -> bool:
        return evaluation_is_pending(self.config, self.start, self.state)


@pytest.mark.parametrize(("loss", "best"), [(2.5, 2.5), (3.5, 3.0)])
def test_an_evaluation_after_the_snapshot_updates_the_best_loss(tmp_path, loss, best):
    resumed = Resumed(tmp_path, {"event": "eval", "step": 10, "loss": loss})
    assert not resumed.is_pending()
    assert resumed.state.best_loss == best


def test_lines_of_the_loop_and_the_writer_do_not_mix(tmp_path):
    """The loop records an evaluation while a thread flushes the metrics for the snapshot."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 0)
    done = Event()

    def flush() -> None:
        while not done.is_set():
            metrics.flush()

    with ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(flush)
        for step in range(300):
            metrics.append([{"event": "eval", "step": step, "loss": 1.0}])
        done.set()
        flushing.result(timeout=runs.DEADLINE_SECONDS)
    assert [record["step"] for record in read_metrics(metrics.path)] == list(range(300))
