"""`state.json`: what a run resumes with besides its tensors, and what that says about its text."""

from __future__ import annotations

import math
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from model.frozen import KINDS
from model.kernels import KERNEL, KERNELS
from snapshot.disk.folder import (
    LARGEST_STEP,
    SNAPSHOT_NAME,
    between,
    matches,
    read_json,
    step_of,
)
from snapshot.errors import SnapshotError, WrittenBefore

STATE = "state.json"
FORMAT_VERSION = 2
PACKAGES = ("torch", "accelerate", "datasets", "safetensors", "tokenizers", "numpy")
SEVERAL, ONE = "several", "one"
"""Documents in a row."""
STEPS = range(LARGEST_STEP + 1)
FACTOR = between(0, 2.0**127)
"""Of a loss scaler, whose numbers become tensors of 32 bits."""
SCALER = {
    **dict.fromkeys(("scale", "growth_factor", "backoff_factor"), FACTOR),
    **dict.fromkeys(("growth_interval", "_growth_tracker"), range(2**31)),
}
CURSOR = ("epoch", "window", "row", "token", "blocks")
SOURCE = {
    "source": str,
    "revision": (None, re.compile("[0-9a-f]{40}")),
    **dict.fromkeys(CURSOR, range(2**40)),
}
TEXT = (None, str)
SHAPES = {
    **dict.fromkeys(("run_id", "attempt_id"), str),
    **dict.fromkeys(("epoch", "skipped_steps"), STEPS),
    "step": STEPS[1:],
    "seed": range(2**32),
    "best_loss": (None, between(-sys.float_info.max, sys.float_info.max)),
    **dict.fromkeys(("config", "data"), dict),
    "loss_scaler": (None, SCALER),
    "attention": (None, KERNEL, "products", *KERNELS),  # products: once that of a CPU
    "rows": (None, SEVERAL, ONE),
    "frozen_dtype": (None, *KINDS),
    **dict.fromkeys(("origin", "computed_on", "base", "base_digest"), TEXT),
    "base_config": (None, dict),
    "stream": (None, [SOURCE]),
}
"""Of the fields of `state.json`, for `matches`."""


@dataclass
class RunState:
    """`state.json`. All randomness follows from seed and step, so it holds no generator state."""

    run_id: str
    attempt_id: str
    step: int
    epoch: int
    seed: int
    best_loss: float | None
    """The lowest held-out loss before this snapshot, nats per token."""
    config: dict[str, Any]
    data: dict[str, Any]
    """name, fingerprint, characters, vocabulary, unit, held_out_tokens, held_out_bytes."""
    origin: str | None = None
    """Manifest sha256 of the snapshot of another run that this run started from."""
    loss_scaler: dict[str, float] | None = None
    """State of fp16's GradScaler; None in other precisions."""
    skipped_steps: int = 0
    """Steps so far whose update the loss scaler skipped because a gradient overflowed."""
    computed_on: str | None = None
    """Processes, device, precision and torch of the attempt: the last bits depend on them."""
    attention: str | None = None
    """The kernel on CUDA, as `run.attention` names it; None where that was never chosen."""
    rows: str | None = None
    """What a row of documents holds: SEVERAL or ONE; None before the first step."""
    frozen_dtype: str | None = None
    """How frozen weights are kept; None where all are trained."""
    base: str | None = None
    """The model that the run began from: repo@commit or folder; None for random weights."""
    base_config: dict[str, Any] | None = None
    """Its config.json, of a run that trains adapters; other snapshots have a config.json."""
    base_digest: str | None = None
    """`snapshot.base.digest_of` its weights, of a run that trains adapters."""
    stream: list[dict[str, Any]] | None = None
    """Of each source of a streamed text: source, revision, epoch, window, row, token, blocks."""

    def update_best_loss(self, loss: float) -> None:
        """Record a held-out loss, if it is the lowest so far."""
        self.best_loss = loss if self.best_loss is None else min(loss, self.best_loss)


def versions() -> dict[str, str]:
    """Versions of the packages in use, for information: nothing depends on them."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def read_state(folder: Path) -> RunState:
    """Read `state.json` of a verified snapshot. Raises SnapshotError if it is not valid."""
    state = state_in(read_json(folder / STATE), str(folder))
    if SNAPSHOT_NAME.fullmatch(folder.name) and step_of(folder) != state.step:
        raise SnapshotError(f"{folder} holds step {state.step}, not the step of its name")
    return state


def state_in(content: Any, folder: str) -> RunState:
    """The content of `state.json`. Raises SnapshotError, which names `folder`, if it is invalid."""
    found = content.get("format_version") if isinstance(content, dict) else None
    if type(found) is int and found == 1:
        raise WrittenBefore(
            f"{folder} was written by 0.1.0: train on from its weights with "
            f"model.pretrained={folder}"
        )
    if type(found) is not int or found != FORMAT_VERSION:
        raise SnapshotError(
            f"{folder} has format version {found}; this program reads version {FORMAT_VERSION}"
        )
    for name, shape in SHAPES.items():
        if not matches(content.get(name), shape):
            raise SnapshotError(f"{folder}/{STATE} has no valid {name}")
    state = RunState(**{name: content[name] for name in SHAPES})
    if state.skipped_steps > state.step:
        raise SnapshotError(f"{folder}/{STATE} has no valid skipped_steps")
    return state


def token_unit(data: Mapping[str, Any]) -> str:
    """The name of a token: character, or token."""
    return "token" if data.get("unit") == "token" else "character"


def bits_per_byte(data: Mapping[str, Any], loss: float) -> float | None:
    """A held-out loss in nats per token, as bits per byte of the raw text; None if unknown."""
    tokens, size = data.get("held_out_tokens"), data.get("held_out_bytes")
    if not all(type(number) is int and 0 < number < 2**63 for number in (tokens, size)):
        return None  # not an honest one
    assert tokens is not None
    assert size is not None
    return loss / math.log(2) * tokens / size


def loss_in_words(data: Mapping[str, Any], loss: float) -> str:
    """A loss in nats per token; for characters in bits per character, too; and in bits per byte."""
    unit, per_byte = token_unit(data), bits_per_byte(data, loss)
    parts = [f"{loss:.4f} nats per {unit}"]
    if unit == "character":
        parts.append(f"{loss / math.log(2):.4f} bits")
    if per_byte is not None:
        parts.append(f"{per_byte:.4f} bits per byte")
    return ", ".join(parts)


def lost_facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A row of the model card: what of the text its tokens do not hold, if that is known."""
    lost = data.get("lost")
    return [("not in the tokens", lost)] if isinstance(lost, str) else []
