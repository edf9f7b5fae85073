"""trace.html: the time line of a step, its collectives and its memory, next to the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from config.schema import lora_of
from model.family import ModelConfig
from model.frozen import AUTO
from model.sharded import numbers_in
from planning.allocation_log import IN_MICRO_BATCHES, LiveBytes
from planning.estimate import MemoryEstimate, groups_of, sent_share
from planning.fake_trace import Shape
from tracing import diagrams, parts
from tracing.drawing import KINDS_FROM_BELOW, MEGABYTE, STYLE, memory_picture, time_line
from tracing.order import meetings
from tracing.spans import (
    AGREEMENT,
    BACKWARD,
    BLOCK,
    NORM,
    PREPARE,
    UPDATES,
    Collective,
    Process,
    read_process,
)
from training.distributed.accelerator import (
    bucket_parameters,
    context_size,
    exchanges_heads,
    micro_batch_shape,
    replicas,
    unwrapped,
)
from training.distributed.shared_matrices import tensor_size
from training.reporting.pictures import table, write_html
from training.run.session import Session
from training.run.tuning import has_packed_rows

PAGE, CHROME = "trace.html", "trace.json"
PART, HELD = "profile_{}.json", "held_{}.json"
"""accelerate's name for the trace of a process, and ours for what it has of the model."""


@dataclass
class Result:
    """The shape of a run, and what was counted in this process."""

    name: str
    model: ModelConfig
    block_size: int
    """The length of the run's sequences, which a model's context may exceed."""
    shape: Shape
    micro_batch_size: int
    accumulation: int
    weights: int
    """Bytes of the model's parameters and buffers."""
    trained: int
    """Number of trained tensors."""
    buckets: list[list[str]]
    """The parameters of each of DDP's buckets."""
    memory: np.ndarray
    """Live bytes (events, kinds) in the counted step."""
    places: list[str]
    """The part of the step of each event."""
    predicted_traffic: dict[str, float] = field(default_factory=dict)
    predicted_peak: float | None = None

    @classmethod
    def of(cls, session: Session, model: nn.Module, memory: LiveBytes) -> Result:
        """Collect the result of a session's attempt. A sharded model counts with its full sizes."""
        accelerator, config, state = session.accelerator, session.config, session.state
        bare: Any = unwrapped(accelerator, model)
        tensors = [*bare.parameters(), *bare.buffers()]
        tensor = tensor_size(accelerator)
        copies = replicas(accelerator) if accelerator.is_fsdp2 else accelerator.num_processes
        totals = memory.log.totals()
        return cls(
            name=config.run.name,
            model=replace(bare.config, lora=lora_of(config.model)),
            block_size=config.data.block_size,
            shape=Shape(
                device=accelerator.device.type,
                precision=accelerator.mixed_precision,
                processes=accelerator.num_processes,
                shards=accelerator.num_processes // (copies * tensor),
                context=context_size(accelerator),
                tensor=tensor,
                exchanges_heads=exchanges_heads(accelerator),
                optimizer=config.optim.name,
                freeze=tuple(config.optim.freeze),
                frozen_dtype=state.frozen_dtype or AUTO,
                attention=state.attention,
                packed=has_packed_rows(config, bare, state),
                sync_each=config.run.sync_each_micro_batch,
                reduce_dtype=config.run.reduce_dtype,
                fp8=None if bare.fp8 is None else bare.fp8.recipe,
            ),
            micro_batch_size=micro_batch_shape(accelerator, config)[0],
            accumulation=accelerator.gradient_accumulation_steps,
            weights=sum(numbers_in(one) * one.element_size() for one in tensors),
            trained=sum(parameter.requires_grad for parameter in bare.parameters()),
            buckets=bucket_parameters(model),
            memory=totals,
            places=[place[0] if place else "" for place in memory.log.places[: len(totals)]],
        )

    def predict(self) -> None:
        """Add what the planner predicts. It must not run while there is a process group."""
        accumulation = self.accumulation
        estimate = MemoryEstimate(self.model, self.shape)
        self.predicted_traffic = estimate.traffic(self.micro_batch_size, accumulation)
        if self.shape.shards > 1:  # the norms of all tensors, in float32
            self.predicted_traffic[NORM] = 4 * self.trained
        if self.block_size < self.model.block_size:
            shorter = replace(self.model, block_size=self.block_size)
            estimate = MemoryEstimate(shorter, self.shape)
            if self.shape.context * self.shape.tensor > 1:  # what depends on the sequences
                own = estimate.traffic(self.micro_batch_size, accumulation)
                some = {kind: own[kind] for kind in IN_MICRO_BATCHES if kind in own}
                self.predicted_traffic |= some
        self.predicted_peak = estimate.peaks(self.micro_batch_size, accumulation > 1)["update"]


