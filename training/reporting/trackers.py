"""Trackers of accelerate, which a run reports to. One that fails costs the run nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from config.schema import Config
from config.stored import as_plain
from store.latest import METRICS
from training.distributed.launcher import set_for_library
from training.reporting.console import Console
from training.reporting.metrics import Record

FOLDER = "trackers"
"""A folder of the run's directory, for the files of trackers that have any."""
END_SECONDS = 30.0
"""How long the end of a run waits for all of its trackers."""


CALLS = ("start", "store_init_configuration", "log", "finish")


def guard(tracker: GeneralTracker, console: Console) -> GeneralTracker:
    """Switch a tracker off, with one warning, once one of its calls has failed."""

    def guarded(call: Callable[..., None]) -> Callable[..., None]:
        def run(*values: Any, **options: Any) -> None:
            try:
                call(*values, **options)
            except (Exception, SystemExit) as error:  # whatever its library raises
                switch_off(tracker, console, " ".join(str(error).split()) or repr(error))

        return run

    for name in CALLS:
        setattr(tracker, name, guarded(getattr(tracker, name)))
    return tracker


def switch_off(tracker: GeneralTracker, console: Console, why: str) -> None:
    """Have all later calls of a tracker do nothing, and say why."""
    for name in CALLS:
        setattr(tracker, name, lambda *values, **options: None)
    console.warn(
        f"run.tracker={tracker.name} is off until the next start: {why.rstrip('.')}. "
        f"{METRICS} has every step."
    )


def open_trackers(
    accelerator: Accelerator, console: Console, config: Config, run_id: str, step: int
) -> None:
    """Begin to report a run that continues after `step`. Every process may call this.

    All attempts are one run, if the tracker supports that.
    """
    if not accelerator.is_main_process or not accelerator.log_with:
        return
    run, folder = config.run, Path(config.run.dir) / FOLDER
    folder.mkdir(exist_ok=True)
    set_for_library("WANDB_SILENT", "true")  # it would ask for a key at a terminal
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"purge_step": step + 1},
        # Nothing of the console, the command line or the folders of this machine.
        "wandb": {
            "id": run_id,
            "name": run.name,
            "resume": "allow",
            "dir": folder,
            "settings": {"console": "off", "x_disable_meta": True, "disable_git": True},
        },
        # Rows of the machine's load have no step.
        "trackio": {
            "name": f"{run.name}-{run_id[:8]}",
            "resume": "allow",
            "embed": False,
            "auto_log_cpu": False,
            "auto_log_gpu": False,
        },
    }

    trackers = []
    for name in map(str, accelerator.log_with):
        kind = LOGGER_TYPE_TO_CLASS[name]
        # One that has a folder makes one for the run below it.
        places = (run.name, folder / name) if kind.requires_logging_directory else (run.project,)
        trackers.append(guard(kind(*places, **options.get(name, {})), console))
    accelerator.log_with = trackers
    accelerator.init_trackers(run.project)
    for tracker in trackers:
        if tracker.name != "tensorboard":  # accelerate would make a second run of it there
            tracker.store_init_configuration(as_plain(config))
        if url := getattr(getattr(tracker, "tracker", None), "url", None):
            console.say(f"{tracker.name:<10}{url}")


def close_trackers(accelerator: Accelerator, console: Console, seconds: float) -> None:
    """End the run in the trackers, and wait at most so long: their servers may not answer."""
    until = time.monotonic() + min(END_SECONDS, seconds)
    for tracker in accelerator.trackers:
        thread = Thread(target=tracker.finish, daemon=True)
        thread.start()
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            switch_off(tracker, console, "it has not taken all steps in time")
    accelerator.trackers = []  # accelerator.end_training would wait for them once more


def values_of(record: Record) -> dict[str, Any]:
    """What trackers get of a line of metrics: train/loss, eval/loss, ..., or the sample."""
    if record["event"] == "sample":
        return {"sample": record["text"]}
    return {
        f"{record['event']}/{name}": float(value) if isinstance(value, bool) else value
        for name, value in record.items()
        if name not in ("event", "step") and isinstance(value, int | float)
    }
