"""Trackers of accelerate, which a run reports to. One that fails costs the run nothing."""

from __future__ import annotations

import time
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


class Tracker(GeneralTracker):
    """A tracker of accelerate's that is off once one of its calls has failed."""

    requires_logging_directory = False

    def __init__(self, name: str, tracker: GeneralTracker, console: Console) -> None:
        self.name = name
        super().__init__()
        self._tracker: GeneralTracker | None = tracker
        self._console = console

    @property
    def tracker(self) -> Any:
        """The run of the tracker's own library; None where it is off."""
        return None if self._tracker is None else self._tracker.tracker

    def start(self) -> None:
        """Begin the run there, or continue it."""
        self._call("start")
        if url := getattr(self.tracker, "url", None):
            self._console.say(f"{self.name:<10}{url}")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Send the configuration of the run."""
        if self.name != "tensorboard":  # accelerate makes a second run of it there
            self._call("store_init_configuration", values)

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Send the values of a step."""
        self._call("log", values, step=step, **options)

    def finish(self, seconds: float = END_SECONDS) -> None:
        """End the run there, and wait at most so long: its server may not answer."""
        thread = Thread(target=self._call, args=["finish"], daemon=True)
        thread.start()
        thread.join(max(0.0, seconds))
        if thread.is_alive():
            self._switch_off("it has not taken all steps in time")
        self._tracker = None

    def _call(self, name: str, *values: Any, **options: Any) -> None:
        if self._tracker is None:
            return
        try:
            getattr(self._tracker, name)(*values, **options)
        except (Exception, SystemExit) as error:  # whatever its library raises
            self._switch_off(" ".join(str(error).split()) or repr(error))

    def _switch_off(self, why: str) -> None:
        self._tracker = None
        self._console.warn(
            f"run.tracker={self.name} is off until the next start: {why.rstrip('.')}. "
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

    def tracker_of(name: str) -> Tracker:
        kind, given = LOGGER_TYPE_TO_CLASS[name], options.get(name, {})
        if kind.requires_logging_directory:  # it makes a folder for the run below its own
            return Tracker(name, kind(run.name, folder / name, **given), console)
        return Tracker(name, kind(run.project, **given), console)

    accelerator.log_with = [tracker_of(str(name)) for name in accelerator.log_with]
    accelerator.init_trackers(run.project, as_plain(config))


def close_trackers(accelerator: Accelerator, seconds: float) -> None:
    """End the run in the trackers, and wait at most so long for all of them."""
    until = time.monotonic() + min(END_SECONDS, seconds)
    for tracker in accelerator.trackers:
        tracker.finish(until - time.monotonic())


def values_of(record: Record) -> dict[str, Any]:
    """What trackers get of a line of metrics: train/loss, eval/loss, ..., or the sample."""
    if record["event"] == "sample":
        return {"sample": record["text"]}
    return {
        f"{record['event']}/{name}": float(value) if isinstance(value, bool) else value
        for name, value in record.items()
        if name not in ("event", "step") and isinstance(value, int | float)
    }
