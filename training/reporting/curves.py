"""curves.png: the losses of a run, drawn from its metrics.jsonl."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np

from config.schema import Config
from training.distributed.launcher import draw_into_files
from training.reporting.console import Console
from training.reporting.metrics import Record, sample_metrics

CURVES = "curves.png"
MOST_POINTS = 500
LONGEST_TITLE = 80
"""Characters that fit into the width of the picture."""


def draw_run(console: Console, config: Config, unit: str) -> None:
    """Draw curves.png. Only the main process calls this; a failure is a warning.

    `unit` is what a token is: a character, or a token.
    """
    run_dir = Path(config.run.dir)
    try:
        records = sample_metrics(run_dir / "metrics.jsonl", config.train.eval_every)
        draw_curves(records, config.run.name, run_dir / CURVES, unit)
    except Exception as error:  # a picture is not worth a run
        console.warn(f"{CURVES} was not drawn: {error}.")


def draw_curves(records: list[Record], title: str, path: Path, unit: str = "token") -> None:
    """Draw the train and eval events of a run into a PNG file, atomically."""
    draw_into_files()
    # Imported here because it takes a second, and only the end of a run needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [record for record in records if record["event"] == "train"]
    held_out = [record for record in records if record["event"] == "eval"]
    figure = Figure(figsize=(8, 4.5), dpi=120)  # a layout engine would draw everything twice
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.12, top=0.84)
    axes.plot(*_averaged(train), color="tab:blue", linewidth=1, label="training")
    axes.plot(
        [r["step"] for r in held_out],
        [r["loss"] for r in held_out],
        color="tab:orange",
        marker="o",
        markersize=4,
        label="held out" + (f", last {held_out[-1]['loss']:.3f}" if held_out else ""),
    )
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss (nats per {unit})")
    title = title if len(title) <= LONGEST_TITLE else f"{title[: LONGEST_TITLE - 3]}..."
    warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
    figure.suptitle(title, parse_math=False)
    axes.grid(alpha=0.3)
    # Above the axes, where no curve can be.
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    partial = path.with_suffix(".png.new")
    try:
        figure.savefig(partial, format="png")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _averaged(records: list[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Mean step and loss over groups of consecutive steps, because single steps are noisy.

    There are at most about `MOST_POINTS` groups.
    """
    if not records:
        return np.empty(0), np.empty(0)
    steps = np.array([record["step"] for record in records])
    losses = np.array([record["loss"] for record in records])
    usual = -(-(steps[-1] - steps[0] + 1) // MOST_POINTS)
    begins = [0, *(np.flatnonzero(np.diff(steps) != 1) + 1), len(steps)]
    runs = [(a, b, max(1, round((b - a) / usual))) for a, b in pairwise(begins)]
    edges = np.concatenate([np.linspace(a, b, n, endpoint=False, dtype=int) for a, b, n in runs])
    sizes = np.diff([*edges, len(steps)])
    return np.add.reduceat(steps, edges) / sizes, np.add.reduceat(losses, edges) / sizes
