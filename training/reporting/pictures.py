"""curves.png and report.html: a run in pictures, drawn from the files in its directory.

The page also lists speed, samples, events and snapshots. A page is one file without scripts or
requests; report.html reloads itself until the run is finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from config.schema import Config
from data.printable import printable
from snapshot.disk.files import snapshot_folders, snapshots_in, step_of, write_whole
from store.events import Event, history_of, read_events
from store.goodput import goodput_of
from store.records import EVENTS
from training.reporting.console import Console
from training.reporting.events import read_samples
from training.reporting.metrics import Record, sample_metrics

MOST_POINTS = 500
LONGEST_TITLE = 80
"""Characters that fit into the width of the picture."""
NOT_FOR_TITLES = ("Last Resort", "Emoji")
"""Fonts whose glyphs are placeholder boxes, or bitmaps of one size."""
PAGE = "report.html"
WIDTH, HEIGHT, LEFT, BOTTOM = 800, 300, 90, 35
"""Size of a picture and of the margins for its labels, in SVG units."""
MOST_SAMPLES, MOST_EVENTS = 20, 100
RELOAD_SECONDS = 60
MOST_INTERVALS = 6
"""Most intervals between the ticks of an axis."""
STYLE = """
:root { color-scheme: light dark; --line: #1f77b4; --held: #d9660a; --grid: #8886; }
@media (prefers-color-scheme: dark) { :root { --line: #6db3f2; --held: #ffa657; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
svg { width: 100%; height: auto; }
svg text { fill: currentColor; font-size: 14px; }
.grid { stroke: var(--grid); } .line { stroke: var(--line); }
path { fill: none; stroke-width: 2; } circle { fill: var(--held); }
.key { font-weight: 600; } .key.of-line { color: var(--line); } .key.of-held { color: var(--held); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { border: 1px solid var(--grid); padding: .5rem; }
td:nth-child(-n+3) { white-space: nowrap; }
@media (max-width: 600px) { svg text { font-size: 24px; } }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; }
td { border-top: 1px solid var(--grid); overflow-wrap: anywhere; }
:focus-visible { outline: 3px solid var(--held); }
"""


def draw_run(console: Console, config: Config, unit: str) -> None:
    """Draw curves.png and report.html. Only the main process calls this; a failure is a warning.

    `unit` is what a token is: a character, or a token.
    """
    run_dir = Path(config.run.dir)
    try:
        records = sample_metrics(run_dir / "metrics.jsonl", config.train.eval_every)
        draw_curves(records, config.run.name, run_dir / "curves.png", unit)
        write_page(config, records, unit)
    except Exception as error:  # a picture is not worth a run
        console.warn(f"curves.png or report.html was not drawn: {error}.")


def draw_curves(records: list[Record], title: str, path: Path, unit: str = "token") -> None:
    """Draw the train and eval events of a run into a PNG file, atomically."""
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
    if (fonts := _fonts_for(title)) is not None:
        figure.suptitle(title, parse_math=False, fontfamily=fonts)
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


@cache
def _fonts_for(title: str) -> list[str] | None:
    """Fonts of this machine that have all characters of a title, or None.

    A character without a glyph would appear as a box, with a warning at every drawing.
    """
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

    usual = findfont(FontProperties(family=rcParams["font.family"]))
    missing = {c for c in title if not get_font(usual).get_char_index(ord(c))}
    if not missing:
        return list(rcParams["font.family"])
    for entry in fontManager.ttflist:
        if any(word in entry.name for word in NOT_FOR_TITLES):
            continue
        try:
            font = get_font(entry.fname)
            if font.scalable and all(font.get_char_index(ord(c)) for c in missing):
                return [*rcParams["font.family"], entry.name]
        except (OSError, RuntimeError):  # removed meanwhile, or damaged
            continue
    return None


def write_page(config: Config, records: Sequence[Record], unit: str) -> None:
    """Write the page of a run from lines of its metrics. Raises OSError."""
    run_dir = Path(config.run.dir)
    train = [record for record in records if record["event"] == "train"]
    held_out = [record for record in records if record["event"] == "eval"]
    title = escape(printable(config.run.name))
    parts = [
        f"<h1>{title}</h1>",
        f"<p>{_summary(train, held_out, unit)}</p>",
        "<h2>Loss</h2>",
        '<p><span class="key of-line">— training</span> '
        '<span class="key of-held">● held out</span></p>',
        _picture(
            f"Loss in nats per {unit} over steps",
            [(record["step"], record["loss"]) for record in train],
            [(record["step"], record["loss"]) for record in held_out],
        ),
        "<h2>Tokens per second</h2>",
        _picture(
            "Tokens per second over steps",
            [(r["step"], r["tokens_per_second"]) for r in train if "tokens_per_second" in r],
        ),
        _samples(run_dir),
        *_times_and_events(read_events(run_dir / EVENTS)),
        _snapshots(run_dir),
        _in_the_store(config, train),
    ]
    finished = bool(train) and train[-1]["step"] >= config.train.max_steps
    write_html(run_dir / PAGE, title, parts, reload_seconds=None if finished else RELOAD_SECONDS)


def _summary(train: list[Record], held_out: list[Record], unit: str) -> str:
    """The state of the run in a sentence."""
    if not train:
        return "No step has been written yet."
    words = [f"Step {train[-1]['step']:,}"]
    if held_out:
        best = min(held_out, key=lambda record: float(record["loss"]))
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
    """An SVG of a line and of points, with axes. Both are lists of (x, y) in the order of x."""
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
    for step in (tick for tick in round_ticks(0, last, whole=True) if tick <= last):
        x, _ = place(step, lowest)
        anchor = "end" if step == last else "middle"
        parts.append(f'<text x="{x}" y="{HEIGHT - 8}" text-anchor="{anchor}">{step:,.0f}</text>')
    if line:
        places = " L ".join("{} {}".format(*place(*point)) for point in line)
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


def _times_and_events(events: list[Event]) -> list[str]:
    """Where the time of the run went, over all attempts, and what happened to it."""
    found, spent = history_of(events), goodput_of(events)
    time = []
    if spent is not None:
        shares = [
            (kind, f"{seconds:,.1f}", f"{seconds / (spent.total or 1):.1%}")
            for kind, seconds in spent.seconds.items()
        ]
        heads = ("", "machine-seconds", "share")
        time = [f"<h2>Time</h2>\n<p>Goodput: {escape(spent.in_words())}.</p>"]
        time.append(table("Time", heads, shares))
    attempts = len({event["attempt"] for event in found})
    rows = [
        (event["time"][:16].replace("T", " "), f"{event['step']:,}", event["event"], event["text"])
        for event in found[-MOST_EVENTS:]
    ]
    head = f"<h2>Events</h2>\n<p>Attempts so far: {attempts}.</p>"
    return [*time, f"{head}\n{table('Events', ('UTC', 'step', 'event', ''), rows)}"]


def _snapshots(run_dir: Path) -> str:
    rows = [
        (f"{step_of(folder):,}", str(folder)) for folder in snapshot_folders(snapshots_in(run_dir))
    ]
    return f"<h2>Snapshots</h2>\n{table('Snapshots', ('step', 'folder'), rows)}"


def _in_the_store(config: Config, train: Sequence[Record]) -> str:
    """The step that the run's store has according to the newest metrics."""
    if config.hub.store_url is None:
        return ""
    where = config.hub.url or f"{config.hub.bucket or config.hub.repo_id} on the Hub"
    step = next((record["hub_step"] for record in reversed(train) if "hub_step" in record), None)
    reached = "nothing yet" if step is None else f"step {step:,}"
    return f"<p>{escape(printable(where))} had {reached} when this was drawn.</p>"


def write_html(
    path: Path,
    title: str,
    parts: Iterable[str],
    style: str = "",
    reload_seconds: int | None = None,
) -> None:
    """Write a page. Title and parts are HTML. Raises OSError.

    A browser reloads it after `reload_seconds`.
    """
    body = "\n".join(parts)
    again = f'<meta http-equiv="refresh" content="{reload_seconds}">\n' if reload_seconds else ""
    write_whole(
        path,
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'{again}<link rel="icon" href="data:,">\n'  # otherwise a browser asks for an icon
        f"<title>{title}</title>\n<style>{STYLE}{style}</style>\n<main>\n{body}\n</main>\n</html>\n",
    )


def round_ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """About five round numbers for an axis; the first is at most `low`, the last at least `high`.

    With `whole` they are whole numbers.
    """
    from matplotlib.ticker import MaxNLocator  # as curves.py: only the end of a run needs it

    high = high if high > low else low + (abs(low) or 1.0)
    locator = MaxNLocator(nbins=MOST_INTERVALS, steps=[1, 2, 2.5, 5, 10], integer=whole)
    ticks = [float(tick) for tick in locator.tick_values(low, high)]
    first = max((n for n, one in enumerate(ticks) if one <= low), default=0)
    last = min((n for n, one in enumerate(ticks) if one >= high), default=len(ticks) - 1)
    return ticks[first : last + 1]


def table(label: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table that can be scrolled sideways, by keyboard as well."""
    cells = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    lines = [
        "<tr>" + "".join(f"<td>{escape(printable(str(cell)))}</td>" for cell in row) + "</tr>"
        for row in rows
    ]
    body = "\n".join([f"<tr>{cells}</tr>", *lines])
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table>\n{body}\n</table></div>"
    )
