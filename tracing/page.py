"""trace.html: the time line of a step, its collectives and its memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from planning.estimate import sent_share
from tracing.drawing import KINDS_FROM_BELOW, MEGABYTE, STYLE, memory_picture, time_line
from tracing.ranges import AGREEMENT, BACKWARD, BLOCK, UPDATES
from tracing.result import Result, Row, traffic_rows
from tracing.spans import NORM, Process, read_process
from training.reporting.html import table, write_html

PAGE, CHROME = "trace.html", "trace.json"
PART = "profile_{}.json"
"""accelerate's name for the trace of a process."""


def report(result: Result, folder: Path, say: Callable[[str], None]) -> None:
    """Write trace.html and trace.json from the traces of all processes, and print the traffic."""
    result.predict()
    paths = [folder / PART.format(rank) for rank in range(result.shape.processes)]
    found = [path for path in paths if path.exists()]  # another machine's lie on its disk
    traces = {paths.index(path): json.loads(path.read_text(encoding="utf-8")) for path in found}
    processes = [read_process(trace, rank) for rank, trace in traces.items()]
    merge([*traces.values()], folder / CHROME)
    for path in found:
        path.unlink()
    rows = traffic_rows(processes[0], result)
    for line in ["", *as_lines(rows)] if rows else []:
        say(line)
    say(f"\npage      {folder / PAGE}")
    say(f"trace     {folder / CHROME}, for https://ui.perfetto.dev or chrome://tracing")
    title = escape(f"A step of {result.name}")
    write_html(folder / PAGE, title, sections(result, processes, rows), STYLE)


def merge(traces: list[dict[str, Any]], to: Path) -> None:
    """Write one Chrome trace from those of several processes."""
    events = [event for trace in traces for event in trace["traceEvents"]]
    to.write_text(json.dumps({**traces[0], "traceEvents": events}), encoding="utf-8")


def as_lines(rows: list[Row]) -> list[str]:
    """The traffic of a step as a table for a terminal."""
    lines = [
        f"{'collective':<32}{'calls':>6}{'counted, bytes':>17}{'predicted':>14}{'ratio':>8}"
        f"{'ms':>9}{'while computing':>17}"
    ]
    for one in rows:
        predicted = "" if one.predicted is None else f"{one.predicted:,.0f}"
        ratio = "" if one.ratio is None else f"{one.ratio:.4f}"
        lines.append(
            f"{one.kind:<32}{one.calls:>6}{one.counted:>17,}{predicted:>14}{ratio:>8}"
            f"{one.milliseconds:>9.2f}{one.overlapped:>17.0%}"
        )
    return lines


def sections(result: Result, processes: list[Process], rows: list[Row]) -> list[str]:
    """The parts of the page, as HTML."""
    steps = [
        [process.within(process.steps[number]) for process in processes]
        for number in range(len(processes[0].steps))
    ]
    kinds = dict.fromkeys(one.name for process in steps[-1] for one in process.collectives)
    parts = [
        f"<h1>A step of {escape(result.name)}</h1>",
        f"<p>{escape(in_words(result))}</p>",
        f"<h2>Time, step {len(steps)}</h2>",
        key([*UPDATES, AGREEMENT, BLOCK, *kinds]),
        time_line(steps[-1], f"Time line of step {len(steps)}"),
    ]
    for number, one in enumerate(steps[:-1], start=1):
        line = time_line(one, f"Time line of step {number}")
        parts.append(f"<details><summary>Step {number}</summary>{line}</details>")
    if rows:
        parts += [
            f"<h2>Collectives of step {len(steps)}, process 0</h2>",
            traffic_table(result, rows),
            *bucket_section(result, steps[-1][0]),
            f"<p>{escape(accumulation_in_words(result, rows))}</p>",
        ]
    return [
        *parts,
        f"<h2>Memory of tensors, process 0</h2>\n<p>{escape(memory_in_words(result))}</p>",
        key(KINDS_FROM_BELOW),
        memory_picture(result),
    ]


