"""The pictures of a trace, as SVG: the time line of a step, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from planning.allocation_log import KINDS
from tracing.ranges import BLOCK
from tracing.result import Result
from tracing.spans import Collective, Process, Span

WIDTH, LEFT, ROW, GAP = 1000, 90, 24, 14
"""Of a picture, of its labels, of a row and between processes, in the units of the drawing."""
LETTER = 7
"""The width of a letter."""
HEIGHT = 260
"""Of the picture of memory."""
MOST_POINTS = 600
MEGABYTE = 1e6
TICKS = 5
KINDS_FROM_BELOW = ("parameters", "gradients", "optimizer", "buffers", "activations")
STYLE = """
:root { --forward: #9ecae9; --backward: #f6b26b; --clip: #d5a6bd; --update: #93c47d;
  --agreement: #b7b7b7; --prepare: #b7b7b7; --block: #d9e2ec; --all-gather: #6fa8dc;
  --reduce-scatter: #e06666; --all-reduce: #c9503c; --broadcast: #8e7cc3; --ink: #111; }
@media (prefers-color-scheme: dark) { :root { --block: #9aa9b8; } }
svg.lanes { min-width: 44rem; } svg.lanes text { font-size: 12px; }
svg.lanes rect + text, svg.lanes .in { fill: var(--ink); }
rect { stroke: var(--grid); stroke-width: .5; } .wait { stroke: currentColor; stroke-width: 1; }
.forward, .optimizer { fill: var(--forward); } .backward, .gradients { fill: var(--backward); }
.clip { fill: var(--clip); } .update, .parameters { fill: var(--update); }
.agreement, .prepare { fill: var(--agreement); } .block { fill: var(--block); }
.all-gather { fill: var(--all-gather); } .broadcast, .buffers { fill: var(--broadcast); }
.all-reduce { fill: var(--all-reduce); }
.reduce-scatter, .activations { fill: var(--reduce-scatter); } td { white-space: nowrap; }
path.area { stroke: none; } .predicted { stroke: currentColor; stroke-dasharray: 6 4; }
.swatch { display: inline-block; width: 1em; height: 1em; vertical-align: -.1em; }
svg.swatch { width: 1em; }
"""


def time_line(processes: Sequence[Process], label: str) -> str:
    """The lanes of all processes over a time: parts of the step, blocks, collectives."""
    spans = [span for one in processes for span in one.steps]
    first, last = min(one.start for one in spans), max(one.end for one in spans)
    last = max(last, *(one.end for process in processes for one in process.collectives), last)
    scale = (WIDTH - LEFT - 10) / (last - first)
    drawn, y = [], 0
    for process in processes:
        rows: list[tuple[str, Sequence[Span]]] = [
            (f"process {process.rank}", process.parts),
            ("blocks", process.blocks),
        ]
        lanes = _without_overlaps(process.collectives)
        rows += [("collectives" if not number else "", lane) for number, lane in enumerate(lanes)]
        for head, row in (one for one in rows if one[1]):
            drawn.append(f'<text x="0" y="{y + 16}">{head}</text>')
            drawn += [_bar(one, LEFT + (one.start - first) * scale, y, scale) for one in row]
            y += ROW
        y += GAP
    for tick in range(TICKS + 1):
        x = LEFT + (WIDTH - LEFT - 10) * tick / TICKS
        anchor = "end" if tick == TICKS else "middle"
        milliseconds = (last - first) / 1e3 * tick / TICKS
        drawn.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{y - GAP}"/>')
        drawn.append(
            f'<text x="{x:.1f}" y="{y + 4}" text-anchor="{anchor}">{milliseconds:.1f} ms</text>'
        )
    return _picture(label, y + 10, drawn)


def _bar(span: Span, x: float, y: float, scale: float) -> str:
    """A span as a rectangle with its name, where there is room, and with its time."""
    width = max(0.5, (span.end - span.start) * scale)
    name, kind = span.name, span.name.split(" ")[0]
    told = f"{name}: {(span.end - span.start) / 1e3:.2f} ms"
    queue = ""
    if isinstance(span, Collective):
        name = span.carries.removeprefix("h.") or name
        told += f", {span.size / MEGABYTE:.3f} MB, {span.overlapped:.0%} of it while computing"
        told += f", {span.carries}" if span.carries else ""
        since = max(0.0, span.start - span.called) * scale
        queue = f'<line class="wait" x1="{x - since:.2f}" x2="{x:.2f}" y1="{y + 9}" y2="{y + 9}"/>'
    text = name.removeprefix(f"{BLOCK} ")
    fits = len(text) * LETTER <= width - 4
    inside = f'<text class="in" x="{x + 2:.2f}" y="{y + 14}">{escape(text)}</text>' if fits else ""
    return (
        f'{queue}<g><title>{escape(told)}</title><rect class="{escape(kind)}" x="{x:.2f}" y="{y}" '
        f'width="{width:.2f}" height="{ROW - 5}"/>{inside}</g>'
    )


def _without_overlaps(spans: Sequence[Collective]) -> list[list[Collective]]:
    """The same spans in as few rows as they need."""
    rows: list[list[Collective]] = []
    for span in sorted(spans, key=lambda one: one.start):
        free = (row for row in rows if row[-1].end <= span.start)
        row = next(free, None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def memory_picture(result: Result) -> str:
    """Live bytes of a process over a step, by kind, one above the other; the predicted peak."""
    known = [index for index, place in enumerate(result.places) if place]  # the step, not its start
    totals, places = result.memory[known], [result.places[index] for index in known]
    columns = np.array_split(np.arange(len(totals)), min(MOST_POINTS, len(totals)))
    # Of each part of the step the moment with the most.
    chosen = [int(rows[totals[rows].sum(axis=1).argmax()]) for rows in columns]
    order = [KINDS.index(kind) for kind in KINDS_FROM_BELOW]
    stacked = totals[chosen][:, order].cumsum(axis=1)
    peak = float(totals.sum(axis=1).max())
    top = max(peak, result.predicted_peak or 0.0) * 1.05
    across = (WIDTH - LEFT - 10) / max(1, len(chosen) - 1)

    def point(index: int, size: float) -> str:
        return f"{LEFT + index * across:.1f} {20 + (HEIGHT - 40) * (1 - size / top):.1f}"

    drawn = []
    for level, kind in reversed(list(enumerate(KINDS_FROM_BELOW))):
        above = [point(index, size) for index, size in enumerate(stacked[:, level])]
        floor = stacked[:, level - 1] if level else np.zeros(len(chosen))
        below = [point(index, size) for index, size in enumerate(floor)][::-1]
        drawn.append(f'<path class="area {kind}" d="M {" L ".join(above + below)} Z"/>')
    for tick in range(TICKS + 1):
        y = 20 + (HEIGHT - 40) * (1 - tick / TICKS / 1.05)
        size = top / 1.05 * tick / TICKS / MEGABYTE
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y}" y2="{y}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{size:,.1f} MB</text>')
    drawn += _part_labels([places[index] for index in chosen], across)
    if result.predicted_peak:
        y = 20 + (HEIGHT - 40) * (1 - result.predicted_peak / top)
        drawn.append(f'<line class="predicted" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y}" y2="{y}"/>')
    label = f"Memory of tensors over a step; at most {peak / MEGABYTE:,.2f} MB"
    return _picture(label, HEIGHT, drawn)


def _picture(label: str, height: float, drawn: Sequence[str]) -> str:
    """A picture that can be scrolled sideways where it does not fit."""
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
        if x >= free:
            anchor = "end" if x + LETTER * len(part) > WIDTH else "start"
            drawn.append(
                f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{escape(part)}</text>'
            )
            free = x + LETTER * len(part) + 8
    return drawn