@dataclass(frozen=True)
class Row:
    """A kind of collective in a step of one process: counted, and predicted."""

    kind: str
    calls: int
    counted: int
    """Bytes of the full tensors."""
    predicted: float | None
    milliseconds: float
    overlapped: float
    """The share of the time in which the process also computed."""

    @property
    def ratio(self) -> float | None:
        """Counted bytes over predicted bytes."""
        return self.counted / self.predicted if self.predicted else None


def traffic_rows(process: Process, result: Result) -> list[Row]:
    """The collectives of a process by kind: at its start, in and around its last step."""
    step = process.within(process.steps[-1]).collectives
    start = [
        collective
        for collective in process.collectives
        if collective.part == PREPARE and collective.is_float
    ]
    rows = [_row("broadcast of the weights, at the start", start, result.weights)]
    for kind in dict.fromkeys(collective.name for collective in step):
        update = [
            collective
            for collective in step
            if collective.name == kind and collective.part in UPDATES
        ]
        others = [
            collective
            for collective in step
            if collective.name == kind and collective.part not in UPDATES
        ]
        rows.append(_row(kind, update, result.predicted_traffic.get(kind, 0.0)))
        rows.append(_row(f"{kind}, agreement to stop", others, None))
    return [row for row in rows if row.calls]


def _row(kind: str, some: list[Collective], predicted: float | None) -> Row:
    microseconds = sum(collective.end - collective.start for collective in some)
    covered = sum(
        (collective.end - collective.start) * collective.overlapped for collective in some
    )
    return Row(
        kind,
        len(some),
        sum(collective.size for collective in some),
        predicted,
        microseconds / 1e3,
        covered / microseconds if microseconds else 0.0,
    )


def report(result: Result, folder: Path, say: Callable[[str], None]) -> None:
    """Write trace.html and trace.json from the traces of all processes, and print the traffic."""
    result.predict()
    traces, held = (_take(folder, name, result.shape.processes) for name in (PART, HELD))
    processes = [read_process(trace, rank) for rank, trace in traces.items()]
    merge([*traces.values()], folder / CHROME)
    rows = traffic_rows(processes[0], result)
    for line in ["", *as_lines(rows)] if rows else []:
        say(line)
    say(f"\npage      {folder / PAGE}")
    say(f"trace     {folder / CHROME}, for https://ui.perfetto.dev or chrome://tracing")
    title = escape(f"A step of {result.name}")
    content = sections(result, processes, rows, held)
    write_html(folder / PAGE, title, content, STYLE + diagrams.STYLE)


def _take(folder: Path, name: str, processes: int) -> dict[int, dict[str, Any]]:
    """What processes have written, by rank, and remove it. Another machine's lies on its disk."""
    found = {}
    for rank in range(processes):
        path = folder / name.format(rank)
        if path.exists():
            found[rank] = json.loads(path.read_text(encoding="utf-8"))
            path.unlink()
    return found


def merge(traces: list[dict[str, Any]], to: Path) -> None:
    """Write one Chrome trace from those of several processes."""
    events = [event for trace in traces for event in trace["traceEvents"]]
    to.write_text(json.dumps({**traces[0], "traceEvents": events}), encoding="utf-8")


