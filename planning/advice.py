"""The advice of a plan: the fastest strategy that fits, or what to change."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from model.causal_lm import ModelConfig
from planning.fits import GIB, Fit

EXIT_NOTHING_FITS = 3
CONFIGS = "accelerate_configs"


def within_machine(fits: list[Fit], here: int, memory: int) -> list[Fit]:
    """The strategies; offloading fits only if a machine has `memory` bytes for it."""
    return [
        replace(row, fits=False, largest_micro_batch=0)
        if row.on_cpu and here * (row.on_cpu + row.writer) > memory
        else row
        for row in fits
    ]


def advise(
    fits: list[Fit],
    model: ModelConfig,
    requested: int | None,
    chosen: str,
    here: int,
    overrides: Sequence[str] = (),
) -> tuple[str, int]:
    """The advice as a sentence, and the exit code. The first strategy that fits is the fastest.

    `requested` is train.micro_batch_size; `chosen` is "=N" for another one, or empty. `here` is the
    number of processes on a machine; `overrides` are the planned arguments of train.py.
    """
    for row in fits:
        if row.fits:
            words = [*overrides]
            if chosen and requested is None:
                words.append(f"train.micro_batch_size{chosen}")
            return f"It fits{_where(row, here)}: {_command(row, here, words)}", 0
    for row in fits:
        if row.largest_micro_batch:
            return (
                f"train.micro_batch_size={requested} does not fit. {row.strategy.name} fits at "
                f"most {row.largest_micro_batch}."
            ), EXIT_NOTHING_FITS
    remedies = ["more processes", "more memory", "a smaller model or data.block_size"]
    if not model.activation_checkpointing:
        remedies.insert(0, "model.activation_checkpointing=true")
    return f"Nothing fits, not even one sequence. Try {', '.join(remedies)}.", EXIT_NOTHING_FITS


def _command(row: Fit, here: int, words: list[str]) -> str:
    """The command for a strategy, with options where the plan differs from its config file."""
    config, shape = f"{CONFIGS}/{row.strategy.config}", row.strategy.shape
    machines = shape.processes // here
    planned = {
        "num_processes": shape.processes,
        "num_machines": machines,
        "mixed_precision": shape.precision,
        "parallelism_config_dp_replicate_size": machines,
        "parallelism_config_dp_shard_size": here,
    }
    file = OmegaConf.to_container(OmegaConf.load(Path(__file__).parent.parent / config))
    assert isinstance(file, dict)
    written = file | file.get("parallelism_config", {})
    options = [
        f"--{name}={planned[name]}"
        for name in planned.keys() & written.keys()
        if written[name] != planned[name]
    ]
    command = ["accelerate", "launch", "--config_file", config, *sorted(options, reverse=True)]
    return shlex.join([*command, "train.py", *words])


def _where(row: Fit, here: int) -> str:
    """The condition for offloading, which takes the machine's memory."""
    if not row.on_cpu:
        return ""
    needed = here * (row.on_cpu + row.writer) / GIB
    return f" where each machine has {needed:,.1f} GiB of memory left for its {here} processes"
