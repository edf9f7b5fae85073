"""proof.html: the checks as a table, and the first rows with what the model learns to write."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from proving.lines import GREEN, GREY, RED
from training.reporting.pictures import write_html

STYLE = f"""
.{GREEN} {{ color: #1a7f37; }} .{RED} {{ color: #c9302c; font-weight: 600; }}
.{GREY} {{ color: #777; }}
@media (prefers-color-scheme: dark) {{ .{GREEN} {{ color: #56d364; }} .{RED} {{ color: #ff7b72; }}
  .{GREY} {{ color: #aaa; }} mark {{ background: #1f4b2c; color: inherit; }} }}
mark {{ background: #d3f2da; color: inherit; }}
td {{ vertical-align: top; }} td.said {{ white-space: normal; min-width: 14em; }}
td.figure {{ white-space: nowrap; }}
"""


def write_page(path: Path, content: dict[str, Any], first_rows: Sequence[Any]) -> None:
    """Write the page of a proof. Raises OSError."""
    counts = content["counts"]
    said = ", ".join(f"{number} {status}" for status, number in counts.items())
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    title = escape(f"Proof of {content['run']}")
    words = escape(" ".join(content["words"])) or "the defaults"
    parts = [
        f"<h1>{title}</h1>",
        f"<p>{said}, in {content['seconds']:.0f} s.</p>",
        f"<p>Words of train.py: <code>{words}</code></p>",
        f"<p>{escape(content['machine'])}</p>",
        f"<p>{escape(versions)}</p>",
        checks(content["checks"]),
        "<h2>The first rows</h2>",
        "<p>What the model learns to write has a background.</p>",
        *(f"<pre>{row(pieces)}</pre>" for pieces in first_rows),
    ]
    write_html(path, title, parts, STYLE)


def checks(lines: Sequence[dict[str, Any]]) -> str:
    """The checks as a table."""
    rows = []
    for line in lines:
        figure = ""
        if line["difference"] is not None:
            figure = f"{line['difference']:.1e}, {line['bound']:.0e}"
        rows.append(
            f'<tr><td class="{line["status"]}">{line["status"]}</td>'
            f'<td>{escape(line["name"])}</td><td class="said">{escape(line["said"])}</td>'
            f'<td class="figure">{figure}</td></tr>'
        )
    heads = "".join(
        f'<th scope="col">{head}</th>'
        for head in ("", "check", "what was compared", "difference, bound")
    )
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="Checks"><table>\n'
        f"<tr>{heads}</tr>\n" + "\n".join(rows) + "\n</table></div>"
    )


def row(pieces: Sequence[Any]) -> str:
    """A row of text, marked where it is trained on."""
    return "".join(
        f"<mark>{escape(text)}</mark>" if trained else escape(text) for text, trained in pieces
    )