def as_lines(rows: list[Row]) -> list[str]:
    """The traffic of a step as a table for a terminal."""
    lines = [
        f"{'collective':<34}{'calls':>6}{'counted, bytes':>17}{'predicted':>14}{'ratio':>8}"
        f"{'ms':>9}{'while computing':>17}"
    ]
    for row in rows:
        predicted = "" if row.predicted is None else f"{row.predicted:,.0f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.4f}"
        lines.append(
            f"{row.kind:<34}{row.calls:>6}{row.counted:>17,}{predicted:>14}{ratio:>8}"
            f"{row.milliseconds:>9.2f}{row.overlapped:>17.0%}"
        )
    return lines


def sections(
    result: Result, processes: list[Process], rows: list[Row], held: dict[int, dict[str, Any]]
) -> list[str]:
    """The parts of the page, as HTML."""
    steps = [
        [process.within(process.steps[number]) for process in processes]
        for number in range(len(processes[0].steps))
    ]
    kinds = dict.fromkeys(
        collective.name for process in steps[-1] for collective in process.collectives
    )
    found = [
        f"<h1>A step of {escape(result.name)}</h1>",
        f"<p>{escape(in_words(result))}</p>",
        f"<h2>Time, step {len(steps)}</h2>",
        key([*UPDATES, AGREEMENT, BLOCK, *kinds]),
        time_line(steps[-1], f"Time line of step {len(steps)}"),
    ]
    for number, step in enumerate(steps[:-1], start=1):
        line = time_line(step, f"Time line of step {number}")
        found.append(f"<details><summary>Step {number}</summary>{line}</details>")
    if rows:
        found += [
            f"<h2>Collectives of step {len(steps)}, process 0</h2>",
            traffic_table(result, rows),
            *bucket_section(result, steps[-1][0]),
            f"<p>{escape(accumulation_in_words(result, rows))}</p>",
            *order_section(result, steps[-1][0]),
        ]
    if result.shape.processes > 1:
        found += share_sections(result, held)
    return [
        *found,
        f"<h2>Memory of tensors, process 0</h2>\n<p>{escape(memory_in_words(result))}</p>",
        key(KINDS_FROM_BELOW),
        memory_picture(result.memory, result.places, result.predicted_peak),
    ]


def in_words(result: Result) -> str:
    """The shape of the run in a sentence."""
    shape, model = result.shape, result.model
    strategy = "One process"
    if shape.processes > 1:
        strategy = f"DDP: {shape.processes} processes with a whole model each"
    if shape.is_fsdp:
        strategy = f"FSDP: {shape.processes} processes with a shard of the model each"
        if shape.shards == 1:
            strategy = f"{shape.processes} processes with a part of the model each"
    if shape.is_fsdp and shape.copies > 1:
        strategy = (
            f"Hybrid sharding: {shape.copies} groups of {shape.processes // shape.copies} "
            "processes, each group with a whole model"
        )
    if shape.context > 1:
        strategy += f", each sequence shared by {shape.context} processes"
    if shape.tensor > 1:
        strategy += f", each matrix shared by {shape.tensor} processes"
    precision = "float32" if shape.precision == "no" else shape.precision
    precision += "" if shape.fp8 is None else f" with products in fp8 ({shape.fp8})"
    return (
        f"{strategy}; {shape.device}, {precision}. {model.n_layer} layers, {model.n_embd} wide, "
        f"{result.weights / MEGABYTE:,.2f} MB of weights. In a step, each process accumulates "
        f"{result.accumulation} x {result.micro_batch_size} sequences."
    )


def traffic_table(result: Result, rows: list[Row]) -> str:
    """The traffic of a step, and the part that one process sends on a ring."""
    cells = []
    for row in rows:
        sent = f"{sent_share(row.kind, result.shape) * row.counted:,.0f}"
        cells.append(
            (
                row.kind,
                row.calls,
                f"{row.counted:,}",
                "" if row.predicted is None else f"{row.predicted:,.0f}",
                "" if row.ratio is None else f"{row.ratio:.4f}",
                sent if row.kind in result.predicted_traffic and row.kind != NORM else "",
                f"{row.milliseconds:.2f}",
                f"{row.overlapped:.0%}",
            )
        )
    heads = ["collective", "calls", "bytes, counted", "predicted", "ratio"]
    heads += ["sent by a process on a ring", "ms", "while computing"]
    return table("Collectives of a step", heads, cells)


