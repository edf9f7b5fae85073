"""metrics.jsonl and its picture."""

from __future__ import annotations

import json
import random
import sys
import tracemalloc

import numpy as np
import pytest
from matplotlib.figure import Figure

import runs
from config.compose import load_config
from config.schema import Config
from training.reporting import metrics as metrics_file
from training.reporting.console import Console
from training.reporting.curves import Curves, draw_curves
from training.reporting.metrics import (
    MetricsFile,
    as_line,
    held_out_losses,
    metrics_up_to,
    newest_step,
    read_metrics,
)

EVERY = 250
MOST_PARSED = 4_000
MOST_MEMORY = 12_000_000


def history(path, steps: int, eval_every: int = EVERY, sample: str = "") -> list[dict]:
    """A file of so many steps, with an evaluation and a sample now and then; its evaluations."""
    lines, evaluations = [], []
    for step in range(1, steps + 1):
        figures = {"step": step, "loss": 1 + 3 / step**0.3}
        others = {"learning_rate": 0.001, "grad_norm": 0.31234567, "tokens_per_second": 12345.6}
        lines.append({"event": "train", **figures, **others})
        if step % eval_every == 0 or step == steps:
            evaluations.append({"event": "eval", **figures})
            samples = [{"event": "sample", "step": step, "text": sample}] if sample else []
            lines += [evaluations[-1], *samples]
    path.write_bytes(b"".join(map(as_line, lines)))
    return evaluations


def config_of(run_dir) -> Config:
    return load_config([f"run.dir={run_dir}", "run.name=mine"])


def test_a_long_run_is_read_once_and_in_little_memory(tmp_path, monkeypatch):
    """By the first picture. A start, an upload and the next picture read the end of the file."""
    path, steps = tmp_path / "metrics.jsonl", 100_000
    history(path, steps)
    (tmp_path / "short").mkdir()
    history(tmp_path / "short/metrics.jsonl", 10)
    Curves(config_of(tmp_path / "short")).draw(Console(True, 10, 0), "token")  # imports, fonts
    parsed = 0
    loads = json.loads

    def counted(content):
        nonlocal parsed
        parsed += 1
        return loads(content)

    console, curves = Console(True, steps, 0), Curves(config_of(tmp_path))
    tracemalloc.start()
    try:
        curves.draw(console, "token")
        monkeypatch.setattr(metrics_file.json, "loads", counted)
        assert newest_step(path) == steps
        metrics = MetricsFile(path, steps - 500)
        metrics.append([{"event": "train", "step": steps - 499, "loss": 1.0}])
        metrics.flush()
        curves.draw(console, "token")
        assert held_out_losses(path, since=steps - 500).keys() == {steps - 500}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert metrics_up_to(path, steps) == path.read_bytes()
    assert (tmp_path / "curves.png").exists()
    assert parsed < MOST_PARSED
    assert peak < MOST_MEMORY < path.stat().st_size


NO_FIGURES = [
    "NaN",
    f"{10**400}",
    "9" * 5000,
    '"1"',
    "1.2.3",
    "[]",
    '2.0, "lr"{',
    '2.0, "lr": "\xff"',
]
NO_LINES = [
    b"",
    b"[]",
    b"[" * 5000,
    b"\xff\x00",
    b'{"event": "eval", "lo' + b"\0" * 4_000 + b'ss": 1.0}',  # after a power loss
    b'{"event": "sample", "step": 2}',
    b'{"event": "other", "step": 2, "loss": 1}',
    b'{"event": "train", "step": true, "loss": 1}',
    b'{"event": "train", "step": 2, "loss": 1, "list": [1]}',
    b'{"event": "stop", "step": 2, "attempt": "01234567", "text": null}',
    b'{"event": "sample", "step": 2, "text": "' + b"x" * 70_000 + b'"}',
    *(f'{{"event": "eval", "step": 2, "loss": {it}}}'.encode("latin-1") for it in NO_FIGURES),
]


def test_a_file_is_cut_in_place_where_later_steps_begin(
    tmp_path,
):
    path = tmp_path / "metrics.jsonl"
    for number in range(200):
        rng = random.Random(number)
        lines, figures, step = [], [], 0
        for _ in range(rng.randrange(20)):
            step += rng.choice([0, 1, 1, 1, 9])
            event = rng.choice(["train", "eval", "sample"])
            record = {"event": event, "step": step, "loss": 1, "grad/layer 1": 2.0}
            figures.append(record | {"text": "9" * rng.choice([1, 20, 9000])})
            lines.append((step, as_line(figures[-1])))
            if rng.random() < 0.3:
                lines.append((step, rng.choice(NO_LINES) + b"\n"))
        half = rng.choice([b"", b'{"event"', bytes(5000), b"{" * 20_000])
        asked = rng.randrange(-1, step + 3)
        path.write_bytes(b"".join(line for _, line in lines) + half)
        before = path.stat()
        assert MetricsFile(path, asked).size == path.stat().st_size
        assert path.stat().st_ino == before.st_ino
        assert path.read_bytes() == b"".join(line for at, line in lines if at <= asked), number
        assert read_metrics(path) == [record for record in figures if record["step"] <= asked]


def test_the_picture_has_every_loss(tmp_path):
    path = tmp_path / "metrics.jsonl"
    evaluations = history(path, 300, eval_every=7, sample="a text")
    curves = Curves(config_of(tmp_path))
    assert curves.losses()[0][0].tolist() == list(range(1, 301))
    with open(path, "ab") as opened:
        lines = [*NO_LINES, as_line({"event": "train", "step": 301, "loss": 0.5}).strip()]
        opened.write(b"\n".join(lines) + b'\n{"event": "tr')
    train, held_out = curves.losses()
    assert train[0].tolist() == list(range(1, 302))
    assert train[1, -1] == 0.5
    assert held_out.T.tolist() == [[one["step"], one["loss"]] for one in evaluations]


def test_curves_are_drawn_under_the_backend_of_a_notebook(tmp_path):
    """A notebook names it to all programs that it starts; it may not be installed for them."""
    history(tmp_path / "metrics.jsonl", 10)
    program = (
        "from config.compose import load_config\n"
        "from training.reporting.console import Console\n"
        "from training.reporting.curves import Curves\n"
        f"config = load_config(['run.dir={tmp_path}'])\n"
        "Curves(config).draw(Console(True, 10, 0), 'token')\n"
    )
    backend = "module://matplotlib_inline.backend_inline"
    result = runs.run([sys.executable, "-c", program], MPLBACKEND=backend)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("title", ["中文", "\x1b[31m", "😀 \ufdfd", "x" * 300, "$^^$", ""])
def test_no_title_makes_a_warning_and_no_figure_lies_on_a_curve(tmp_path, monkeypatch, title):
    figures = []
    savefig = Figure.savefig

    def save(figure, *words, **named):
        savefig(figure, *words, **named)
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", save)
    train, held_out = np.array([[1.0, 2, 3], [3, 2, 1]]), np.array([[3.0], [1.478]])
    draw_curves(train, held_out, title, tmp_path / "curves.png", "token")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    if title.isascii() and title.isprintable():
        assert figures[0].get_suptitle()[:70] == title[:70]
    (axes,) = figures[0].axes
    assert not axes.texts
    legend = axes.get_legend()
    assert "held out, last 1.478" in [text.get_text() for text in legend.get_texts()]
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
