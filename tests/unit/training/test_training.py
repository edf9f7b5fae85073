"""The small pieces of the loop: rates, decay groups, seeds, metrics, figures, curves."""

from __future__ import annotations

import math
import os
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from config.schema import ConfigError, OptimConfig
from data.prepared import CorpusInfo
from model.gpt import GPT, GPTConfig
from training.distributed.accelerator import Accelerator
from training.reporting.console import Console
from training.reporting.metrics import MetricsFile, read_metrics
from training.reporting.report import Report, TrainingStopped
from training.reporting.trackers import values_of
from training.run.session import Session
from training.step import learning_rate_at, make_optimizer, reseed

TEXT = CorpusInfo("text", 3000, 1, 1000, 900, 2700, 320, 100, 0, 0, "0" * 64)
"""100 held-out tokens of 320 bytes."""


@pytest.mark.parametrize(
    ("warmup", "step", "rate"),
    [
        (10, 1, 0.1),
        (10, 5, 0.5),
        (10, 10, 1.0),
        (10, 11, 0.999781),
        (10, 35, 0.868198),
        (10, 60, 0.55),
        (10, 110, 0.1),
        (10, 200, 0.1),
        (0, 1, 0.999816),
    ],
)
def test_the_rate_rises_linearly_then_falls_along_a_cosine(warmup, step, rate):
    rates = OptimConfig(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=warmup)
    assert learning_rate_at(step, rates, max_steps=110) == pytest.approx(rate, rel=1e-5)


def test_matrices_decay_and_vectors_do_not():
    model = GPT(GPTConfig(vocab_size=5, block_size=4, n_layer=1, n_head=1, n_embd=4))
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.3), torch.device("cpu"), "no")
    decayed, rest = optimizer.param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in rest["params"]} == {1}
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))
    assert decayed["fused"]


def test_draws_depend_on_seed_step_and_process_and_nothing_else():
    def draw(*place: int) -> tuple[float, ...]:
        reseed(*place)
        return torch.rand(()).item(), random.random(), np.random.rand()

    torch.rand(17), random.random(), np.random.rand()
    assert draw(1, 2, 3) == draw(1, 2, 3)
    places = [(1, 2, 3), (1, 3, 2), (2, 1, 3), (1, 2, 4), (0, 0, 0), (2**32 - 1, 10**8, 10**4)]
    for draws in zip(*(draw(*place) for place in places), strict=True):  # of each generator
        assert len({*draws}) == len(places)


def lines(*steps: int) -> list[dict]:
    return [{"event": "train", "step": step, "loss": 1.0} for step in steps]


def test_metrics_wait_for_a_disk_that_takes_them(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, step=0)
    metrics.append(lines(1))
    path.rename(tmp_path / "away")
    path.mkdir()
    metrics.append(lines(2))
    assert "Is a directory" in metrics.fault
    with pytest.raises(OSError, match="Is a directory"):
        metrics.flush()
    path.rmdir()
    (tmp_path / "away").rename(path)
    with open(path, "a") as opened:
        opened.write('{"half": ')  # what a full disk leaves
    metrics.append(lines(3))
    assert metrics.fault is None
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


@pytest.mark.parametrize("size", [None, 0, 60])
def test_metrics_go_on_in_a_file_that_was_removed_or_cut(tmp_path, size):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, step=0)
    metrics.append(lines(1, 2))
    one = path.stat().st_size // 2
    if size is None:
        path.unlink()
    else:
        os.truncate(path, one if size else 0)
    metrics.append(lines(3))
    metrics.append(lines(4))
    steps = [record["step"] for record in read_metrics(path)]
    assert steps == ([1, 3, 4] if size else [3, 4])


def report_of(tmp_path) -> Report:
    console = Console(False, 10, 0)
    console.metrics = MetricsFile(tmp_path / "metrics.jsonl", step=0)
    return Report(console, tokens_per_step=64, last_snapshot=None)


