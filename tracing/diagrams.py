"""Diagrams of a trace, as SVG: who sends what in which order, and what each process has.

A cell that several processes have names them; of those that all have, it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import groupby
from math import sqrt

from tracing.drawing import LEFT, LETTER, WIDTH, picture
from tracing.order import Meeting
from tracing.parts import REST, Matrix, Shares

LINE = 22
"""Height of a row of the order."""
PLACES, KINDS, CALLS, BYTES, RANKS = 90, 250, 500, 620, 660
"""Left edges of the columns of the order; of figures, right edges."""
MOST_RANKS, COLUMN = 16, 60
"""Processes of which there is a column, and its width, if there are not too many."""
LONGEST_SIDE, SHORTEST_SIDE, STRIP = 130, 9, 9
"""Of a matrix, and the width of a vector."""
HIGHEST_STACK = 130
"""Height of all experts of a matrix."""
BETWEEN = 22
"""Between two matrices."""
COLOURS = 8
THIRDS = ("q", "k", "v")
"""What a matrix joins, if it joins three."""
SQUARE = 150
STYLE = """
:root { --owner0: #9ecae9; --owner1: #f6b26b; --owner2: #a9d18e; --owner3: #e5b3d1;
  --owner4: #7fcdbb; --owner5: #ffe082; --owner6: #c3b1e1; --owner7: #d2b48c; --several: #d9e2ec; }
@media (prefers-color-scheme: dark) { :root { --several: #9aa9b8; } }
.joins { stroke: var(--ink); stroke-width: 1.5; } .frame { fill: none; stroke: currentColor; }
.member { stroke-width: 3; }
.head { font-weight: 600; } .several { fill: var(--several); }
""" + "\n".join(f".owner{number} {{ fill: var(--owner{number}); }}" for number in range(COLOURS))
CONTENTS = {
    "all-gather": "all-gather of weights",
    "reduce-scatter": "reduce-scatter of gradients",
    "all-reduce": "all-reduce of gradients",
}
"""What FSDP and DDP send."""
Groups = Callable[[str], list[list[int]]]
"""The groups of processes of a kind of collective."""


def order_diagram(meetings: Sequence[Meeting], groups: Groups, processes: int, label: str) -> str:
    """A row for each collective: where in the step, bytes, and a line through each group."""
    shown = min(processes, MOST_RANKS)
    column = min(COLUMN, (WIDTH - RANKS - 20) / shown)
    x = [RANKS + 24 + column * (rank + 0.5) for rank in range(shown)]
    heads = [(PLACES, "where", "start"), (KINDS, "collective", "start"), (CALLS, "calls", "end")]
    heads += [(BYTES, "bytes", "end"), (RANKS + 24, "process", "start")]
    drawn = [_text(place, 14, head, anchor, "head") for place, head, anchor in heads]
    step = -(-shown // 16)
    drawn += [_text(x[rank], 32, str(rank), "middle") for rank in range(0, shown, step)]
    y = 40
    for part, some in groupby(meetings, lambda one: one.part):
        drawn.append(f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
        drawn.append(_text(0, y + 16, part, kind="head"))
        for place, rows in groupby(some, lambda one: one.place):
            drawn.append(_text(PLACES, y + 16, place))
            for row in rows:
                kind = escape(row.kind.split(" ")[0])
                drawn.append(
                    f'<rect class="{kind}" x="{KINDS - 16}" y="{y + 6}" width="11" height="11"/>'
                )
                drawn.append(_text(KINDS, y + 16, CONTENTS.get(row.kind, row.kind)))
                drawn.append(_text(CALLS, y + 16, f"{row.calls}", "end"))
                drawn.append(_text(BYTES, y + 16, f"{row.size:,}", "end"))
                drawn += _lines(groups(row.kind), x, y + LINE / 2, kind)
                y += LINE
    return picture(label, y + 4, drawn)


def _lines(groups: list[list[int]], x: Sequence[float], y: float, kind: str) -> list[str]:
    """A line with a dot for each member; lines that would cover another are moved apart."""
    levels: list[int] = []
    drawn = []
    for group in ([rank for rank in group if rank < len(x)] for group in groups):
        if not group:
            continue
        free = (level for level, last in enumerate(levels) if last < group[0])
        level = next(free, len(levels))
        levels[level : level + 1] = [group[-1]]
        drawn.append((group, level))
    gap = min(6.0, (LINE - 8) / max(1, len(levels) - 1))
    lines = []
    for group, level in drawn:
        at = y + gap * (level - (len(levels) - 1) / 2)
        colour = f'style="stroke: var(--{kind})"'
        lines.append(
            f'<line class="member" {colour} x1="{x[group[0]]:.1f}" x2="{x[group[-1]]:.1f}" '
            f'y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        lines += [
            f'<circle class="{kind}" cx="{x[one]:.1f}" cy="{at:.1f}" r="4"/>' for one in group
        ]
    return lines


def matrix_diagram(groups: dict[str, list[Matrix]], processes: int, label: str) -> str:
    """The matrices, with rows (outputs) downwards and columns (inputs) to the right.

    Sides are as the roots of their lengths; parts of a matrix are to scale. A bias is a strip to
    the right of its weight.
    """
    in_blocks = [one for title, some in groups.items() if title != REST for one in some]
    longest = max(length for one in in_blocks for length in one.shape[-2:])
    drawn: list[str] = []
    y = 0.0
    for title, some in groups.items():
        drawn.append(_text(0, y + 16, title, kind="head"))
        x, lowest = float(LEFT), y
        for matrices in _with_biases(some):
            name, shape = matrices[0].name, matrices[0].shape
            size = " x ".join(f"{length:,}" for length in shape)
            width, height, shapes = 0.0, 0.0, list[str]()
            for matrix in matrices:
                wide, high, cells = _cells(matrix, longest, processes)
                shapes.append(f'<g transform="translate({width:.1f} 0)">{"".join(cells)}</g>')
                width, height = width + wide + 3, max(height, high)
            width = max(width, LETTER * max(len(name), len(size)))
            if x + width > WIDTH and x > LEFT:
                x, y = float(LEFT), lowest + 14
            drawn += [_text(x, y + 16, name), _text(x, y + 30, size)]
            drawn.append(f'<g transform="translate({x:.1f} {y + 38:.1f})">{"".join(shapes)}</g>')
            x += width + BETWEEN
            lowest = max(lowest, y + 38 + height)
        y = lowest + 18
    return picture(label, y, drawn)


def _with_biases(some: Sequence[Matrix]) -> list[list[Matrix]]:
    """Each parameter, with the bias that follows it."""
    found: list[list[Matrix]] = []
    for one in some:
        layer, _, last = one.name.rpartition(".")
        if found and last == "bias" and found[-1][0].name.endswith(layer):
            found[-1].append(one)
        else:
            found.append([one])
    return found


def _cells(matrix: Matrix, longest: int, processes: int) -> tuple[float, float, list[str]]:
    """A matrix as its width, its height and its parts; experts one below the other."""

    def side(length: int) -> float:
        least = SHORTEST_SIDE / LONGEST_SIDE
        return LONGEST_SIDE * min(1.2, max(least, sqrt(length / longest)))

    *stacked, rows, columns = matrix.shape if matrix.shape[1:] else (*matrix.shape, 1)
    count = stacked[0] if stacked else 1
    width, height = side(columns) if matrix.shape[1:] else STRIP, side(rows)
    if count > 1:
        height = max(SHORTEST_SIDE, min(height, HIGHEST_STACK / count - 3))
    shapes = []
    for number in range(count):
        top = number * (height + 3)
        for block, ranks in matrix.owners.items():
            *outer, (first, last), (left, right) = block if block[1:] else (*block, (0, 1))
            if outer and not outer[0][0] <= number < outer[0][1]:
                continue
            x, y = width * left / columns, top + height * first / rows
            wide, high = width * (right - left) / columns, height * (last - first) / rows
            shapes.append(_cell(x, y, wide, high, ranks, processes))
    joined = 1 if stacked else matrix.joined
    for number in range(joined):
        y = height * number / joined
        if number:
            line = f'x1="0" x2="{width:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
            shapes.append(f'<line class="joins" {line}/>')
        if joined == len(THIRDS) and width > STRIP:
            shapes.append(_text(-6, y + height / joined / 2 + 4, THIRDS[number], "end"))
    return width, count * (height + 3) - 3, shapes


def sequence_diagram(shares: Shares, processes: int, label: str) -> str:
    """A sequence: its positions between the layers, and in attention by heads and positions."""
    wide = WIDTH - LEFT - 20
    drawn = [_text(0, 24, "between", kind="head"), _text(0, 40, "the layers", kind="head")]

    def at(position: int, size: float) -> float:
        return size * position / shares.length

    for (begin, end), ranks in shares.between.items():
        x, size = LEFT + at(begin, wide), at(end - begin, wide)
        drawn.append(_cell(x, 14, size, 28, ranks, processes))
    edges = sorted({edge for part in shares.between for edge in part})
    for edge in edges:
        drawn.append(_text(LEFT + at(edge, wide), 58, f"{edge:,}", "middle"))
    y, x = 100.0, float(LEFT)
    drawn += [_text(0, y + 4, "attention", kind="head")]
    drawn += [_text(0, y + 22, "↓ queries")]
    drawn += [_text(0, y + 36, "→ keys")]
    lowest = y
    for heads in sorted({heads for heads, _ in shares.attention}):
        if x + SQUARE > WIDTH:
            x, y = float(LEFT), lowest + 44
        names = (
            f"heads {heads[0]} to {heads[1] - 1}" if heads[1] - heads[0] > 1 else f"head {heads[0]}"
        )
        drawn.append(_text(x, y - 8, names))
        for (own, (begin, end)), ranks in shares.attention.items():
            if own == heads:
                band = _causal_band(at(begin, SQUARE), at(end, SQUARE), ranks, processes)
                drawn.append(f'<g transform="translate({x:.1f} {y:.1f})">{band}</g>')
        drawn.append(
            f'<rect class="frame" x="{x:.1f}" y="{y:.1f}" width="{SQUARE}" height="{SQUARE}"/>'
        )
        lowest = max(lowest, y + SQUARE)
        x += SQUARE + BETWEEN
    return picture(label, lowest + 8, drawn)


def _causal_band(first: float, last: float, ranks: Sequence[int], processes: int) -> str:
    """Queries from the first to the last, each with the keys up to itself."""
    points = f"0,{first:.1f} {first:.1f},{first:.1f} {last:.1f},{last:.1f} 0,{last:.1f}"
    label = _label(2, first, (first + last) / 2, last - first, ranks, processes)
    return f'<polygon class="{_colour(ranks)}" points="{points}"/>{label}'


def owners_key(processes: int) -> str:
    """The legend of the colours of processes."""
    swatch = '<svg class="swatch" viewBox="0 0 1 1"><rect class="{}" width="1" height="1"/></svg>'
    shown = [(f"owner{rank}", f"process {rank}") for rank in range(min(processes, COLOURS))]
    shown.append(("several", "several or all of them"))
    return "<p>" + " ".join(f"{swatch.format(kind)} {name}" for kind, name in shown) + "</p>"


def _colour(ranks: Sequence[int]) -> str:
    return "several" if ranks[1:] else f"owner{ranks[0] % COLOURS}"


def _cell(
    x: float, y: float, width: float, height: float, ranks: Sequence[int], processes: int
) -> str:
    """A part with the processes that have it, named where there is room."""
    return (
        f'<g><title>{_named(ranks, processes)}</title><rect class="{_colour(ranks)}" '
        f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
        f"{_label(x, y, width, height, ranks, processes)}</g>"
    )


def _label(
    x: float, y: float, width: float, height: float, ranks: Sequence[int], processes: int
) -> str:
    """The names of processes in the middle of a rectangle; empty if they do not fit."""
    for text in (_named(ranks, processes), f"{ranks[0]} ..."):
        if LETTER * len(text) + 4 <= width and height >= 13:
            return _text(x + width / 2, y + height / 2 + 4, text, "middle", "in")
    return ""


def _named(ranks: Iterable[int], processes: int) -> str:
    some = [*ranks]
    return "all" if len(some) == processes else ", ".join(map(str, some))


def _text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
