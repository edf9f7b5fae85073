"""Send a run to a tracker: while it trains, or afterwards, from the files in its directory.

python -m training.reporting.track out/python-docs --to trackio

A run with run.tracker starts this as a process of its own for each tracker. So a tracker that
fails, hangs or is slow costs the run nothing; and as the files hold every step once over all
restarts, so does the tracker's run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from filelock import FileLock
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.schema import ConfigError, RunConfig
from data.public_names import public_config
from snapshot.disk.files import snapshot_folders, snapshots_in, write_whole
from snapshot.disk.state import read_state
from snapshot.errors import SnapshotError
from training.reporting.events import Event
from training.reporting.rows import Rows

FOLDER = "trackers"
"""In a run's directory: for each tracker how far it is, and what went wrong."""
EVERY_SECONDS = 1.0
LAST_SECONDS = 300.0
"""How long this process still sends after the end of its run, before it gives a tracker up."""
NICENESS = 10


def main(arguments: list[str]) -> int:
    """Send what the tracker does not have yet; the exit code: 2 for a user error."""
    options = parse(arguments)
    run_dir = Path(options.run)
    ended = threading.Event()
    if options.follow:
        os.nice(NICENESS)
        threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    else:
        ended.set()
    try:
        run_id = options.run_id or run_id_of(run_dir)
        send(run_dir, options.to, run_id, ended)
    except (ConfigError, SnapshotError, OSError, OmegaConfBaseException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def send(run_dir: Path, name: str, run_id: str, ended: threading.Event) -> None:
    """Send the rows of a run to a tracker, until the run has `ended` and all of them are sent.

    Raises ConfigError for a tracker that is not installed, and what the tracker raises.
    """
    PartialState(cpu=True)  # accelerate's logging needs it; a GPU is the run's
    check_installed([name])
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    with FileLock(folder / f"{name}.lock"):  # the process of the attempt before may still send
        cursor = Cursor(folder / f"{name}.json")
        # A tracker may be a service: the folders of this machine are none of its business.
        plain = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
        config = OmegaConf.create(public_config(cast("dict[str, Any]", plain)))
        tracker = open_tracker(name, run_dir, config, run_id, cursor.step)
        rows = Rows(run_dir, own_step(tracker, cursor.step), cursor.event)
        if rows.step == 0:
            store_config(tracker, config)
        while True:
            complete = ended.wait(EVERY_SECONDS)
            for step, row in rows.next(complete):
                tracker.log(row, step=step)
            cursor.write(rows.step, rows.event)
            if complete:
                break
        tracker.finish()


def check_installed(names: list[str]) -> None:
    """Raise ConfigError for a name that is no installed tracker of accelerate's."""
    installed = sorted(str(tracker) for tracker in get_available_trackers())
    for name in names:
        if name not in installed:
            raise ConfigError(
                f"run.tracker={name} is not installed, or not supported by accelerate. Installed: "
                f"{', '.join(installed) or 'none'} (pip install -r requirements-trackers.txt)."
            )


def open_tracker(name: str, run_dir: Path, config: Any, run_id: str, step: int) -> GeneralTracker:
    """accelerate's tracker of this name: one run over all attempts, where the tracker has that.

    `step` is the last that was sent.
    """
    run_name = str(config.run.name)
    project = str(config.run.get("project") or RunConfig.project)  # older runs have none
    options: dict[str, Any] = {}
    if name == "tensorboard":
        options = {"logging_dir": run_dir / FOLDER / name, "purge_step": step + 1}
        project = run_name
    elif name == "wandb":
        options = {"id": run_id, "name": run_name, "resume": "allow", "dir": run_dir / FOLDER}
    elif name == "trackio":
        options = {"name": f"{run_name}-{run_id[:8]}", "resume": "allow", "embed": False}
        options |= {"auto_log_cpu": False, "auto_log_gpu": False}  # rows without a step
    elif LOGGER_TYPE_TO_CLASS[name].requires_logging_directory:
        options = {"logging_dir": run_dir / FOLDER / name}
    tracker: GeneralTracker = LOGGER_TYPE_TO_CLASS[name](project, **options)
    tracker.start()
    return tracker


def own_step(tracker: GeneralTracker, sent: int) -> int:
    """The last step that the tracker has; `sent` where it cannot tell."""
    after = getattr(tracker.tracker, "_next_step", None)  # of trackio
    return sent if after is None else max(0, int(after) - 1)


class Cursor:
    """How far a tracker is: the last step and the last event that it has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.step = 0
        self.event: Event | None = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(path.read_text())
            self.step, self.event = int(found["step"]), found["event"]

    def write(self, step: int, event: Event | None) -> None:
        """Keep the new place. Raises OSError."""
        if (step, event) != (self.step, self.event):
            write_whole(self._path, json.dumps({"step": step, "event": event}))
            self.step, self.event = step, event


def store_config(tracker: GeneralTracker, config: Any) -> None:
    """Send the configuration by dotted key; to TensorBoard, where that would be a second run, as a
    text.
    """
    if tracker.name == "tensorboard":
        tracker.log({"config": f"```yaml\n{OmegaConf.to_yaml(config)}```"}, step=0)
        return
    plain: dict[str, Any] = {
        f"{section}.{name}": value for section in config for name, value in config[section].items()
    }
    simple = (bool, int, float, str)
    tracker.store_init_configuration(
        {key: value if isinstance(value, simple) else str(value) for key, value in plain.items()}
    )


def run_id_of(run_dir: Path) -> str:
    """The id of a run from its newest snapshot. Raises SnapshotError without one."""
    for folder in snapshot_folders(snapshots_in(run_dir)):
        with suppress(SnapshotError):
            return read_state(folder).run_id
    raise SnapshotError(f"{run_dir} has no snapshot that can be read. Name a run's directory.")


def _wait_for_end(ended: threading.Event) -> None:
    """Wait for the run's word that it ends, or for the end of its process; then a bounded time."""
    with suppress(OSError, ValueError):
        os.read(sys.stdin.fileno(), 1)
    ended.set()
    _give_up_after(LAST_SECONDS, os._exit)


def _give_up_after(seconds: float, leave: Callable[[int], Any]) -> None:
    timer = threading.Timer(seconds, leave, (1,))
    timer.daemon = True
    timer.start()


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with 2 and a usage line for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m training.reporting.track", description="Send a run to a tracker."
    )
    parser.add_argument("run", help="the directory of a run")
    parser.add_argument("--to", required=True, help="tensorboard, trackio, wandb, ...")
    parser.add_argument("--follow", action="store_true", help="until the standard input ends")
    parser.add_argument("--run-id", help="default: that of the newest snapshot")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
