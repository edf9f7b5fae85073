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
from typing import Annotated, Any, get_type_hints

from model.frozen import KINDS
from snapshot.disk.folder import (
    LARGEST_STEP,
    SNAPSHOT_NAME,
    between,
    matches,
    read_json,
    step_of,
)
from snapshot.errors import SnapshotError

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
SOURCE = {
    "source": str,
    "revision": (None, re.compile("[0-9a-f]{40}")),
    **dict.fromkeys(("epoch", "window", "row", "token", "blocks"), range(2**40)),
}
TEXT = (None, str)


@dataclass
class RunState:
    """`state.json`. All randomness follows from seed and step, so it holds no generator state.

    Behind each type that is not plain is what the value in a file `matches`.
    """

    run_id: str
    attempt_id: str
    step: Annotated[int, STEPS[1:]]
    epoch: Annotated[int, STEPS]
    seed: Annotated[int, range(2**32)]
    best_loss: Annotated[float | None, (None, between(-sys.float_info.max, sys.float_info.max))]
    """The lowest held-out loss before this snapshot, nats per token."""
    config: Annotated[dict[str, Any], dict]
    data: Annotated[dict[str, Any], dict]
    """name, fingerprint, characters, vocabulary, unit, held_out_tokens, held_out_bytes."""
    origin: Annotated[str | None, TEXT] = None
    """Manifest sha256 of the snapshot of another run that this run started from."""
    loss_scaler: Annotated[dict[str, float] | None, (None, SCALER)] = None
    """State of fp16's GradScaler; None in other precisions."""
    skipped_steps: Annotated[int, STEPS] = 0
    """Steps so far whose update the loss scaler skipped because a gradient overflowed."""
    computed_on: Annotated[str | None, TEXT] = None
    """Processes, device, precision and torch of the attempt: the last bits depend on them."""
    rows: Annotated[str | None, (None, SEVERAL, ONE)] = None
    """What a row of documents holds: SEVERAL or ONE; None before the first step."""
    frozen_dtype: Annotated[str | None, (None, *KINDS)] = None
    """How frozen weights are kept; None where all are trained."""
    base: Annotated[str | None, TEXT] = None
    """The model that the run began from: repo@commit or folder; None for random weights."""
    base_config: Annotated[dict[str, Any] | None, (None, dict)] = None
    """Its config.json, of a run that trains adapters; other snapshots have a config.json."""
    base_digest: Annotated[str | None, TEXT] = None
    """`snapshot.disk.load.digest_of` its weights, of a run that trains adapters."""
    stream: Annotated[list[dict[str, Any]] | None, (None, [SOURCE])] = None
    """Of each source of a streamed text: source, revision, epoch, window, row, token, blocks."""

    def update_best_loss(self, loss: float) -> None:
        """Record a held-out loss, if it is the lowest so far."""
        self.best_loss = loss if self.best_loss is None else min(loss, self.best_loss)


def versions() -> dict[str, str]:
    """Versions of the packages in use, for information: nothing depends on them."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def read_state(folder: Path) -> RunState:
    """Read `state.json` of a verified snapshot. Raises SnapshotError if it is not valid."""
    content = read_json(folder / STATE)
    found = content.get("format_version") if isinstance(content, dict) else None
    if type(found) is int and found == 1:
        raise SnapshotError(
            f"{folder} was written by 0.1.0: train on from its weights with "
            f"model.pretrained={folder}"
        )
    if type(found) is not int or found != FORMAT_VERSION:
        raise SnapshotError(
            f"{folder} has format version {found}; this program reads version {FORMAT_VERSION}"
        )
    hints = get_type_hints(RunState, include_extras=True)
    for name, hint in hints.items():
        if not matches(content.get(name), getattr(hint, "__metadata__", [hint])[0]):
            raise SnapshotError(f"{folder}/{STATE} has no valid {name}")
    state = RunState(**{name: content.get(name) for name in hints})
    if SNAPSHOT_NAME.fullmatch(folder.name) and step_of(folder) != state.step:
        raise SnapshotError(f"{folder} holds step {state.step}, not the step of its name")
    return state


def token_unit(data: Mapping[str, Any]) -> str:
    """The name of a token: character, or token."""
    return "token" if data.get("unit") == "token" else "character"


def loss_in_words(data: Mapping[str, Any], loss: float) -> str:
    """A loss in nats per token, and in bits per byte of the raw text where that is known."""
    words = f"{loss:.4f} nats per {token_unit(data)}"
    tokens: Any = data.get("held_out_tokens")
    size: Any = data.get("held_out_bytes")
    if matches([tokens, size], [range(1, 2**63)]):
        words += f", {loss / math.log(2) * tokens / size:.4f} bits per byte"
    return words


def lost_facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A row of the model card: what of the text its tokens do not hold, if that is known."""
    lost = data.get("lost")
    return [("not in the tokens", lost)] if isinstance(lost, str) else []
