"""The collectives of a step in the order of their calls, and the processes that meet."""

from __future__ import annotations

import pytest

from planning.allocation_log import BETWEEN_COPIES, NORMS, OF_CONTEXT, OF_TENSORS, OF_VOCABULARY
from planning.estimate import groups_of, sent_share
from planning.fake_trace import Shape
from tracing.order import Meeting, meetings
from tracing.spans import Collective, Process, Span

GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"


def called(kind: str, at: float, part: str, size: int = 8, carries: str = "") -> Collective:
    """A collective called at a time, which takes place later."""
    return Collective(kind, at + 50, at + 60, at, size, True, part, carries, 0.0)


def step_of(*collectives: Collective) -> Process:
    """A step of two micro-batches and two blocks, 100 microseconds a pass."""
    names = ("forward", "backward", "forward", "backward", "clip", "update")
    parts = [Span(name, 100 * n, 100 * n + 100) for n, name in enumerate(names)]
    orders = ((0, 1), (1, 0), (0, 1), (1, 0))
    blocks = [
        Span(f"block {block}", 100 * n + 20 + 30 * place, 100 * n + 50 + 30 * place)
        for n, order in enumerate(orders)
        for place, block in enumerate(order)
    ]
    return Process(0, [Span("step 1", 0, 600)], parts, blocks, list(collectives))


def test_the_last_micro_batch_stands_for_all_and_alike_blocks_are_one_row():
    found = meetings(
        step_of(
            called(GATHER, 5, "forward", carries="h.0"),
            called(GATHER, 205, "forward", 4, "outside the blocks"),
            called(GATHER, 206, "forward", carries="h.0"),
            called(OF_CONTEXT["all_gather_into_tensor"], 225, "forward", 16),
            called(GATHER, 226, "forward", carries="h.1"),  # ahead of time
            called(OF_CONTEXT["all_gather_into_tensor"], 255, "forward", 16),
            called(REDUCE, 410, "clip"),
        )
    )
    keys = OF_CONTEXT["all_gather_into_tensor"]
    assert found == [
        Meeting("forward", "before the blocks", GATHER, 1, 4),
        Meeting("forward", "each of blocks 0 to 1", GATHER, 1, 8),
        Meeting("forward", "each of blocks 0 to 1", keys, 1, 16),
        Meeting("clip", "", REDUCE, 1, 8),
    ]


def test_the_head_comes_before_the_blocks_though_a_block_was_gathered_ahead():
    outputs = OF_TENSORS["reduce_scatter_tensor"]
    found = meetings(
        step_of(
            called(GATHER, 305, "backward", carries="model.layers.1"),
            called(outputs, 310, "backward"),
            called(outputs, 330, "backward"),
            called(outputs, 360, "backward"),
            called(GATHER, 385, "backward"),
        )
    )
    places = [(one.place, one.kind) for one in found]
    assert places == [
        ("before the blocks", outputs),
        ("block 1", GATHER),
        ("block 1", outputs),
        ("block 0", outputs),
        ("after the blocks", GATHER),
    ]


def test_calls_of_a_kind_in_a_row_are_added_up():
    found = meetings(step_of(*(called(REDUCE, 310 + n, "backward", 8 + n) for n in range(3))))
    assert found == [Meeting("backward", "", REDUCE, 3, 27)]  # DDP's buckets are of no block


COLUMNS = [[0, 4], [1, 5], [2, 6], [3, 7]]
GROUPS = [
    (Shape("cpu", "no", 2), REDUCE, [[0, 1]]),
    (Shape("cpu", "no", 4, 2), GATHER, [[0, 1], [2, 3]]),
    (Shape("cpu", "no", 4, 2), REDUCE, [[0, 2], [1, 3]]),
    (Shape("cpu", "no", 8, 4, context=2, tensor=2), GATHER, [[0, 2, 4, 6], [1, 3, 5, 7]]),
    (
        Shape("cpu", "no", 8, 4, context=2, tensor=2),
        OF_CONTEXT["reduce_scatter_tensor"],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
    ),
    *(
        (
            Shape("cpu", "no", 8, 4, context=2, tensor=2),
            kind,
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        )
        for kind in (OF_TENSORS["all_gather_into_tensor"], OF_VOCABULARY, NORMS)
    ),
    (Shape("cpu", "no", 8, 2, tensor=2), BETWEEN_COPIES, COLUMNS),
    (Shape("cpu", "no", 4, 2, tensor=2), "all-to-all", [[0, 1, 2, 3]]),
]
"""By hand, in a mesh of copies, shards, processes of a sequence and of a matrix, the last first."""


@pytest.mark.parametrize(("shape", "kind", "groups"), GROUPS)
def test_who_meets_and_what_of_it_one_sends(shape, kind, groups):
    assert groups_of(kind, shape) == groups
    size = len(groups[0])
    times = 2 if kind.startswith(REDUCE) else 1
    assert sent_share(kind, shape) == times * (size - 1) / size
