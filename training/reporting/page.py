"""report.html: a run on one page, for a browser: curves, speed, samples, events, snapshots.

The page is one file without scripts and without requests. It is drawn again with curves.png, and
loads itself again until the run is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from config.schema import Config
from data.printable import printable
from snapshot.disk.files import snapshot_folders, snapshots_in, step_of
from store.records import EVENTS
from training.reporting.events import read_events
from training.reporting.html import round_ticks, table, write_html
from training.reporting.metrics import Record
from training.reporting.samples import read_samples

PAGE = "report.html"
WIDTH, HEIGHT, LEFT, BOTTOM = 800, 300, 90, 35
"""Of a picture, and of the room for its labels, in the units of its drawing."""
MOST_SAMPLES, MOST_EVENTS = 20, 100
RELOAD_SECONDS = 60


def write_page(config: Config, records: Sequence[Record], unit: str) -> None:
    """Write the page of a run from lines of its metrics. Raises OSError."""
    run_dir = Path(config.run.dir)
    train = [one for one in records if one["event"] == "train"]
    held_out = [one for one in records if one["event"] == "eval"]
    title = escape(printable(config.run.name))
    parts = [
        f"<h1>{title}</h1>",
        f"<p>{_summary(train, held_out, unit)}</p>",
        "<h2>Loss</h2>",
        '<p><span class="key of-line">— training</span> '
        '<span class="key of-held">● held out</span></p>',
        _picture(
            f"Loss in nats per {unit} over steps",
            [(one["step"], one["loss"]) for one in train],
            [(one["step"], one["loss"]) for one in held_out],
        ),
        "<h2>Tokens per second</h2>",
        _picture(
            "Tokens per second over steps",
            [(r["step"], r["tokens_per_second"]) for r in train if "tokens_per_second" in r],
        ),
        _samples(run_dir),
        _events(run_dir),
        _snapshots(run_dir),
        _on_the_hub(config, train),
    ]
    finished = bool(train) and train[-1]["step"] >= config.train.max_steps
    write_html(run_dir / PAGE, title, parts, reload_seconds=None if finished else RELOAD_SECONDS)


def _summary(train: list[Record], held_out: list[Record], unit: str) -> str:
    """The state of the run in a sentence."""
    if not train:
        return "No step has been written yet."
    words = [f"Step {train[-1]['step']:,}"]
    if held_out:
        best = min(held_out, key=lambda one: float(one["loss"]))
        words.append(
            f"lowest held-out loss {best['loss']:.4f} nats per {unit}, at step {best['step']:,}"
        )
    if "tokens_per_second" in train[-1]:
        words.append(f"{train[-1]['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in train[-1]:
        words.append(f"{train[-1]['mfu']:.1%} of the machine's peak")
    return "; ".join(words) + "."


def _picture(
    label: str, line: list[tuple[float, float]], points: Sequence[tuple[float, float]] = ()
) -> str:
    """A drawing of a line and of points, with axes. Both are (x, y), in the order of x."""
    both = [*line, *points]
    if not both:
        return "<p>Nothing yet.</p>"
    levels = round_ticks(min(y for _, y in both), max(y for _, y in both))
    lowest, highest = levels[0], levels[-1]
    last = max(x for x, _ in both)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - 10) * x / last
        up = (y - lowest) / (highest - lowest)
        return round(across, 1), round(10 + (HEIGHT - BOTTOM - 10) * (1 - up), 1)

    parts = []
    for value in levels:
        _, y = place(0, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 5}" text-anchor="end">{_short(value)}</text>')
    for step in (one for one in round_ticks(0, last, whole=True) if one <= last):
        x, _ = place(step, lowest)
        anchor = "end" if step == last else "middle"
        parts.append(f'<text x="{x}" y="{HEIGHT - 8}" text-anchor="{anchor}">{step:,.0f}</text>')
    if line:
        places = " L ".join("{} {}".format(*place(*one)) for one in line)
        parts.append(f'<path class="line" d="M {places}"/>')
    for point in points:
        x, y = place(*point)
        parts.append(f'<circle cx="{x}" cy="{y}" r="4"><title>{point[1]:.4f}</title></circle>')
    final = f"; at step {both[-1][0]:,} it is {_short(both[-1][1])}"
    return (
        f'<svg role="img" aria-label="{label}{final}" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f"{''.join(parts)}</svg>"
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _samples(run_dir: Path) -> str:
    found = sorted(read_samples(run_dir).items(), reverse=True)[:MOST_SAMPLES]
    if not found:
        return ""
    entries = [
        f"<details{'' if number else ' open'}><summary>Step {step:,}</summary>"
        f"<pre>{escape(printable(text.strip(), multiline=True))}</pre></details>"
        for number, (step, text) in enumerate(found)
    ]
    return "<h2>Samples</h2>\n" + "\n".join(entries)


def _events(run_dir: Path) -> str:
    found = read_events(run_dir / EVENTS)
    attempts = len({one["attempt"] for one in found})
    rows = [
        (one["time"][:16].replace("T", " "), f"{one['step']:,}", one["event"], one["text"])
        for one in found[-MOST_EVENTS:]
    ]
    head = f"<h2>Events</h2>\n<p>Attempts so far: {attempts}.</p>"
    return f"{head}\n{table('Events', ('UTC', 'step', 'event', ''), rows)}"


def _snapshots(run_dir: Path) -> str:
    rows = [
        (f"{step_of(folder):,}", str(folder)) for folder in snapshot_folders(snapshots_in(run_dir))
    ]
    return f"<h2>Snapshots</h2>\n{table('Snapshots', ('step', 'folder'), rows)}"


def _on_the_hub(config: Config, train: Sequence[Record]) -> str:
    """Which step the run's repo or bucket has, as far as the newest metrics say."""
    name = config.hub.bucket or config.hub.repo_id
    if name is None:
        return ""
    step = next((one["hub_step"] for one in reversed(train) if "hub_step" in one), None)
    reached = "nothing yet" if step is None else f"step {step:,}"
    return f"<p>{escape(printable(str(name)))} on the Hub had {reached} when this was drawn.</p>"