def bucket_section(result: Result, step: Process) -> list[str]:
    """DDP's buckets: their parameters, and how much of their time overlaps with computing."""
    sent = [bucket for bucket in step.collectives if bucket.part == BACKWARD]
    if not result.buckets:
        return []
    rows = []
    for names, bucket in zip(result.buckets, sent[-len(result.buckets) :], strict=True):
        named = f"{names[0]} ... {names[-1]}" if len(names) > 2 else ", ".join(names)
        took = (bucket.end - bucket.start) / 1e3
        rows.append(
            (f"{bucket.size:,}", len(names), named, f"{took:.2f}", f"{bucket.overlapped:.0%}")
        )
    heads = ("bytes", "parameters", "from the last to the first", "ms", "while computing")
    return ["<h2>DDP's buckets</h2>", table("Buckets", heads, rows)]


def order_section(result: Result, step: Process) -> list[str]:
    """The collectives of a micro-batch in the order of their calls, and who takes part."""
    found = meetings(step)
    if not found:
        return []
    shape = result.shape
    label = "Collectives in order, and the processes that meet"
    most = diagrams.MOST_RANKS
    drawn = f", of the first {most} processes" if shape.processes > most else ""
    return [
        "<h2>Collectives in the order of their calls</h2>",
        "<p>Those of process 0, from the last forward pass of the step on. Bytes are of the full "
        f"tensors of all calls in a row. A line joins the processes that meet{drawn}.</p>",
        diagrams.order_diagram(found, lambda kind: groups_of(kind, shape), shape.processes, label),
    ]


def share_sections(result: Result, held: dict[int, dict[str, Any]]) -> list[str]:
    """What each process has of the matrices and of a sequence."""
    shape, sharing = result.shape, result.shape.context * result.shape.tensor
    found = [
        "<h2>What each process has of the model</h2>",
        "<p>Outputs downwards, inputs to the right. Parts of a matrix are to scale; matrices are "
        "not to each other.</p>",
        diagrams.owners_key(shape.processes),
        diagrams.matrix_diagram(
            parts.matrices(held), len(held), "Parts of each matrix, by process"
        ),
    ]
    if (shares := parts.shares(held, sharing)) is not None:
        words = "All processes share each sequence."
        if sharing < shape.processes:
            words = f"Processes 0 to {sharing - 1} share a sequence, and so do the next {sharing}."
        found += [
            "<h2>What each process has of a sequence</h2>",
            f"<p>{words}</p>",
            diagrams.owners_key(sharing),
            diagrams.sequence_diagram(
                shares, sharing, "Positions between layers and in attention, by process"
            ),
        ]
    return found


def accumulation_in_words(result: Result, rows: list[Row]) -> str:
    """The additional or the saved traffic of gradient accumulation."""
    times = result.accumulation
    if times == 1:
        return "The step has one micro-batch: nothing accumulates."
    if result.shape.is_fsdp and result.shape.shards == 1:
        return (
            f"The step has {times} micro-batches. Each sends what layers pass on, and gradients "
            "are added up after the last."
        )
    if result.shape.is_fsdp and not result.shape.sync_each:
        return (
            f"The step has {times} micro-batches. FSDP gathers weights in the first and reduces "
            "gradients in the last (run.sync_each_micro_batch=false): both are whole in between."
        )
    if result.shape.is_fsdp:
        return (
            f"The step has {times} micro-batches, and FSDP sends after each of them. Otherwise "
            "every process would hold the gradients of the whole model "
            "(run.sync_each_micro_batch=false)."
        )
    size = sum(row.counted for row in rows if row.kind == "all-reduce")
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
