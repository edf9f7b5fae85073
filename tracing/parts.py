"""What each process has of the model's matrices and of a sequence, as it says itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model.family import LanguageModel
from model.sharded import Cut, cut_of, pieces_of, whole_shape

Range = tuple[int, int]
"""The first of some numbers, and the one after the last."""
REST = "the rest"
"""The group of matrices that are in no block."""
Block = tuple[Range, ...]
"""A part of a tensor: a range for each dimension."""


@dataclass(frozen=True)
class Matrix:
    """A parameter, or several blocks' parameters of this name."""

    name: str
    shape: tuple[int, ...]
    joined: int
    """The equal matrices that it joins along its first dimension."""
    owners: dict[Block, list[int]]
    """By part, the processes that have it."""


@dataclass(frozen=True)
class Shares:
    """What the processes that share a sequence have of it."""

    length: int
    heads: int
    between: dict[Range, list[int]]
    """By a range of positions, the processes that have it between the layers."""
    attention: dict[tuple[Range, Range], list[int]]
    """By ranges of heads and of positions, the processes that compute these queries."""


def held_by(model: LanguageModel, block_size: int) -> dict[str, Any]:
    """What this process has, for JSON: by group of matrices and name, shape, joins and parts."""
    known: dict[str, dict[str, Any]] = {}
    blocks = [dict(block.named_parameters()) for block in model.blocks]
    inside = {one for block in blocks for one in block.values()}
    ends = {name: one for name, one in model.named_parameters() if one not in inside}
    seen: dict[str, int] = {}
    for number, block in enumerate(blocks):  # alike, or of a few kinds
        seen.setdefault(str([(name, whole_shape(one)) for name, one in block.items()]), number)
    for number in seen.values():
        title = "each block" if len(seen) == 1 else f"block {number}"
        known[title] = {name: _described(model, name, one) for name, one in blocks[number].items()}
    known[REST] = {name: _described(model, name, one) for name, one in ends.items()}
    return {"matrices": known, **_positions(model, block_size)}


def _described(model: LanguageModel, name: str, parameter: nn.Parameter) -> dict[str, Any]:
    cut = cut_of(parameter)
    joined = model.joined.get(name.split(".")[-2] if "." in name else "", 1)
    return {
        "shape": whole_shape(parameter),
        "joined": joined if cut is None or cut.dim != 0 else cut.joined,
        "parts": [[_range(one) for one in piece.whole] for piece in pieces_of(parameter)],
    }


def _positions(model: LanguageModel, block_size: int) -> dict[str, Any]:
    """The positions of a sequence that this process has in training, and its heads of attention."""
    context, tensors, heads = model.context, model.tensors, model.config.n_head
    places = torch.arange(block_size)[None]
    places = places if context is None else context.own(places)
    own, queries = slice(0, heads), [(0, block_size)]
    if tensors is not None:
        if model.shares_positions:
            places = places.chunk(tensors.size, dim=1)[tensors.rank]
        # Some plans of transformers gather what a cut layer returns: attention is then whole.
        if not any("gather" in ways for name, ways in model.tensor_plan.items() if "*" in name):
            (own,) = Cut((heads,), tensors.group, 0).ranges()
    if context is not None:
        stretches = context.stretches(block_size)
        queries = _ranges(n for one in stretches for n in range(one.start, one.stop))
        if context.by_heads:
            (part,) = Cut((own.stop - own.start,), context.group, 0).ranges()
            own = slice(own.start + part.start, own.start + part.stop)
    return {
        "length": block_size,
        "heads": heads,
        "between": _ranges(places[0].tolist()),
        "attention": [[_range(own), one] for one in queries],
        "shared": context is not None or tensors is not None,
    }


def _range(one: slice) -> Range:
    return one.start, one.stop


def _ranges(numbers: Iterable[int]) -> list[Range]:
    """Ascending numbers as ranges."""
    found: list[Range] = []
    for one in numbers:
        if found and found[-1][1] == one:
            found[-1] = found[-1][0], one + 1
        else:
            found.append((one, one + 1))
    return found


def matrices(held: dict[int, dict[str, Any]]) -> dict[str, list[Matrix]]:
    """The matrices by group, from what each process has (`held_by`) by its rank."""
    groups: dict[str, list[Matrix]] = {}
    for title, named in next(iter(held.values()))["matrices"].items():
        for name, one in named.items():
            parts = ((rank, its["matrices"][title][name]["parts"]) for rank, its in held.items())
            owners = _owners(parts)
            matrix = Matrix(_short(name), tuple(one["shape"]), one["joined"], owners)
            groups.setdefault(title, []).append(matrix)
    return groups


def shares(held: dict[int, dict[str, Any]], sharing: int) -> Shares | None:
    """How the first `sharing` processes share a sequence; None if each has sequences of its own."""
    first = next(iter(held.values()))
    if not first["shared"]:
        return None
    some = {rank: one for rank, one in held.items() if rank < sharing}
    between = _owners((rank, [[part] for part in one["between"]]) for rank, one in some.items())
    attention = _owners((rank, one["attention"]) for rank, one in some.items())
    return Shares(
        first["length"],
        first["heads"],
        {part: ranks for (part,), ranks in between.items()},
        {(heads, queries): ranks for (heads, queries), ranks in attention.items()},
    )


def _owners(parts: Iterable[tuple[int, Any]]) -> dict[Block, list[int]]:
    """The processes by their parts; JSON has lists in place of tuples."""
    owners: dict[Block, list[int]] = {}
    for rank, some in parts:
        for part in some:
            owners.setdefault(tuple((begin, end) for begin, end in part), []).append(rank)
    return owners


def _short(name: str) -> str:
    """A parameter's name without what the names around it say as well."""
    words = [word for word in re.sub(r"\.weight$", "", name).split(".") if word != "default"]
    return re.sub(r"^(transformer|model|lm)\.", "", ".".join(words[-2:]))