def in_words(result: Result) -> str:
    """The shape of the run in a sentence."""
    shape, model = result.shape, result.model
    strategy = "One process"
    if shape.processes > 1:
        strategy = f"DDP: {shape.processes} processes with a whole model each"
    if shape.shards > 1:
        strategy = f"FSDP: {shape.processes} processes with a shard of the model each"
    if 1 < shape.shards < shape.processes:
        strategy = (
            f"Hybrid sharding: {shape.processes // shape.shards} groups of {shape.shards} "
            "processes, each group with a whole model"
        )
    precision = "float32" if shape.precision == "no" else shape.precision
    return (
        f"{strategy}; {shape.device}, {precision}. {model.n_layer} layers, {model.n_embd} wide, "
        f"{result.weights / MEGABYTE:,.2f} MB of weights. In a step, each process accumulates "
        f"{result.accumulation} x {result.micro_batch_size} sequences."
    )


def traffic_table(result: Result, rows: list[Row]) -> str:
    """The traffic of a step, and the part that one process sends on a ring."""
    cells = []
    for one in rows:
        sent = f"{sent_share(one.kind, result.shape) * one.counted:,.0f}"
        cells.append(
            (
                one.kind,
                one.calls,
                f"{one.counted:,}",
                "" if one.predicted is None else f"{one.predicted:,.0f}",
                "" if one.ratio is None else f"{one.ratio:.4f}",
                sent if one.kind in result.predicted_traffic and one.kind != NORM else "",
                f"{one.milliseconds:.2f}",
                f"{one.overlapped:.0%}",
            )
        )
    heads = ["collective", "calls", "bytes, counted", "predicted", "ratio"]
    heads += ["sent by a process on a ring", "ms", "while computing"]
    return table("Collectives of a step", heads, cells)


def bucket_section(result: Result, step: Process) -> list[str]:
    """DDP's buckets: their parameters, and how much of each one's time overlaps."""
    sent = [one for one in step.collectives if one.part == BACKWARD]
    if not result.buckets:
        return []
    rows = []
    for names, one in zip(result.buckets, sent[-len(result.buckets) :], strict=True):
        named = f"{names[0]} ... {names[-1]}" if len(names) > 2 else ", ".join(names)
        took = (one.end - one.start) / 1e3
        rows.append((f"{one.size:,}", len(names), named, f"{took:.2f}", f"{one.overlapped:.0%}"))
    heads = ("bytes", "parameters", "from the last to the first", "ms", "while computing")
    return ["<h2>DDP's buckets</h2>", table("Buckets", heads, rows)]


def accumulation_in_words(result: Result, rows: list[Row]) -> str:
    """The additional or the saved traffic of gradient accumulation."""
    times = result.accumulation
    if times == 1:
        return "The step has one micro-batch: nothing accumulates."
    if result.shape.shards > 1:
        return (
            f"The step has {times} micro-batches, and FSDP sends after each of them. Otherwise "
            "every process would hold the gradients of the whole model."
        )
    size = sum(one.counted for one in rows if one.kind == "all-reduce")
    return (
        f"The step has {times} micro-batches, and only the last one sends (no_sync): "
        f"{size:,} bytes instead of {times * size:,}."
    )


def memory_in_words(result: Result) -> str:
    """The peak in a sentence, and the predicted one."""
    peak = int(result.memory.sum(axis=1).max())
    words = f"The peak of the counted step is {peak:,} bytes."
    if result.predicted_peak is not None:
        words += (
            f" plan.py predicts {result.predicted_peak:,.0f}, the dashed line; counted over "
            f"predicted is {peak / result.predicted_peak:.3f}."
        )
    return words


def key(names: Iterable[str]) -> str:
    """The legend of the colours."""
    swatch = '<svg class="swatch" viewBox="0 0 1 1"><rect class="{}" width="1" height="1"/></svg>'
    shown = dict.fromkeys(name.split(" ")[0] for name in names)
    return "<p>" + " ".join(f"{swatch.format(name)} {name}" for name in shown) + "</p>"
