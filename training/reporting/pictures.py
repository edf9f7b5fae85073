"""Parts of a page, which is one file without scripts or requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from data.printable import printable
from snapshot.disk.files import write_whole

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


def write_html(path: Path, title: str, parts: Iterable[str], style: str = "") -> None:
    """Write a page. Title and parts are HTML. Raises OSError."""
    body = "\n".join(parts)
    write_whole(
        path,
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'  # otherwise a browser asks for an icon
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
