"""curves.png: training and held-out loss over steps, drawn from metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.config import Config
from training.console import Console
from training.metrics import read_metrics

MOST_POINTS = 500


def draw_run(console: Console, config: Config) -> None:
    """Draw curves.png of a run anew, on the main process. A failure is said, never raised."""
    if not console.shown:
        return
    run_dir = Path(config.run.dir)
    try:
        records = read_metrics(run_dir / "metrics.jsonl")
        draw_curves(records, config.run.name, run_dir / "curves.png")
    except Exception as error:  # a picture is not worth a run
        console.warn(f"curves.png was not drawn: {error}.")


def draw_curves(records: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the train and eval events of a run into a PNG file, atomically."""
    # Imported here: a second of start-up for what is used at the end.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [record for record in records if record["event"] == "train"]
    held_out = [record for record in records if record["event"] == "eval"]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps, losses = _averaged([r["step"] for r in train], [r["loss"] for r in train])
    axes.plot(steps, losses, color="tab:blue", linewidth=1, label="training")
    axes.plot(
        [r["step"] for r in held_out],
        [r["loss"] for r in held_out],
        color="tab:orange",
        marker="o",
        markersize=4,
        label="held out",
    )
    if held_out:
        last = held_out[-1]
        axes.annotate(
            f"{last['loss']:.3f}",
            (last["step"], last["loss"]),
            textcoords="offset points",
            xytext=(0, 8),
            ha="right",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per character)")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    partial = path.with_suffix(".png.new")
    try:
        figure.savefig(partial, format="png")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _averaged(steps: list[int], losses: list[float]) -> tuple[list[float], list[float]]:
    """Means over equal runs of steps, at most `MOST_POINTS` of them: single steps are noise."""
    width = max(1, len(steps) // MOST_POINTS)
    groups = range(0, len(steps), width)
    return (
        [sum(steps[i : i + width]) / len(steps[i : i + width]) for i in groups],
        [sum(losses[i : i + width]) / len(losses[i : i + width]) for i in groups],
    )
