"""Writes the table of docs/performance.md from the JSON files in benchmarks/results.

    python benchmarks/page.py

A benchmark writes its JSON with the machine, the commit and its command; this makes the page say
what they say. A test fails where the page differs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from harness import RESULTS, ROOT, SHAPES, flops_per_token, markdown_table, median

PAGE = ROOT / "docs/performance.md"
BEGIN = "<!-- begin of python benchmarks/page.py -->\n"
END = "<!-- end of python benchmarks/page.py -->\n"


class Row(NamedTuple):
    """A line of the table."""

    what: str
    source: str
    """The name of the JSON file."""
    figure: Callable[[Any], str]
    """Of the figures in the file."""


def contestant(figures: Any, shape: str, name: str) -> Any:
    return next(one for one in figures[shape] if one["name"] == name)


def times(name: str) -> Callable[[Any], str]:
    """Relative to a contestant, at the larger and the smaller shape."""

    def figure(figures: Any) -> str:
        large, small = (
            median(contestant(figures, shape, name)["ratios"]) for shape in ("large", "small")
        )
        return f"{large:.2f} and {small:.2f} times"

    return figure


def share_of_product(figures: Any) -> str:
    shares = []
    for shape in ("large", "small"):
        ours, product = (contestant(figures, shape, name) for name in ("train.py", "product"))
        tokens = SHAPES[shape]["batch"] * SHAPES[shape]["block_size"]
        reached = tokens * flops_per_token(ours["parameters"], SHAPES[shape])
        reached /= median(ours["seconds"])
        shares.append(reached / (product["flops"] / median(product["seconds"])))
    return f"{shares[0]:.0%} and {shares[1]:.0%}"


def two_processes(figures: Any) -> str:
    (ddp,) = (one for one in figures if one["name"] == "DDP on 2")
    return f"{median(ddp['faster']):.2f} times"


def cost_of_snapshots(figures: Any) -> str:
    """Of a turn of `every` steps with one snapshot, scaled to one in 100 steps."""
    pairs = list(zip(*figures["seconds"], strict=True))
    cost = sum(a - b for a, b in pairs) / len(pairs)
    share = cost / (sum(b for _, b in pairs) / len(pairs)) * figures["every"] / 100
    return f"{share:.1%} of the time, {cost:.2f} s each"


def preparation(figures: Any) -> str:
    most = max(figures, key=lambda one: one["megabytes"])
    fastest = max(most["prepared"].values(), key=lambda one: one["megabytes_per_second"])
    added = (fastest["peak_mb"] - fastest["imports_mb"]) / 1e3
    return (
        f"{most['megabytes'] / 1e3:g} GB: {fastest['megabytes_per_second']:.0f} MB/s, "
        f"{added:.1f} GB of memory in addition to the imports"
    )


def time_to_loss(name: str, other: str) -> Callable[[Any], str]:
    """Of a recipe, relative to another one, over the same seeds."""

    def figure(figures: Any) -> str:
        ours, theirs = (list(zip(*figures["found"][one], strict=True)) for one in (name, other))
        share = median([a / b for a, b in zip(ours[0], theirs[0], strict=True)])
        losses = [sum(found[1]) / len(found[1]) for found in (ours, theirs)]
        return f"{share:.2f} of its time, to {losses[0]:.3f} and {losses[1]:.3f} nats"

    return figure


def loader(figures: Any) -> str:
    shares = []
    for kind in ("cold, tokens/s", "warm, tokens/s"):
        ours, *others = (one[kind] for one in figures)
        shares.append(f"{kind.partition(',')[0]} {ours / max(others):.2f} times")
    return ", ".join(shares)


def large_snapshot(figures: Any) -> str:
    speed = {
        way: figures["bytes"] / 1e9 / median(of["durable"])
        for way, of in figures["figures"].items()
    }
    disk = figures["bytes"] / 1e9 / median(figures["dd"])
    others = f"dd {disk:.2f}, torch.distributed.checkpoint {speed['async_save']:.2f}"
    return f"{figures['bytes'] / 1e9:.1f} GB: {speed['shards']:.2f} GB/s ({others})"


def start(figures: Any) -> str:
    return ", ".join(f"{case}: {median(seconds):.1f} s" for case, seconds in figures.items())


ROWS = (
    Row(
        "tokens/s relative to nanoGPT's model and step, both in float32, at 10.7 and 0.8 million "
        "parameters",
        "throughput-no",
        times("nanogpt no"),
    ),
    Row("the same, both in bf16", "throughput-bf16", times("nanogpt bf16")),
    Row(
        "the same, relative to a bare loop with the same model, in bf16",
        "throughput-bf16",
        times("bare loop"),
    ),
    Row(
        "share of the machine's limit, a bare matrix product in bf16",
        "throughput-bf16",
        share_of_product,
    ),
    Row(
        "two processes under DDP, one thread each, relative to one",
        "scaling",
        two_processes,
    ),
    Row("a snapshot of 129 MB every 100 steps", "snapshots-disk", cost_of_snapshots),
    Row(
        "a large snapshot of two processes under FSDP",
        "snapshots-shards-gpt2_large",
        large_snapshot,
    ),
    Row("preparing a text", "data", preparation),
    Row(
        "batches of a streamed data set, relative to the best of datasets, litdata and "
        "mosaicml-streaming",
        "streaming_loader",
        loader,
    ),
    Row(
        "Tiny Shakespeare, whole commands, relative to the widely used recipe",
        "time_to_loss",
        time_to_loss("shakespeare_char_cpu", "shakespeare_char_cpu_reference"),
    ),
    Row(
        "the same, relative to the best recipe that was found with AdamW",
        "time_to_loss",
        time_to_loss("shakespeare_char_cpu", "the best one found with AdamW"),
    ),
    Row(
        "the same, relative to the recipe and the code of 2026-11-23",
        "time_to_loss-before",
        time_to_loss("shakespeare_char_cpu", "before"),
    ),
    Row(
        "the first command of the README, relative to 2,000 steps of AdamW",
        "time_to_loss-docs",
        time_to_loss("the default run", "AdamW"),
    ),
    Row("from the launch to the first step", "startup", start),
)


def table() -> str:
    """The lines of the table, from the JSON files."""
    lines = []
    for row in ROWS:
        content = json.loads((RESULTS / f"{row.source}.json").read_text())
        machine = content["machine"]
        processor = machine["processor"].partition(" (")[0]
        measured = f"{processor}, {machine['date']}, {machine['commit'].removesuffix('-dirty')}"
        lines.append(
            (row.what, row.figure(content["figures"]), measured, f"`{content['command']}`")
        )
    return markdown_table(("what", "figure", "measured on", "command"), lines)


def with_table(page: str) -> str:
    """The page with the table of the JSON files."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, "the page has no markers"
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
