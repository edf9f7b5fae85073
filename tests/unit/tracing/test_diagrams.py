"""The diagrams of a trace: to scale, with a line for each group, and readable in both themes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tracing.diagrams import matrix_diagram, order_diagram, owners_key, sequence_diagram
from tracing.drawing import STYLE
from tracing.order import Meeting
from tracing.parts import REST, Matrix, Shares

WEIGHT = Matrix(
    "attn.c_attn",
    (12, 8),
    3,
    {((0, 4), (0, 8)): [0], ((4, 9), (0, 8)): [1], ((9, 12), (0, 8)): [2]},
)
BIAS = Matrix("c_attn.bias", (12,), 3, {((0, 12),): [0, 1, 2]})
EXPERTS = Matrix(
    "experts.down_proj",
    (4, 8, 16),
    1,
    {((0, 2), (0, 8), (0, 16)): [0], ((2, 4), (0, 8), (0, 16)): [1]},
)
HEAD = Matrix("lm_head", (100, 8), 1, {((0, 50), (0, 8)): [0, 1, 2], ((50, 100), (0, 8)): [0, 2]})


def parsed(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture)


def cells(picture: str) -> list[tuple[str, str, float]]:
    """The parts of matrices and sequences: who has them, the colour, and the area."""
    found = []
    for group in parsed(picture).iter("g"):
        if (title := group.find("title")) is not None:
            rect = group.find("rect")
            area = float(rect.get("width")) * float(rect.get("height"))
            found.append((title.text, rect.get("class"), area))
    return found


def texts(picture: str) -> list[str]:
    return [one.text for one in parsed(picture).iter("text")]


def test_parts_of_a_matrix_are_to_scale_and_a_bias_stands_beside_it():
    found = cells(matrix_diagram({"each block": [WEIGHT, BIAS], REST: [HEAD]}, 3, "parts"))
    assert [(who, colour) for who, colour, _ in found] == [
        ("0", "owner0"),
        ("1", "owner1"),
        ("2", "owner2"),
        ("all", "several"),
        ("all", "several"),
        ("0, 2", "several"),
    ]
    first, second, third = (area for *_, area in found[:3])
    assert second / first == pytest.approx(5 / 4, rel=0.02)
    assert third / first == pytest.approx(3 / 4, rel=0.02)
    assert found[4][2] == pytest.approx(found[5][2], rel=0.02)
    picture = texts(matrix_diagram({"each block": [WEIGHT, BIAS]}, 3, "parts"))
    assert {"q", "k", "v", "attn.c_attn", "12 x 8"} <= {*picture}
    assert "c_attn.bias" not in picture


def test_experts_are_drawn_one_by_one():
    found = cells(matrix_diagram({"each block": [EXPERTS]}, 2, "parts"))
    assert [who for who, *_ in found] == ["0", "0", "1", "1"]
    assert len({area for *_, area in found}) == 1


def test_a_sequence_covers_its_length_and_attention_is_causal():
    halves = {(0, 4): [0], (4, 12): [1], (12, 16): [0]}
    attention = {((0, 4), part): ranks for part, ranks in halves.items()}
    picture = sequence_diagram(Shares(16, 4, halves, attention), 2, "a sequence")
    (first, second, third) = (area for *_, area in cells(picture))
    assert first == pytest.approx(third) == pytest.approx(second / 2, rel=0.01)
    assert {"0", "4", "12", "16", "heads 0 to 3"} <= {*texts(picture)}
    areas = {"owner0": 0.0, "owner1": 0.0}
    for one in parsed(picture).iter("polygon"):
        points = [tuple(map(float, point.split(","))) for point in one.get("points").split()]
        turns = zip(points, points[1:] + points[:1], strict=True)
        areas[one.get("class")] += abs(sum(a * d - b * c for (a, b), (c, d) in turns)) / 2
    assert areas["owner0"] == pytest.approx(areas["owner1"], rel=0.01)  # equal work


MEETINGS = [
    Meeting("forward", "block 0", "all-gather", 2, 1234),
    Meeting("backward", "block 0", "all-reduce", 1, 5),
]


def lines(picture: str) -> list[tuple[float, float, float]]:
    """Of each group its height, and the first and the last process."""
    found = [one for one in parsed(picture).iter("line") if one.get("class") == "member"]
    return [tuple(float(one.get(name)) for name in ("y1", "x1", "x2")) for one in found]


def test_a_line_joins_each_group_and_covers_no_other():
    groups = {"all-gather": [[0, 2], [1, 3]], "all-reduce": [[0, 1], [2, 3]]}
    picture = order_diagram(MEETINGS, groups.__getitem__, 4, "collectives")
    crossed, beside = lines(picture)[:2], lines(picture)[2:]
    assert crossed[0][0] != crossed[1][0]
    assert beside[0][0] == beside[1][0]
    assert beside[0][2] < beside[1][1]
    assert len([*parsed(picture).iter("circle")]) == 8
    written = texts(picture)
    assert {"all-gather of weights", "1,234", "all-reduce of gradients"} <= {*written}
    assert written.count("block 0") == 2


def test_of_many_processes_the_first_are_drawn():
    everyone = [[*range(64)]]
    picture = order_diagram(MEETINGS, lambda _: everyone, 64, "collectives")
    assert len([*parsed(picture).iter("circle")]) == 2 * 16
    assert max(float(one.get("cx")) for one in parsed(picture).iter("circle")) < 1000
    assert "process 8" not in owners_key(64)


def test_only_names_in_cells_have_the_colour_of_ink():
    """Others stand on the page, which is dark where the reader wants it so."""
    assert re.findall(r"([^}\n]+)\{ fill: var\(--ink\)", STYLE) == ["svg.lanes .in "]
    picture = matrix_diagram({"each block": [WEIGHT]}, 3, "parts")
    inside = [one.text for one in parsed(picture).iter("text") if one.get("class") == "in"]
    assert inside == ["0", "1", "2"]