@pytest.mark.parametrize(
    ("loss", "norm", "words"),
    [
        (float("nan"), 1.0, "the loss is nan at step 3"),
        (float("inf"), 1.0, "the loss is inf at step 3"),
        (1.0, float("inf"), "the gradient norm is inf at step 3"),
    ],
)
def test_a_loss_or_norm_that_is_not_finite_names_the_step(tmp_path, loss, norm, words):
    report = report_of(tmp_path)
    for step in (1, 2):
        report.add(step, 0.1, torch.tensor(1.5), torch.tensor(1.0))
    report.add(3, 0.1, torch.tensor(loss), torch.tensor(norm))
    report.last_snapshot = tmp_path / "step-00000002"
    with pytest.raises(TrainingStopped) as caught:
        report.write(Accelerator(cpu=True))
    assert words in str(caught.value)
    assert "step-00000002" in str(caught.value)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_held_out_loss_is_recorded_per_token_and_per_byte(tmp_path, capsys):
    report = report_of(tmp_path)
    report.console.shown = True
    report.held_out(7, 2.0, TEXT)

    per_byte = 2.0 / math.log(2) * 100 / 320
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record == {"event": "eval", "step": 7, "loss": 2.0, "bits_per_byte": per_byte}
    assert capsys.readouterr().out == "step 7: held-out loss 2.0000, 0.9017 bits per byte\n"
    with pytest.raises(TrainingStopped, match="held-out loss is nan after step 8"):
        report.held_out(8, float("nan"), TEXT)


def test_the_first_speed_is_that_of_steps_without_the_start(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    session = object.__new__(Session)
    session.report = report_of(tmp_path)
    session.signals, session.state = SimpleNamespace(), SimpleNamespace(step=0)
    session.config = SimpleNamespace(train=SimpleNamespace(max_steps=1))
    session._writer = session

    now[0] = 100.0  # threads are measured, a pending evaluation is made
    step = next(session.steps())
    now[0] += 0.5
    session.report.add(step, 0.1, torch.tensor(1.0), torch.tensor(1.0))
    session.report.write(Accelerator(cpu=True))

    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["tokens_per_second"] == session.report.tokens_per_step / 0.5


def test_a_new_metric_reaches_file_console_and_trackers(tmp_path, capsys):
    report = report_of(tmp_path)
    report.console.shown = True
    weight = torch.tensor([2.0], requires_grad=True)
    report.add(1, 0.1, torch.tensor(1.0), torch.tensor(1.0), {"weight_norm": weight, "odd": 3})
    report.add(2, 0.1, torch.tensor(1.0), torch.tensor(1.0), {"odd": float("nan")})
    weight.data.add_(1)  # the metric is the value of its step
    report.write(Accelerator(cpu=True))
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["weight_norm"], first["odd"]) == (2.0, 3.0)
    assert second["odd"] is None
    assert "weight_norm" not in second
    assert ", odd nan, " in capsys.readouterr().out
    row = values_of(first)
    assert (row["train/weight_norm"], row["train/odd"]) == (2.0, 3.0)


@pytest.mark.parametrize("name", ["event", "loss", "hub_step"])
def test_a_metric_does_not_replace_a_figure_of_ours(tmp_path, name):
    session = object.__new__(Session)
    session.report, session.config = report_of(tmp_path), SimpleNamespace()
    session.state, session.corpus = SimpleNamespace(), SimpleNamespace(train=None)
    session._writer = SimpleNamespace(pending=False)
    figures = (3, 0, 0.1, torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(ConfigError, match=f"a metric named '{name}' at step 3, .* another name"):
        session.finish_step(*figures, **{name: 7})


def test_metrics_of_one_process_alone_are_refused(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.gather = lambda number: torch.cat([number, number + 1])  # of two processes
    report = report_of(tmp_path)
    report.add(1, 0.1, torch.tensor(1.0), torch.tensor(1.0), {"mine": 1})
    with pytest.raises(ConfigError, match="other metrics on one process than on another"):
        report.write(accelerator)
