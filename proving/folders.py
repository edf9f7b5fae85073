"""Snapshots: the same bits after a kill, whole, without code, and the same model elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from model.families import build_empty
from proving.lines import Line, passed, unchecked, within
from snapshot.comparison import TOLERANCE as WIDER
from snapshot.comparison import OtherModel, compare_logits
from snapshot.disk.checking import check_model, check_snapshot
from snapshot.disk.folder import manifest_entries
from snapshot.disk.load import restore_weights
from snapshot.errors import SnapshotError

CAUSAL = 1e-5
"""Of the largest logit: a batched product of other rows rounds otherwise."""
ENLARGED = 5.0
"""New matrices get about the size of trained ones, so that activations are no straight lines."""
TOLERANCE = 1e-5
"""Of the largest logit of an enlarged model. Another activation makes 1e-4, rounding 1e-6."""
TOKENS = 64
PLAIN = (".safetensors", ".json", ".jinja", ".txt", ".model")
"""File extensions of data; none of them is executed when it is read."""


def same_bits(name: str, one: Path, other: Path, said: str) -> Line:
    """Weights and optimizer state of two snapshots, by the digests of their files."""
    try:
        first, second = (tensors_of(folder) for folder in (one, other))
    except (OSError, SnapshotError) as error:
        return passed(name, False, f"there is no whole snapshot: {error}")
    differing = sorted(path for path in first if first[path] != second.get(path))
    if differing or first.keys() != second.keys():
        return passed(name, False, f"{(differing or ['a file'])[0]} differs; {said}")
    size = sum(size for size, _ in first.values())
    return passed(name, True, f"{size / 1e6:,.1f} MB of weights and optimizer state: {said}")


def tensors_of(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and digest of the tensor files of a snapshot."""
    check_snapshot(folder)
    entries = manifest_entries(folder)
    return {path: entry for path, entry in entries.items() if path.endswith(".safetensors")}


def room(folder: Path, keep: int) -> Line:
    """The size of a snapshot beside the free disk."""
    try:
        size = sum(size for size, _ in manifest_entries(folder).values())
    except (OSError, SnapshotError) as error:
        return passed("disk", False, f"there is no whole snapshot: {error}")
    free = shutil.disk_usage(folder).free
    said = f"{keep + 1} snapshots of {in_gigabytes(size)} (snapshot.keep and a new one); "
    return passed("disk", free > (keep + 1) * size, f"{said}{in_gigabytes(free)} are free")


def in_gigabytes(size: int) -> str:
    """'0.007 GB', '12.3 GB'."""
    return f"{size / 1e9:,.1f} GB" if size > 1e9 else f"{size / 1e9:,.3f} GB"


def contents(folder: Path, is_new: bool) -> Iterator[Line]:
    """A snapshot as others find it: whole, without code, the same model for transformers.

    `is_new`: it began with random weights.
    """
    try:
        check_snapshot(folder)
    except SnapshotError as error:
        yield passed("snapshot is whole", False, str(error))
        return
    entries = manifest_entries(folder)
    yield passed("snapshot is whole", True, f"{len(entries)} files, digests and headers verified")
    other = sorted(path for path in entries if not path.endswith(PLAIN))
    said = "safetensors, JSON and text alone: nothing can run when it is loaded"
    if other:
        said = f"{other[0]} may run when it is loaded"
    yield passed("no code in it", not other, said)
    yield in_transformers(folder, ENLARGED if is_new else 1.0)
    yield causal(folder)


def in_transformers(folder: Path, times: float) -> Line:
    """The logits that transformers computes, with matrices so many times as large."""
    try:
        found = compare_logits(
            folder, check_model(folder), times, TOLERANCE if times != 1 else WIDER
        )
    except OtherModel as error:
        return passed("loads in transformers", False, str(error))
    if found.startswith("not compared"):
        return unchecked("loads in transformers", found)
    said = f", with matrices {times:g} times as large" if times != 1 else ""
    return passed("loads in transformers", True, f"logits {found}{said}")


@torch.no_grad()
def causal(folder: Path) -> Line:
    """Whether the logits of a position depend on what follows it."""
    sizes = check_model(folder)
    try:
        model = build_empty(sizes).eval()
        restore_weights(folder, model)
    except SnapshotError as error:
        return unchecked("no token sees what follows", str(error))
    length = min(TOKENS, sizes.block_size)
    ids = (torch.arange(length) * 7919 % sizes.vocab_size)[None]  # (1, T)
    changed = ids.clone()
    changed[:, length // 2 :] = (ids[:, length // 2 :] + 1) % sizes.vocab_size
    before, after = (model(one)[:, : length // 2] for one in (ids, changed))
    difference = float((before - after).abs().max() / before.abs().max())
    said = f"logits of {length // 2} tokens, with other tokens after them"
    return within("no token sees what follows", difference, CAUSAL, said)
