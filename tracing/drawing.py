"""The pictures of a trace, as SVG: the time line of a step, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from planning.allocation_log import KINDS
from tracing.spans import BLOCK, Collective, Process, Span
from training.reporting.pictures import round_ticks

WIDTH, LEFT, ROW, GAP = 1000, 90, 24, 14
"""The width of a picture and of its labels, the height of a row, and the gap between processes."""
LETTER = 7
"""Width of a letter."""
HEIGHT = 260
"""The height of the memory picture."""
MOST_POINTS = 600
MEGABYTE = 1e6
KINDS_FROM_BELOW = ("parameters", "gradients", "optimizer", "buffers", "activations")
STYLE = """
:root { --forward: #9ecae9; --backward: #f6b26b; --clip: #d5a6bd; --update: #93c47d;
  --agreement: #b7b7b7; --prepare: #b7b7b7; --block: #d9e2ec; --all-gather: #6fa8dc;
  --reduce-scatter: #e06666; --all-reduce: #c9503c; --broadcast: #8e7cc3;
  --all-to-all: #45818e; --ink: #111; }
@media (prefers-color-scheme: dark) { :root { --block: #9aa9b8; } }
svg.lanes { min-width: 44rem; } svg.lanes text { font-size: 12px; }
svg.lanes .in { fill: var(--ink); }
rect { stroke: var(--grid); stroke-width: .5; } .wait { stroke: currentColor; stroke-width: 1; }
.forward, .optimizer { fill: var(--forward); } .backward, .gradients { fill: var(--backward); }
.clip { fill: var(--clip); } .update, .parameters { fill: var(--update); }
.agreement, .prepare { fill: var(--agreement); } .block { fill: var(--block); }
.all-gather { fill: var(--all-gather); } .broadcast, .buffers { fill: var(--broadcast); }
.all-reduce { fill: var(--all-reduce); } .all-to-all { fill: var(--all-to-all); }
.reduce-scatter, .activations { fill: var(--reduce-scatter); } td { white-space: nowrap; }
path.area { stroke: none; } .predicted { stroke: currentColor; stroke-dasharray: 6 4; }
.swatch { display: inline-block; width: 1em; height: 1em; vertical-align: -.1em; }
svg.swatch { width: 1em; }
"""


def time_line(processes: Sequence[Process], label: str) -> str:
    """The lanes of all processes over a time: parts of the step, blocks, collectives."""
    spans = [span for process in processes for span in process.steps]
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    collectives = [collective for process in processes for collective in process.collectives]
    last = max([last, *(collective.end for collective in collectives)])
    scale = (WIDTH - LEFT - 10) / (last - first)
    drawn, y = [], 0
    for process in processes:
        rows: list[tuple[str, Sequence[Span]]] = [
            (f"process {process.rank}", process.parts),
            ("blocks", process.blocks),
        ]
        lanes = _without_overlaps(process.collectives)
        rows += [("collectives" if not number else "", lane) for number, lane in enumerate(lanes)]
        for head, row in ((head, row) for head, row in rows if row):
            drawn.append(f'<text x="0" y="{y + 16}">{head}</text>')
            drawn += _row(row, first, y, scale)
            y += ROW
        y += GAP
    axis = []
    total = (last - first) / 1e3
    for milliseconds in (tick for tick in round_ticks(0, total) if tick <= total):
        x = LEFT + milliseconds * 1e3 * scale
        axis.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{y - GAP}"/>')
        anchor = "end" if x > WIDTH - 40 else "middle"
        axis.append(
            f'<text x="{x:.1f}" y="{y + 4}" text-anchor="{anchor}">{milliseconds:g} ms</text>'
        )
    return picture(label, y + 10, axis + drawn)


def _row(row: Sequence[Span], first: float, y: int, scale: float) -> list[str]:
    """The bars of a row, then their names, which no later bar covers. `first` is the time at x=0.

    The spans of two parts overlap by microseconds, so a name begins where the bar before it ends.
    """
    bars, names, free = [], [], 0.0
    for span in row:
        x = LEFT + (span.start - first) * scale
        width = max(0.5, (span.end - span.start) * scale)
        bars.append(_bar(span, x, width, y, scale))
        carries = span.carries.removeprefix("h.") if isinstance(span, Collective) else ""
        text = carries or span.name.removeprefix(f"{BLOCK} ")
        begin = max(x, free) + 2
        if begin + len(text) * LETTER <= x + width - 2:
            names.append(f'<text class="in" x="{begin:.2f}" y="{y + 14}">{escape(text)}</text>')
        free = max(free, x + width)
    return bars + names


def _bar(span: Span, x: float, width: float, y: int, scale: float) -> str:
    """A span as a rectangle with its time as a tooltip; the time in a queue is a line before it."""
    told = f"{span.name}: {(span.end - span.start) / 1e3:.2f} ms"
    queue = ""
    if isinstance(span, Collective):
        told += f", {span.size / MEGABYTE:.3f} MB, {span.overlapped:.0%} of it while computing"
        told += f", {span.carries}" if span.carries else ""
        since = max(0.0, span.start - span.called) * scale
        queue = f'<line class="wait" x1="{x - since:.2f}" x2="{x:.2f}" y1="{y + 9}" y2="{y + 9}"/>'
    kind = escape(span.name.split(" ")[0])
    return (
        f'{queue}<g><title>{escape(told)}</title><rect class="{kind}" x="{x:.2f}" y="{y}" '
        f'width="{width:.2f}" height="{ROW - 5}"/></g>'
    )


def _without_overlaps(spans: Sequence[Collective]) -> list[list[Collective]]:
    """Distribute the spans over as few rows as possible, without overlaps."""
    rows: list[list[Collective]] = []
    for span in sorted(spans, key=lambda span: span.start):
        free = (row for row in rows if row[-1].end <= span.start)
        row = next(free, None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def memory_picture(memory: np.ndarray, places: list[str], predicted_peak: float | None) -> str:
    """Live bytes of a process over a step, by kind, one above the other; the predicted peak.

    `memory` (events, kinds) has a place in the step for each event; those of the start have none.
    """
    known = [index for index, place in enumerate(places) if place]
    totals, places = memory[known], [places[index] for index in known]
    columns = np.array_split(np.arange(len(totals)), min(MOST_POINTS, len(totals)))
    # The moment with the most memory in each part of the step.
    chosen = [int(rows[totals[rows].sum(axis=1).argmax()]) for rows in columns]
    order = [KINDS.index(kind) for kind in KINDS_FROM_BELOW]
    stacked = totals[chosen][:, order].cumsum(axis=1)
    peak = float(totals.sum(axis=1).max())
    top = max(peak, predicted_peak or 0.0) * 1.05
    across = (WIDTH - LEFT - 10) / max(1, len(chosen) - 1)

    def point(index: int, size: float) -> str:
        return f"{LEFT + index * across:.1f} {20 + (HEIGHT - 40) * (1 - size / top):.1f}"

    drawn = []
    for level, kind in reversed(list(enumerate(KINDS_FROM_BELOW))):
        above = [point(index, size) for index, size in enumerate(stacked[:, level])]
        floor = stacked[:, level - 1] if level else np.zeros(len(chosen))
        below = [point(index, size) for index, size in enumerate(floor)][::-1]
        drawn.append(f'<path class="area {kind}" d="M {" L ".join(above + below)} Z"/>')
    for size in (tick for tick in round_ticks(0, top / MEGABYTE) if tick * MEGABYTE <= top):
        y = round(20 + (HEIGHT - 40) * (1 - size * MEGABYTE / top), 1)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y}" y2="{y}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{size:,g} MB</text>')
    drawn += _part_labels([places[index] for index in chosen], across)
    if predicted_peak:
        y = 20 + (HEIGHT - 40) * (1 - predicted_peak / top)
        drawn.append(f'<line class="predicted" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y}" y2="{y}"/>')
    label = f"Memory of tensors over a step; at most {peak / MEGABYTE:,.2f} MB"
    return picture(label, HEIGHT, drawn)


def picture(label: str, height: float, drawn: Sequence[str]) -> str:
    """A picture that scrolls sideways if it does not fit."""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<svg class="lanes" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {WIDTH} {height}">{"".join(drawn)}</svg></div>'
    )


def _part_labels(parts: Sequence[str], across: float) -> list[str]:
    """The names of the parts of a step, where they begin."""
    drawn, free = [], 0.0
    for index, part in enumerate(parts):
        if index and part == parts[index - 1]:
            continue
        x = LEFT + index * across
        drawn.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{HEIGHT - 20}"/>')
        size = LETTER * len(part)
        at_end = x + size > WIDTH  # the last name ends within the picture
        if (WIDTH - size if at_end else x) >= free:
            place = f'x="{WIDTH}" text-anchor="end"' if at_end else f'x="{x:.1f}"'
            drawn.append(f'<text {place} y="{HEIGHT - 6}">{escape(part)}</text>')
            free = x + size + 8
    return drawn
