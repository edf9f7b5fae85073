"""Trackers of accelerate, which a run reports to. One that fails costs the run nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    TensorBoardTracker,
    WandBTracker,
)

from config.schema import Config, ConfigError
from config.stored import as_plain
from store.records import METRICS
from training.reporting.console import Console
from training.reporting.metrics import Record, read_metrics

FOLDER = "trackers"
"""A folder of the run's directory, for the files of trackers that have any."""
SENT_AGAIN = 1_000
"""Steps before a snapshot that are sent again at a resume: a kill may have come before they were
sent. They have the same values."""
END_SECONDS = 30.0
"""How long the end of a run waits for all of its trackers."""


class TensorBoard(TensorBoardTracker):
    """TensorBoard with the configuration as a text: accelerate's makes a second run of it."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write a line for each key."""
        lines = "\n".join(f"    {key}: {value}" for key, value in values.items())
        self.writer.add_text("config", lines)


class WandB(WandBTracker):
    """W&B with the step as a metric: its own steps only rise, and it drops what comes late."""

    def start(self) -> None:
        """Begin the run, or continue it. Without a key, fail and do not ask for one."""
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        super().start()
        self.run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Add a row."""
        super().log(values if step is None else values | {"step": step}, **options)


OURS = {"tensorboard": TensorBoard, "wandb": WandB}


class Tracker(GeneralTracker):
    """A tracker of accelerate's that is off once one of its calls has failed."""

    requires_logging_directory = False

    def __init__(self, name: str, make: Callable[[], GeneralTracker], console: Console) -> None:
        self.name = name
        super().__init__()
        self._make, self._console = make, console
        self._tracker: GeneralTracker | None = None

    @property
    def tracker(self) -> Any:
        """The run of the tracker's own library; None where it is off."""
        return None if self._tracker is None else self._tracker.tracker

    def start(self) -> None:
        """Begin the run there, or continue it."""

        def begin(_: object) -> None:
            self._tracker = self._make()
            self._tracker.start()
            if url := getattr(self._tracker.tracker, "url", None):
                self._console.say(f"{self.name:<10}{url}")

        self._call(begin)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Send the configuration of the run."""
        if self._tracker is not None:
            self._call(lambda tracker: tracker.store_init_configuration(values))

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Send the values of a step."""
        if self._tracker is not None:
            self._call(lambda tracker: tracker.log(values, step=step, **options))

    def finish(self, seconds: float = END_SECONDS) -> None:
        """End the run there, and wait at most so long: its server may not answer."""
        if self._tracker is None:
            return
        thread = Thread(target=self._call, args=[lambda t: t.finish()], daemon=True)
        thread.start()
        thread.join(max(0.0, seconds))
        if thread.is_alive():
            self._switch_off("it has not taken all steps in time")
        self._tracker = None

    def _call(self, call: Callable[[Any], object]) -> None:
        try:
            call(self._tracker)
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
    run, folder, sent = config.run, Path(config.run.dir) / FOLDER, max(0, step - SENT_AGAIN)
    folder.mkdir(exist_ok=True)
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"purge_step": sent + 1},
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

    def maker(name: str) -> Callable[[], GeneralTracker]:
        kind = OURS.get(name, LOGGER_TYPE_TO_CLASS[name])
        if kind.requires_logging_directory:  # it makes a folder for the run below its own
            return lambda: kind(run.name, folder / name, **options.get(name, {}))
        return lambda: kind(run.project, **options.get(name, {}))

    names = map(str, accelerator.log_with)
    accelerator.log_with = [Tracker(name, maker(name), console) for name in names]
    accelerator.init_trackers(run.project, _by_key(as_plain(config)))
    with suppress(ConfigError, OSError):  # of lines that are damaged, or not readable for now
        for record in read_metrics(Path(run.dir) / METRICS, sent):
            accelerator.log(values_of(record), step=record["step"])


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


def _by_key(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration by dotted key, as numbers and texts."""
    simple = (bool, int, float, str)
    return {
        f"{section}.{name}": value if isinstance(value, simple) else str(value)
        for section, values in config.items()
        for name, value in values.items()
    }
