"""The advice of a plan: the fastest strategy that fits, or what to change."""

from __future__ import annotations

from dataclasses import replace

from model.causal_lm import ModelConfig
from planning.fits import GIB, Fit

EXIT_NOTHING_FITS = 3


def within_machine(fits: list[Fit], here: int, memory: int) -> list[Fit]:
    """The strategies, of which offloading fits only if a machine has `memory` bytes for it."""
    return [
        replace(row, fits=False, largest_micro_batch=0)
        if row.on_cpu and here * (row.on_cpu + row.writer) > memory
        else row
        for row in fits
    ]


def advise(
    fits: list[Fit], model: ModelConfig, requested: int | None, chosen: str, here: int
) -> tuple[str, int]:
    """The advice as a sentence, and the exit code. The first strategy that fits is the fastest.

    `requested` is train.micro_batch_size; `chosen` is "=N" for another one, or empty. `here` is the
    number of processes on a machine.
    """
    for row in fits:
        if row.fits:
            words = f" train.micro_batch_size{chosen}" if chosen and requested is None else ""
            config = f"accelerate_configs/{row.strategy.config}"
            command = f"accelerate launch --config_file {config} train.py ...{words}"
            return f"It fits{_where(row, here)}: {command}", 0
    for row in fits:
        if row.largest_micro_batch:
            return (
                f"train.micro_batch_size={requested} does not fit. {row.strategy.name} takes "
                f"{row.largest_micro_batch}."
            ), EXIT_NOTHING_FITS
    remedies = ["more processes", "more memory", "a smaller model or data.block_size"]
    if not model.activation_checkpointing:
        remedies.insert(0, "model.activation_checkpointing=true")
    return f"Nothing fits, not even one sequence. Try {', '.join(remedies)}.", EXIT_NOTHING_FITS


def _where(row: Fit, here: int) -> str:
    """The condition for offloading, which takes the machine's memory."""
    if not row.on_cpu:
        return ""
    needed = here * (row.on_cpu + row.writer) / GIB
    return f" where each machine has {needed:,.1f} GiB of memory left for its {here} processes"
