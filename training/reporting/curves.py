"""curves.png: the losses of a run, drawn from its metrics.jsonl."""

from __future__ import annotations

import os
import warnings
from array import array
from pathlib import Path

import numpy as np

from config.schema import Config
from training.distributed.launcher import draw_into_files
from training.reporting.console import Console
from training.reporting.metrics import figures_of, lines_from

CURVES = "curves.png"
MOST_POINTS = 500
LONGEST_TITLE = 80
"""Characters that fit into the width of the picture."""


class Losses:
    """The losses of a run, read from its metrics.jsonl; each line is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._clear()

    def _clear(self) -> None:
        self._read = 0
        self.steps, self.train = array("q"), array("d")
        """Steps, and their losses."""
        self.held_out: list[tuple[int, float]] = []
        """Step and loss of each evaluation."""

    def read_on(self) -> None:
        """Read the lines that were added since. Raises OSError and ConfigError."""
        with open(self._path, "rb") as opened:
            if os.fstat(opened.fileno()).st_size < self._read:  # somebody has removed lines
                self._clear()
            for end, line in lines_from(opened, self._read):
                self._read, figures = end, figures_of(opened, end, line)
                if figures["event"] == "train":
                    self.steps.append(figures["step"])
                    self.train.append(figures["loss"])
                elif figures["event"] == "eval":
                    self.held_out.append((figures["step"], figures["loss"]))


def draw_run(losses: Losses, console: Console, config: Config, unit: str) -> None:
    """Draw curves.png. Only the main process calls this; a failure is a warning.

    `unit` is what a token is: a character, or a token.
    """
    try:
        losses.read_on()
        draw_curves(losses, config.run.name, Path(config.run.dir) / CURVES, unit)
    except Exception as error:  # a picture is not worth a run
        console.warn(f"{CURVES} was not drawn: {error}.")


def draw_curves(losses: Losses, title: str, path: Path, unit: str = "token") -> None:
    """Draw the losses of a run into a PNG file, atomically."""
    draw_into_files()
    # Imported here because it takes a second, and only the end of a run needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120)  # a layout engine would draw everything twice
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.12, top=0.84)
    averaged = _averaged(np.array(losses.steps), np.array(losses.train))
    axes.plot(*averaged, color="tab:blue", linewidth=1, label="training")
    label = "held out" + (f", last {losses.held_out[-1][1]:.3f}" if losses.held_out else "")
    points = np.array(losses.held_out).reshape(-1, 2).T
    axes.plot(*points, color="tab:orange", marker="o", markersize=4, label=label)
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


def _averaged(steps: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean step and loss over about `MOST_POINTS` groups of steps, as single steps are noisy."""
    if not len(steps):
        return steps, losses
    groups = min(len(steps), MOST_POINTS)
    edges = np.linspace(0, len(steps), groups, endpoint=False, dtype=int)
    sizes = np.diff([*edges, len(steps)])
    return np.add.reduceat(steps, edges) / sizes, np.add.reduceat(losses, edges) / sizes
