"""curves.png: the losses of a run, drawn from its metrics.jsonl."""

from __future__ import annotations

import warnings
from array import array
from io import BytesIO
from pathlib import Path

import numpy as np

from config.schema import Config
from snapshot.disk.folder import write_whole
from store.latest import METRICS
from training.distributed.launcher import set_for_library
from training.reporting.console import Console
from training.reporting.metrics import scan

CURVES = "curves.png"
MOST_POINTS = 500
LONGEST_TITLE = 80
"""Characters that fit into the width of the picture."""


class Curves:
    """The losses of a run. Each picture reads the lines since the one before."""

    def __init__(self, config: Config) -> None:
        self._run_dir, self._title = Path(config.run.dir), config.run.name
        self._end = 0
        self._points = {"train": array("d"), "eval": array("d")}  # step, loss, step, loss, ...

    def draw(self, console: Console, unit: str) -> None:
        """Draw curves.png. Only the main process calls this; a failure is a warning.

        `unit` is what a token is: a character, or a token.
        """
        try:
            train, held_out = self.losses()
            draw_curves(train, held_out, self._title, self._run_dir / CURVES, unit)
        except Exception as error:  # a picture is not worth a run
            console.warn(f"{CURVES} was not drawn: {error}.")

    def losses(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and losses (2, N) of training and of the evaluations."""
        for end, record in scan(self._run_dir / METRICS, self._end):
            self._end = end
            if (event := record.get("event")) in self._points:
                self._points[event].extend((record["step"], record["loss"]))
        train, held_out = (np.array(flat).reshape(-1, 2).T for flat in self._points.values())
        return train, held_out


def draw_curves(train: np.ndarray, held_out: np.ndarray, title: str, path: Path, unit: str) -> None:
    """Draw losses, each (2, N), into a PNG file, atomically."""
    # The import fails where this names a backend that is not installed, such as a notebook's.
    set_for_library("MPLBACKEND", "agg")
    # Imported here because it takes a second, and only a snapshot needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120)  # a layout engine would draw everything twice
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.12, top=0.84)
    axes.plot(*_averaged(*train), color="tab:blue", linewidth=1, label="training")
    label = "held out" + (f", last {held_out[1, -1]:.3f}" if held_out.size else "")
    axes.plot(*held_out, color="tab:orange", marker="o", markersize=4, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss (nats per {unit})")
    warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
    figure.suptitle(title[:LONGEST_TITLE], parse_math=False)
    axes.grid(alpha=0.3)
    # Above the axes, where no curve can be.
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    content = BytesIO()
    figure.savefig(content, format="png")
    write_whole(path, content.getvalue())


def _averaged(steps: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean step and loss over about `MOST_POINTS` groups of steps, as single steps are noisy."""
    if not len(steps):
        return steps, losses
    groups = min(len(steps), MOST_POINTS)
    edges = np.linspace(0, len(steps), groups, endpoint=False, dtype=int)
    sizes = np.diff([*edges, len(steps)])
    return np.add.reduceat(steps, edges) / sizes, np.add.reduceat(losses, edges) / sizes
