"""What all measurements of benchmarks/gpu.py share: the shape, the vocabulary, the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness import SHAPES, overrides

Row = dict[str, Any]
"""The cells of a row of a table, by their headers."""
VOCABULARY = 50_304
"""GPT-2's 50,257, rounded up to a multiple of 64 as nanoGPT does: tensor cores need multiples."""
REHEARSED = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "batch": 4}


@dataclass(frozen=True)
class Settings:
    """Of the whole command."""

    folder: str
    """For texts, runs and logs."""
    nanogpt: str | None = None
    """A checkout of nanoGPT."""
    rehearse: bool = False
    """Tiny shapes on the CPU instead of GPT-2 on a GPU."""

    @property
    def shape(self) -> dict[str, int]:
        return REHEARSED if self.rehearse else SHAPES["gpt2"]

    @property
    def vocabulary(self) -> int:
        return 512 if self.rehearse else VOCABULARY

    @property
    def backend(self) -> str:
        """The compiler; in a rehearsal one that only traces, because inductor takes minutes."""
        return "aot_eager" if self.rehearse else "inductor"

    @property
    def seconds(self) -> float:
        """How long an in-process measurement takes, without its warm-up."""
        return 0.2 if self.rehearse else 3.0

    def words(self, batch: int | None = None) -> tuple[str, ...]:
        """The overrides of train.py for the main shape."""
        return tuple(overrides({**self.shape, "batch": batch or self.shape["batch"]}))

    def preset(self, name: str, batch: int, checkpointing: bool | str) -> tuple[str, ...]:
        """The overrides of train.py for a preset; in a rehearsal for the tiny shape."""
        words = (f"model={name}", "model.dropout=0.0", "data.block_size=1024")
        words += (f"train.global_batch_size={batch}",)
        words = self.words(2) if self.rehearse else words
        return (*words, f"model.activation_checkpointing={str(checkpointing).lower()}")
